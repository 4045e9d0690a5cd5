"""``snip launch``: trains a known configuration with torchrun on this node, or as one node of several.

:data:`CONFIGURATIONS` is the table of known configurations. :func:`make_job` applies the user's changes to one of them,
:func:`megatron_arguments` turns the job into the arguments of ``snip_megatron.pretrain_gpt``, and
:mod:`snip_megatron.tools.torchrun` runs it.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.models import Llama, load_llama
from snip_megatron.precision.errors import SnipError, cut, is_number

if TYPE_CHECKING:
    from snip_megatron.tools.argument_check import Training

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
#: The card whose measured times the forecast uses.
_TIMINGS = "h200"


# -- configurations and jobs ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Configuration:
    """A known configuration. The user's arguments of the same names replace its values."""

    title: str  # name of the model for readers
    model: str
    tp: int
    pp: int
    dp: int  # data parallel size, which decides ``nodes`` if that is None
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    tokens: float  # tokens of the whole run
    lr: float  # largest learning rate of a cosine schedule that ends at a tenth of it
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
    """One training run."""

    configuration: Configuration  # the known configuration with the user's changes
    model: Llama
    layout: Layout
    nodes: int  # with ``configuration.gpus_per_node`` on each, as many GPUs as the layout has ranks
    data: str | None  # a folder of ``snip prepare-data``, ``mock``, or None if ``extra`` names the data
    save: Path
    # equal to ``save`` if the run resumes from the newest checkpoint there, or begins anew without one. None if it does
    # not resume, or if ``extra`` names another checkpoint to begin with
    load: Path | None
    snip: bool
    smoke: bool  # whether this is a trial with a small model
    graphs: bool  # whether Transformer Engine's CUDA graphs replay the layers, which then do not wait for the host
    extra: Sequence[str]  # arguments of Megatron that override all others, except ``load``


