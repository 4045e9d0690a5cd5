"""A training that ``snip launch`` starts: a known configuration with changes, and its arguments for Megatron."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.models import Llama, load_llama
from snip_megatron.precision.errors import SnipError, cut

MOCK = "mock"
#: Megatron's file in the folder of the checkpoints, with the step of the newest one.
TRACKER = "latest_checkpointed_iteration.txt"
#: Megatron's arguments that name data. If the extra arguments hold one of them, ``--data`` is not needed.
_DATA_ARGUMENTS = ("--data-path", "--train-data-path", "--data-args-path", "--per-split-data-args-path", "--mock-data")
_RECOMPUTE = {
    "none": "",
    "selective": "--recompute-granularity selective",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


@dataclass(frozen=True)
class Configuration:
    """A known configuration: values of the arguments of ``snip launch``, which the user's replace, and a schedule.

    Attributes:
        title: name of the model for readers.
        dp: data parallel size, which decides ``nodes`` where that is None.
        tokens: tokens of the whole run.
        lr: largest learning rate of a cosine schedule that ends at a tenth of it.
    """

    title: str
    model: str
    tp: int
    pp: int
    dp: int
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    tokens: float
    lr: float
    recompute: str = "none"
    gpus_per_node: int = 8
    nodes: int | None = None


CONFIGURATIONS = {
    "1b": Configuration("TinyLlama 1.1B", "llama-1b", 1, 1, 8, 2048, 8, 1024, 3e12, 4e-4),
    # Fused attention needs heads of a multiple of 8 features, and these have 100. Unfused attention would keep its
    # scores for the backward, so they are recomputed.
    "3b": Configuration("OpenLLaMA 3B", "llama-3b", 1, 1, 8, 2048, 4, 2048, 1e12, 3e-4, "selective"),
    "7b": Configuration("OpenLLaMA 7B", "llama-7b", 1, 1, 8, 2048, 2, 2048, 1e12, 3e-4),
    "70b": Configuration("Llama 3 70B", "llama-70b", 8, 4, 2, 8192, 1, 512, 15e12, 1.5e-4),
    "70b-pp8": Configuration("Llama 3 70B", "llama-70b", 8, 8, 1, 8192, 1, 512, 15e12, 1.5e-4),
}


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        nodes: with ``asked.gpus_per_node`` on each, as many GPUs as the layout has ranks.
        data: a folder of ``snip prepare-data``, ``mock``, or None if ``extra`` names the data.
        load: equal to ``save`` if the run resumes from the newest checkpoint there, or begins anew without one. None if
            it does not resume, or if ``extra`` names another checkpoint to begin with.
        smoke: whether this is a trial with a shrunk model.
        extra: arguments of Megatron that override all others, except ``load``.
    """

    asked: Configuration
    model: Llama
    layout: Layout
    nodes: int
    data: str | None
    save: Path
    load: Path | None
    snip: bool
    smoke: bool
    extra: Sequence[str]


