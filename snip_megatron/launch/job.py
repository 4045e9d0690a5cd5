"""Turns the arguments of ``snip launch`` into a checked job: model, layout, data and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from snip_megatron.errors import SnipError
from snip_megatron.launch.configurations import GPUS_PER_NODE, Recipe, constants, find
from snip_megatron.planner.layout import Layout
from snip_megatron.timing.models import ModelShape, load_model

MOCK = "mock"
#: Megatron's file in the folder of the checkpoints, with the step of the newest one.
TRACKER = "latest_checkpointed_iteration.txt"
#: Megatron's arguments that name data. If the extra arguments hold one of them, ``--data`` is not needed.
_DATA_ARGUMENTS = ("--data-path", "--train-data-path", "--data-args-path", "--per-split-data-args-path", "--mock-data")


@dataclass(frozen=True)
class Wishes:
    """The arguments of ``snip launch``. None means the value of the configuration."""

    configuration: str
    model: str | None = None
    tp: int | None = None
    pp: int | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    seq_length: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    recompute: str | None = None
    data: str | None = None
    save: Path | None = None
    resume: bool = True
    snip: bool = True
    smoke: bool = False
    extra: Sequence[str] = ()


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        title: Name of the model.
        layout: Model, parallel sizes and batch sizes.
        recipe: Hyperparameters.
        nodes: Number of nodes.
        gpus_per_node: GPUs per node. With ``nodes`` it gives the ranks of the layout.
        data: A folder of ``snip prepare-data``, ``mock``, or None if ``extra`` names the data.
        save: Folder of the checkpoints.
        load: Equal to ``save`` if the run resumes from the newest checkpoint there, or begins anew without one. None if
            it does not resume, or if ``extra`` names another checkpoint to begin with.
        snip: Whether SNIP is on.
        smoke: Whether this is a trial with a shrunk model.
        extra: Arguments of Megatron that override all others, except ``load``.
    """

    title: str
    layout: Layout
    recipe: Recipe
    nodes: int
    gpus_per_node: int
    data: str | None
    save: Path
    load: Path | None
    snip: bool
    smoke: bool
    extra: Sequence[str]


def make_job(wishes: Wishes) -> Job:
    """Build the job.

    Raises:
        SnipError: If a name is unknown, if sizes do not fit together, or if files are missing.
    """
    base = find(wishes.configuration)
    model = load_model(wishes.model or base.model)
    recipe = base.recipe
    if wishes.model is not None:
        epsilon, rotary = constants(wishes.model)
        recipe = replace(recipe, norm_epsilon=epsilon, rotary_base=rotary)
    tp, pp = _given(wishes.tp, base.tp), _given(wishes.pp, base.pp)
    gpus_per_node = _given(wishes.gpus_per_node, GPUS_PER_NODE)
    nodes = _given(wishes.nodes, max(1, base.nodes * GPUS_PER_NODE // max(1, gpus_per_node)))
    dp = _data_parallel(nodes, gpus_per_node, tp, pp)
    seq_length = _given(wishes.seq_length, min(base.seq_length, model.context))
    micro = _given(wishes.micro_batch_size, base.micro_batch_size)
    batch = _given(wishes.global_batch_size, base.global_batch_size)
    if wishes.smoke:
        model, seq_length, micro, batch = _shrunk(model, pp), 64, 1, 2 * pp * dp
    layout = Layout(
        model=model,
        tp=tp,
        pp=pp,
        vpp=1,
        dp=dp,
        seq_length=seq_length,
        micro_batch_size=micro,
        global_batch_size=batch,
        sequence_parallel=tp > 1,
        recompute=wishes.recompute or base.recompute,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    given = last_value(wishes.extra, "--save")
    save = _save(wishes.save if given is None else Path(given))
    return Job(
        title=base.title if wishes.model is None else model.name,
        layout=layout,
        recipe=recipe,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        data=_data(wishes),
        save=save,
        load=save if wishes.resume and _goes_on(save, wishes.extra) else None,
        snip=wishes.snip,
        smoke=wishes.smoke,
        extra=wishes.extra,
    )


def _given(asked: int | None, default: int) -> int:
    """Return the default only if nothing was asked: 0 is refused later and must not be taken for it."""
    return default if asked is None else asked


def _data_parallel(nodes: int, gpus_per_node: int, tp: int, pp: int) -> int:
    for name, value in (("nodes", nodes), ("gpus-per-node", gpus_per_node), ("tp", tp), ("pp", pp)):
        if value < 1:
            raise SnipError(f"--{name} {value}: must be 1 or more")
    gpus, copy = nodes * gpus_per_node, tp * pp
    if gpus % copy:
        raise SnipError(
            f"{gpus} GPUs (--nodes {nodes} × --gpus-per-node {gpus_per_node}) are no multiple of"
            f" --tp {tp} × --pp {pp} = {copy}, one copy of the model"
        )
    return gpus // copy


def _shrunk(model: ModelShape, pp: int) -> ModelShape:
    """Return a small model that trains on a CPU, with grouped attention and tied weights if the original has them."""
    groups = 8 if model.groups == model.heads else 4
    return replace(
        model, blocks=max(2, pp), hidden=128, ffn=256, heads=8, groups=groups, head_size=16, vocabulary=512, context=64
    )


def _save(path: Path | None) -> Path:
    if path is None:
        raise SnipError("--save: missing; give the folder for checkpoints, on storage that all nodes share")
    if path.exists() and not path.is_dir():
        raise SnipError(f"--save {path}: is no folder")
    return path


def _goes_on(save: Path, extra: Sequence[str]) -> bool:
    """Whether the job goes on from ``save``: always, unless ``--load`` names where the first start begins."""
    return last_value(extra, "--load") is None or holds_checkpoint(save)


def holds_checkpoint(folder: Path) -> bool:
    """Whether Megatron has finished a checkpoint in the folder."""
    return (folder / TRACKER).is_file()


def last_value(words: Sequence[str], name: str) -> str | None:
    """Return the last value of an argument, given as ``NAME VALUE`` or as ``NAME=VALUE``; None without one."""
    found = None
    for position, word in enumerate(words):
        if word == name and position + 1 < len(words):
            found = words[position + 1]
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def _data(wishes: Wishes) -> str | None:
    words = {word.partition("=")[0] for word in wishes.extra}
    given = next((name for name in _DATA_ARGUMENTS if name in words), None)
    if wishes.data is None:
        if given is None and not wishes.smoke:
            raise SnipError(
                "--data: missing; give a folder of snip prepare-data, mock for random tokens, or Megatron's own"
                " (--megatron --data-path ...)"
            )
        return None if given is not None else MOCK
    if given is not None:
        raise SnipError(f"--data {wishes.data} cannot be combined with {given}: give one of them")
    if wishes.data != MOCK:
        for name in ("train.idx", "train.bin", "valid.idx", "valid.bin", "tokenizer"):
            if not (Path(wishes.data) / name).exists():
                raise SnipError(
                    f"--data {wishes.data}: there is no {name} in it; make it with snip prepare-data --output"
                    f" {wishes.data} TEXTS"
                )
    return wishes.data