def make_job(
    name: str,
    *,
    data: str | None = None,
    save: Path | None = None,
    resume: bool = True,
    snip: bool = True,
    smoke: bool = False,
    cpu: bool = False,
    extra: Sequence[str] = (),
    **changes: Any,
) -> Job:
    """Build a job from the arguments of ``snip launch``.

    ``changes`` are values of fields of the configuration ``name``. A value of None changes nothing. Raises SnipError if
    a name is unknown, sizes do not fit together, or files are missing.
    """
    preset = CONFIGURATIONS.get(name)
    if preset is None:
        names = ", ".join(CONFIGURATIONS)
        raise SnipError(f"{cut(name)}: no such configuration; choose one of {names}, and --model for another")
    changes = {field: value for field, value in changes.items() if value is not None}
    configuration = replace(preset, **changes)
    model = load_llama(configuration.model)
    if "model" in changes:
        configuration = replace(configuration, title=model.name)
    tp, pp, gpus_per_node, nodes = configuration.tp, configuration.pp, configuration.gpus_per_node, configuration.nodes
    if nodes is None:
        nodes = max(1, preset.tp * preset.pp * preset.dp // max(1, gpus_per_node))
    for argument, value in (("nodes", nodes), ("gpus-per-node", gpus_per_node), ("tp", tp), ("pp", pp)):
        if value < 1:
            raise SnipError(f"--{argument} {value}: must be 1 or more")
    dp, remainder = divmod(nodes * gpus_per_node, tp * pp)
    if remainder:
        raise SnipError(
            f"{nodes * gpus_per_node} GPUs (--nodes {nodes} × --gpus-per-node {gpus_per_node}) are no multiple of"
            f" --tp {tp} × --pp {pp} = {tp * pp}, one copy of the model"
        )
    seq_length = configuration.seq_length
    if "seq_length" not in changes:
        seq_length = min(seq_length, model.context)
    sizes = (seq_length, configuration.micro_batch_size, configuration.global_batch_size)
    if smoke:  # a small model that trains on a CPU, with grouped attention if the original has it
        model = replace(
            model, blocks=max(2, pp), hidden=128, ffn=256, heads=8, groups=8 if model.groups == model.heads else 4,
            head_size=16, vocabulary=512, context=64,
        )  # fmt: skip
        sizes = (64, 1, 2 * pp * dp)
    layout = Layout(
        model.model(pp), tp, pp, 1, dp, *sizes, sequence_parallel=tp > 1, recompute=configuration.recompute,
        overlap_grad_reduce=True, overlap_param_gather=True,
    ).checked()  # fmt: skip
    extra_save = last_value(extra, "--save")
    folder = save if extra_save is None else Path(extra_save)
    if folder is None:
        raise SnipError("--save: missing; give the folder for checkpoints, on storage that all nodes share")
    if folder.exists() and not folder.is_dir():
        raise SnipError(f"--save {folder}: is no folder")
    resumes = resume and (last_value(extra, "--load") is None or holds_checkpoint(folder))
    load = folder if resumes else None
    data = _check_data(data, smoke, extra)
    # They have not run with recomputation, and several stages keep graphs of every microbatch in flight.
    graphs = not cpu and pp == 1 and configuration.recompute == "none"
    graphs = graphs and importlib.util.find_spec("transformer_engine") is not None
    return Job(configuration, model, layout, nodes, data, folder, load, snip, smoke, graphs, extra)


def _check_data(data: str | None, smoke: bool, extra: Sequence[str]) -> str | None:
    """Return ``data``, ``mock`` for a trial without data, or None if ``extra`` names the data."""
    words = {word.partition("=")[0] for word in extra}
    extra_data = next((name for name in _DATA_ARGUMENTS if name in words), None)
    if data is None:
        if extra_data is None and not smoke:
            raise SnipError(
                "--data: missing; give a folder of snip prepare-data, mock for random tokens, or Megatron's own"
                " (--megatron --data-path ...)"
            )
        return None if extra_data is not None else MOCK
    if extra_data is not None:
        raise SnipError(f"--data {data} cannot be combined with {extra_data}: give one of them")
    for name in () if data == MOCK else ("train.idx", "train.bin", "valid.idx", "valid.bin", "tokenizer"):
        if not (Path(data) / name).exists():
            raise SnipError(
                f"--data {data}: there is no {name} in it; make it with snip prepare-data --output {data} TEXTS"
            )
    return data


def holds_checkpoint(folder: Path) -> bool:
    """Whether Megatron has finished a checkpoint in the folder."""
    return (folder / TRACKER).is_file()


def last_value(words: Sequence[str], name: str) -> str | None:
    """Return the last value of an argument, written as ``NAME VALUE`` or ``NAME=VALUE``. None if it is not there."""
    value = None
    for position, word in enumerate(words):
        if word == name and position + 1 < len(words):
            value = words[position + 1]
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value


def progress(job: Job) -> tuple[int, int]:
    """Return the step of the newest checkpoint, or 0 if there is none, and the number of steps of the whole run."""
    steps = last_value(megatron_arguments(job), "--train-iters")
    assert steps is not None
    try:
        saved = int((job.save / TRACKER).read_text(encoding="ascii"))
    except (OSError, ValueError):  # no checkpoint, or a kill left the file empty
        saved = 0
    return saved, int(steps)


# -- arguments of the training -------------------------------------------------------------------------------------
def megatron_arguments(job: Job) -> list[str]:
    """Return all arguments after ``-m snip_megatron.pretrain_gpt``.

    The user's override the others, except ``--load``: a job that is started again goes on from its own checkpoint.
    """
    model, layout, smoke, lr = job.model, job.layout, job.smoke, job.configuration.lr
    steps = 20 if smoke else round(job.configuration.tokens / (layout.global_batch_size * layout.seq_length))
    warmup, log, evaluate = (2, 1, 10) if smoke else (2000, 10, 1000)
    groups = f" --group-query-attention --num-query-groups {model.groups}" if model.groups != model.heads else ""
    text = (
        f"--num-layers {model.blocks} --hidden-size {model.hidden} --ffn-hidden-size {model.ffn}"
        f" --num-attention-heads {model.heads} --kv-channels {model.head_size}{groups}"
        f" --seq-length {layout.seq_length} --max-position-embeddings {max(layout.seq_length, model.context)}"
        f" --position-embedding-type rope --rotary-base {model.rotary_base}"
        f" --normalization RMSNorm --norm-epsilon {model.norm_epsilon:g} --swiglu --disable-bias-linear"
        " --attention-dropout 0 --hidden-dropout 0 --bf16 --untie-embeddings-and-output-weights"
        f" --tensor-model-parallel-size {layout.tp} --pipeline-model-parallel-size {layout.pp}"
        f" --micro-batch-size {layout.micro_batch_size} --global-batch-size {layout.global_batch_size}"
        f" --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather {_RECOMPUTE[layout.recompute]}"
        f" --train-iters {steps} --lr {lr:g} --min-lr {lr / 10:g} --lr-decay-style cosine"
        f" --lr-warmup-iters {warmup} --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0"
        f" --init-method-std 0.02 --seed 1234 --log-interval {log} --eval-interval {evaluate}"
        f" --eval-iters {1 if smoke else 10} --distributed-timeout-minutes 30 --save-interval {10 if smoke else 500}"
        " --exit-signal-handler"  # on a signal, a checkpoint after the current step
    )
    if layout.sequence_parallel:
        text += " --sequence-parallel"
    if job.graphs:
        text += " --cuda-graph-impl transformer_engine --te-rng-tracker"
    if job.snip:
        text += " --snip"
    if job.snip and smoke:
        text += " --snip-first-update 2 --snip-update-interval 10 --snip-lag 4 --snip-wait 120"
    words = [*text.split(), "--save", str(job.save), *_data_arguments(job), *job.extra]
    return words if job.load is None else [*words, "--load", str(job.load)]


def _data_arguments(job: Job) -> list[str]:
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


# -- the command ---------------------------------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``snip launch``. Those that Megatron has too have the same names."""
    add = parser.add_argument
    add("configuration", metavar="CONFIGURATION", help="1b, 3b, 7b, 70b (TP8 × PP4 × DP2) or 70b-pp8 (TP8 × PP8)")
    add("--data", metavar="DIR", help="folder that snip prepare-data wrote; or mock, for random tokens")
    add("--save", type=Path, metavar="DIR", help="folder for checkpoints; a run resumes from the newest one there")
    add("--no-resume", dest="resume", action="store_false", help="start anew even if --save holds a checkpoint")
    add("--model", metavar="NAME", help="another Llama: 1b, 3b, 7b, 8b, 70b or 405b")
    for name, text in (("tp", "tensor parallel size"), ("pp", "pipeline parallel size")):
        add(f"--{name}", type=int, metavar="N", help=f"{text}; default: the configuration's")
    add("--nodes", type=int, metavar="N", help="nodes of the job; default: as many as the configuration's GPUs need")
    add("--gpus-per-node", type=int, metavar="N", help="ranks on each node; default: 8")
    for name, text in (("seq-length", "tokens of a sequence"), ("micro-batch-size", "sequences of a microbatch")):
        add(f"--{name}", type=int, metavar="N", help=f"{text}; default: the configuration's")
    add("--global-batch-size", type=int, metavar="N", help="sequences of a step; default: the configuration's")
    add("--recompute", choices=tuple(_RECOMPUTE), help="activations to recompute in the backward")
    add("--no-snip", dest="snip", action="store_false", help="train with plain Megatron, for comparison")
    add("--smoke", action="store_true", help="train a tiny model for 20 steps with the same arguments, as a test")
    add("--cpu", action="store_true", help="run the ranks on the CPU over gloo, to try --smoke without a GPU")
    add("--rendezvous", metavar="HOST:PORT", help="for several nodes: one of them, with a free port; the same on all")
    add("--rendezvous-id", default="snip", metavar="ID", help="this job's name, the same on all nodes; default: snip")
    text = "address of this node, if its host name does not resolve; route: that from which it reaches the rendezvous"
    add("--local-address", metavar="ADDR|route", help=text)
    text = "let Megatron and SNIP check all arguments, and print the forecast of snip plan for H200s; start nothing"
    add("--check", action="store_true", help=text)
    add("--dry-run", action="store_true", help="print the exact command; start nothing")
    add("--hardware", action="store_true", help="print NODES GPUS_PER_NODE and exit; for scripts of schedulers")
    add("--progress", action="store_true", help="print SAVED STEPS (newest checkpoint, end of training) and exit")
    text = "all arguments that follow are passed to Megatron, and override the configuration"
    add("--megatron", dest="extra", nargs=argparse.REMAINDER, default=[], metavar="...", help=text)


def run(args: argparse.Namespace) -> int:
    """Train. Returns torchrun's exit code. Raises SnipError on bad input before anything is started."""
    from snip_megatron.tools import torchrun
    from snip_megatron.tools.argument_check import check_arguments

    # A trial on CPUs is one of this machine.
    alone = {"nodes": 1} if args.cpu and args.smoke and args.nodes is None and args.rendezvous is None else {}
    job = make_job(
        args.configuration,
        data=args.data,
        save=args.save,
        resume=args.resume,
        snip=args.snip,
        smoke=args.smoke,
        cpu=args.cpu,
        extra=args.extra,
        **{field.name: getattr(args, field.name, None) for field in fields(Configuration)} | alone,
    )
    if args.hardware:
        print(job.nodes, job.configuration.gpus_per_node)
        return 0
    if args.progress:
        print(*progress(job))
        return 0
    gpus_per_node = job.configuration.gpus_per_node
    variables = torchrun.environment(gpus_per_node, cpu=args.cpu)
    if args.check:
        training = check_arguments(megatron_arguments(job), job.layout.ranks, variables)
        print("\n".join(_forecast(job, training)))
        return 0
    rendezvous = args.rendezvous or ("HEAD_NODE:29500" if args.dry_run and job.nodes > 1 else None)
    command = torchrun.torchrun_command(job.nodes, gpus_per_node, rendezvous, args.rendezvous_id, args.local_address)
    command += megatron_arguments(job)
    if args.dry_run:
        _print_script(job, variables, command)
        return 0
    if not args.cpu:
        torchrun.check_devices(gpus_per_node)
    elif not job.smoke:
        raise SnipError(
            f"--cpu trains only a tiny model: add --smoke, or leave out --cpu to train {job.model.name} on GPUs"
        )
    if job.load is not None and holds_checkpoint(job.load):
        print(f"snip launch: goes on from the checkpoint in {job.load}", flush=True)
    code, stop_signal = torchrun.supervise(command, variables, torchrun.failure_file(job.save))
    saved, steps = progress(job)
    if stop_signal is not None and code == 0 and saved < steps:
        print(f"snip launch: ended on {stop_signal}; the same command goes on from {job.save}", flush=True)
    return code


def _print_script(job: Job, variables: Mapping[str, str], command: Sequence[str]) -> None:
    """Print a shell script: the model as a comment, then the command with one argument and its values a line."""
    print(f"# {_title(job)}")
    lines = [[*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.quote(command[0])]]
    for word in command[1:]:
        if len(lines) == 1 or (word.startswith("-") and not is_number(word)):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    print(" \\\n    ".join(" ".join(line) for line in lines))


def _title(job: Job) -> str:
    trial = ", shrunk for a trial of its arguments" if job.smoke else ""
    return f"{job.configuration.title}: {job.model.name}{trial}"


def _forecast(job: Job, training: Training) -> list[str]:
    """Return the lines of the forecast for the model that Megatron builds, or a line that says why there is none."""
    from snip_megatron.planner.plan import make_plan, parse_config
    from snip_megatron.planner.render import render
    from snip_megatron.planner.step_time import StepModel
    from snip_megatron.runtime.config import given_arguments
    from snip_megatron.timing.cost_model import load_cost_model

    layout = training.layout
    if isinstance(layout, str):
        return [f"{layout}: maps and budgets are checked when training starts"]
    vocabulary = layout.model.vocabulary or job.model.vocabulary
    layout = replace(layout, model=replace(layout.model, name=job.model.name, vocabulary=vocabulary))
    model = load_cost_model(_TIMINGS)
    options = given_arguments(megatron_arguments(job)) if job.snip else {"update_interval": 0}
    try:
        config = parse_config(options, model, has_end=training.train_iters is not None, recipe=training.recipe)
        return [_title(job), render(make_plan(StepModel(layout, model), config)).rstrip()]
    except SnipError as error:
        return [_title(job), f"no forecast: {error}"]