def make_job(
    configuration: str,
    *,
    data: str | None = None,
    save: Path | None = None,
    resume: bool = True,
    snip: bool = True,
    smoke: bool = False,
    extra: Sequence[str] = (),
    **changes: Any,
) -> Job:
    """Build a job from the arguments of ``snip launch``.

    ``changes`` are values of fields of the configuration. None leaves one as it is. Raises SnipError if a name is
    unknown, sizes do not fit together, or files are missing.
    """
    if configuration not in CONFIGURATIONS:
        known = ", ".join(CONFIGURATIONS)
        raise SnipError(f"{cut(configuration)}: no such configuration; choose one of {known}, and --model for another")
    base = CONFIGURATIONS[configuration]
    given = {name: value for name, value in changes.items() if value is not None}
    asked = replace(base, **given)
    llama = load_llama(asked.model)
    if "model" in given:
        asked = replace(asked, title=llama.name)
    tp, pp, gpus_per_node = asked.tp, asked.pp, asked.gpus_per_node
    nodes = max(1, base.tp * base.pp * base.dp // max(1, gpus_per_node)) if asked.nodes is None else asked.nodes
    dp = _data_parallel(nodes, gpus_per_node, tp, pp)
    sizes = (
        asked.seq_length if "seq_length" in given else min(asked.seq_length, llama.context),
        asked.micro_batch_size,
        asked.global_batch_size,
    )
    if smoke:
        llama, sizes = _shrunk(llama, pp), (64, 1, 2 * pp * dp)
    layout = Layout(
        llama.model(pp), tp, pp, 1, dp, *sizes, sequence_parallel=tp > 1, recompute=asked.recompute,
        overlap_grad_reduce=True, overlap_param_gather=True,
    ).checked()  # fmt: skip
    other_save = last_value(extra, "--save")
    folder = _save(save if other_save is None else Path(other_save))
    goes_on = resume and (last_value(extra, "--load") is None or holds_checkpoint(folder))
    load = folder if goes_on else None
    return Job(asked, llama, layout, nodes, _data(data, smoke, extra), folder, load, snip, smoke, extra)


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


def _shrunk(model: Llama, pp: int) -> Llama:
    """Return a small model that trains on a CPU, with grouped attention if the original has it."""
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


def _data(data: str | None, smoke: bool, extra: Sequence[str]) -> str | None:
    words = {word.partition("=")[0] for word in extra}
    given = next((name for name in _DATA_ARGUMENTS if name in words), None)
    if data is None:
        if given is None and not smoke:
            raise SnipError(
                "--data: missing; give a folder of snip prepare-data, mock for random tokens, or Megatron's own"
                " (--megatron --data-path ...)"
            )
        return None if given is not None else MOCK
    if given is not None:
        raise SnipError(f"--data {data} cannot be combined with {given}: give one of them")
    for name in () if data == MOCK else ("train.idx", "train.bin", "valid.idx", "valid.bin", "tokenizer"):
        if not (Path(data) / name).exists():
            raise SnipError(
                f"--data {data}: there is no {name} in it; make it with snip prepare-data --output {data} TEXTS"
            )
    return data


# -- arguments ---------------------------------------------------------------------------------------------------
def megatron_arguments(job: Job) -> list[str]:
    """Return all arguments after ``-m snip_megatron.pretrain_gpt``.

    The user's override the others, except ``--load``: a job that is started again goes on from its own checkpoint.
    """
    parts = (
        _model(job),
        _layout(job.layout),
        _training(job),
        _data_words(job),
        ["--save", str(job.save), "--save-interval", "10" if job.smoke else "500"],
        ["--exit-signal-handler"],  # on a signal, a checkpoint after the current step
        _snip(job),
        job.extra,
    )
    load = [] if job.load is None else ["--load", str(job.load)]
    return [*(word for part in parts for word in part), *load]


def _model(job: Job) -> list[str]:
    model, layout = job.model, job.layout
    text = (
        f"--num-layers {model.blocks} --hidden-size {model.hidden} --ffn-hidden-size {model.ffn}"
        f" --num-attention-heads {model.heads} --kv-channels {model.head_size}"
    )
    if model.groups != model.heads:
        text += f" --group-query-attention --num-query-groups {model.groups}"
    text += (
        f" --seq-length {layout.seq_length} --max-position-embeddings {max(layout.seq_length, model.context)}"
        f" --position-embedding-type rope --rotary-base {model.rotary_base}"
        f" --normalization RMSNorm --norm-epsilon {model.norm_epsilon:g} --swiglu --disable-bias-linear"
        " --attention-dropout 0 --hidden-dropout 0 --bf16 --untie-embeddings-and-output-weights"
    )
    return text.split()


def _layout(layout: Layout) -> list[str]:
    text = (
        f"--tensor-model-parallel-size {layout.tp} --pipeline-model-parallel-size {layout.pp}"
        f" --micro-batch-size {layout.micro_batch_size} --global-batch-size {layout.global_batch_size}"
        " --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    )
    if layout.sequence_parallel:
        text += " --sequence-parallel"
    return f"{text} {_RECOMPUTE[layout.recompute]}".split()


def _training(job: Job) -> list[str]:
    lr, layout = job.asked.lr, job.layout
    steps = 20 if job.smoke else round(job.asked.tokens / (layout.global_batch_size * layout.seq_length))
    warmup, log, evaluate = (2, 1, 10) if job.smoke else (2000, 10, 1000)
    return (
        f"--train-iters {steps} --lr {lr:g} --min-lr {lr / 10:g} --lr-decay-style cosine"
        f" --lr-warmup-iters {warmup} --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0"
        f" --init-method-std 0.02 --seed 1234 --log-interval {log} --eval-interval {evaluate}"
        f" --eval-iters {1 if job.smoke else 10} --distributed-timeout-minutes 30"
    ).split()


def _data_words(job: Job) -> list[str]:
    if job.data is None:
        return []
    workers = ["--num-workers", "0" if job.smoke else "2"]
    if job.data == MOCK:
        # The null tokenizer adds one token to --vocab-size.
        size = str(job.model.vocabulary - 1)
        return ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", size, *workers]
    data = job.data.rstrip("/")
    return [
        *("--train-data-path", f"{data}/train", "--valid-data-path", f"{data}/valid"),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", f"{data}/tokenizer", *workers),
    ]


def _snip(job: Job) -> list[str]:
    if not job.snip:
        return []
    found = ["--snip"]
    if job.smoke:
        found += ["--snip-first-update", "2", "--snip-update-interval", "10", "--snip-lag", "4", "--snip-wait", "120"]
    return found


def progress(job: Job) -> tuple[int, int]:
    """Return the step of the newest checkpoint in the folder for checkpoints, 0 without one, and the steps in all."""
    steps = last_value(megatron_arguments(job), "--train-iters")
    assert steps is not None
    try:
        saved = int((job.save / TRACKER).read_text(encoding="ascii"))
    except (OSError, ValueError):  # no checkpoint, or one that a kill left without a name
        saved = 0
    return saved, int(steps)
