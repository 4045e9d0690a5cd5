"""``snip plan``: predicts memory, time and speedup of a configuration, without a GPU and without weights."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from snip_megatron.planner.layout import RECOMPUTE, Layout
from snip_megatron.precision.errors import SnipError, quoted
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.options import add_options, given_options
from snip_megatron.runtime.storage import check_folder, deliver
from snip_megatron.tools.argument_check import Training, check_arguments
from snip_megatron.tools.cli import positive
from snip_megatron.tools.launch import last_value

_TRAINING_OPTIONS = (
    "budget", "formats", "granularity", "stage_tolerance", "pin", "policy", "estimator", "q", "update_interval",
    "probe_microbatches",
)  # fmt: skip
_FLAGS = {
    "sequence-parallel": "tensor parallel ranks share the tokens of norms and additions",
    "no-distributed-optimizer": "every data parallel rank holds the whole state of the optimizer",
}
_SIZES = ("tp", "pp", "dp", "seq-length", "micro-batch-size", "global-batch-size", "recompute")
_IGNORED_ARGUMENTS = {
    "--data-path", "--train-data-path", "--valid-data-path", "--test-data-path", "--data-args-path", "--mock-data",
    "--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file", "--vocab-size", "--te-rng-tracker",
    "--cuda-graph-impl", "--cuda-graph-modules", "--moe-permute-fusion", "--moe-router-fusion", "--tp-comm-overlap",
    "--wandb-project",
}  # fmt: skip
"""Arguments of a training that need its data, tokenizer, logger or Transformer Engine, and change nothing in a plan."""
_MAX_COUNT = 10**11
_BANDWIDTH = positive("a bandwidth from 1e-6 to 1e9 GB/s", 1e9, above=1e-6)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``snip plan``. Those that Megatron has too have the same names."""
    add = parser.add_argument_group("model, parallel layout and batch").add_argument
    add("--model", metavar="NAME", help="1b, 3b, 7b, 8b, 70b or 405b; for any other give --megatron")
    for name, text in (
        ("tp", "tensor parallel size; default: 1"),
        ("pp", "pipeline parallel size; default: 1"),
        ("dp", "data parallel size; default: 1"),
        ("seq-length", "tokens of a sequence; default: the model's context length"),
        ("micro-batch-size", "sequences of a microbatch; default: 1"),
        ("global-batch-size", "sequences of a step; default: 8 microbatches per pipeline stage"),
    ):
        add(f"--{name}", type=_count, metavar="N", help=text)
    add("--recompute", choices=RECOMPUTE, help="activations to recompute in the backward; default: none")
    for flag, text in _FLAGS.items():
        add(f"--{flag}", action="store_true", help=text)
    add("--vocab-size", type=_count, metavar="N", help="tokens of the vocabulary; default: the model's")
    add("--gpus", type=_count, metavar="N", help="GPUs of a job with --megatron; default: 8")
    text = "in place of these: all arguments that follow are those of a training, with which Megatron builds the model"
    add("--megatron", nargs=argparse.REMAINDER, metavar="...", help=text)

    group = parser.add_argument_group("as in training, where the names begin with --snip-")
    add_options(group, SnipConfig, prefix="--", only=_TRAINING_OPTIONS)

    add = parser.add_argument_group("hardware").add_argument
    text = "times of GEMMs: h100, h200, a file that snip calibrate wrote, or flops (no times); default: h200"
    add("--timings", default="h200", metavar="NAME|FILE", help=text)
    add("--gpus-per-node", type=_count, default=8, metavar="N", help="GPUs of a node; default: 8")
    for name, speed, destination in (("node", 180.0, "the others of its node"), ("network", 40.0, "other nodes")):
        text = f"GB that one GPU sends to {destination} in a second; default: {speed:g}"
        add(f"--{name}-bandwidth", type=_BANDWIDTH, default=speed, metavar="GB/s", help=text)
    text = "memory of a GPU in GiB; default: that of the GPU of --timings, if its table has it"
    add("--gpu-memory", type=positive("GiB above 0", 1e6), metavar="GIB", help=text)

    text = "statistics of a run (stats/step_<N>.npz) with its losses; without it, loss= gives the fastest uniform map,"
    text += " and other budgets take synthetic losses"
    parser.add_argument("--statistics", type=Path, metavar="FILE.npz", help=text)
    parser.add_argument("--json", type=Path, metavar="OUT.json", help="also write the plan as JSON (snip.plan/1)")


def run(args: argparse.Namespace) -> int:
    """Plan, print tables, write JSON. Returns 3 if a GPU is too small, else 0. Raises SnipError (3 if infeasible)."""
    from snip_megatron.planner.plan import make_plan, parse_config
    from snip_megatron.planner.render import render
    from snip_megatron.planner.step_time import Links, StepModel
    from snip_megatron.runtime.config import given_arguments
    from snip_megatron.timing.cost_model import load_cost_model

    check_folder("--json", args.json)
    model = load_cost_model(args.timings)
    options = given_arguments(args.megatron or ()) | given_options(args, SnipConfig, "", _TRAINING_OPTIONS)
    if args.megatron is None:
        training = Training(_named_layout(args))
    else:
        for name in ("model", *_SIZES, *_FLAGS):
            if getattr(args, name.replace("-", "_")):
                raise SnipError(f"--{name} cannot be combined with --megatron, whose arguments say it")
        training = training_of(args.megatron, args.gpus or 8, args.vocab_size)
    assert isinstance(training.layout, Layout)
    config = parse_config(options, model, has_end=training.train_iters is not None, recipe=training.recipe)
    links = Links(args.gpus_per_node, args.node_bandwidth * 1e9, args.network_bandwidth * 1e9)
    gpu = None if args.gpu_memory is None else args.gpu_memory * 2**30
    plan = make_plan(StepModel(training.layout, model, links), config, args.statistics, gpu_memory=gpu)
    if args.json is not None:
        deliver("--json", args.json, json.dumps(plan, indent=1, allow_nan=False) + "\n")
    print(render(plan), end="")
    return 3 if plan["memory"]["fits"] is False else 0


def _named_layout(args: argparse.Namespace) -> Layout:
    """Return the layout of a model that the planner knows by name."""
    from snip_megatron.planner.models import load_llama

    if args.model is None:
        raise SnipError("the following arguments are required: --model, or --megatron with the arguments of a training")
    if args.gpus is not None:
        raise SnipError("--gpus belongs to --megatron; the GPUs of a --model are those of --tp, --pp and --dp")
    pp, dp, micro = args.pp or 1, args.dp or 1, args.micro_batch_size or 1
    model = load_llama(args.model).model(pp)
    return Layout(
        model=model if args.vocab_size is None else replace(model, vocabulary=args.vocab_size),
        tp=args.tp or 1,
        pp=pp,
        vpp=1,
        dp=dp,
        seq_length=args.seq_length or model.context,
        micro_batch_size=micro,
        global_batch_size=args.global_batch_size or 8 * pp * micro * dp,
        sequence_parallel=args.sequence_parallel,
        recompute=args.recompute or "none",
        distributed_optimizer=not args.no_distributed_optimizer,
    ).checked()


def training_of(words: Sequence[str], ranks: int, vocabulary: int | None = None) -> Training:
    """Return a training of ``ranks`` ranks with the layout of the model that Megatron builds from its arguments.

    ``vocabulary`` takes precedence over ``--vocab-size``. Raises SnipError if Megatron or SNIP refuses the arguments.
    """
    vocab_size = last_value(words, "--vocab-size") or ""
    vocabulary = vocabulary or (int(vocab_size) if vocab_size.isdecimal() else 0)
    if not vocabulary:
        raise SnipError("--megatron: the tokenizer decides the vocabulary; give its size, --vocab-size N before it")
    local = last_value(words, "--transformer-impl") == "local"
    ignored = _IGNORED_ARGUMENTS if local else {*_IGNORED_ARGUMENTS, "--transformer-impl"}
    arguments, selected = [], True
    for word in words:
        if word.startswith("--"):
            selected = word.partition("=")[0] not in ignored
        arguments += [word] * selected
    arguments += ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocabulary)]
    # Under SNIP, arguments that it replaces need nothing of this machine, and arguments that it does not support fail.
    arguments += [] if "--snip" in words else ["--snip", "--snip-policy", "bf16"]
    training = check_arguments(arguments, ranks, {})
    if isinstance(training.layout, str):
        raise SnipError(f"--megatron: {training.layout}")
    layout = replace(
        training.layout,
        model=replace(training.layout.model, vocabulary=vocabulary),
        grouped_experts="--moe-grouped-gemm" in words and not local,
        gradient_accumulation_fusion="--no-gradient-accumulation-fusion" not in words,
    )
    return replace(training, layout=layout)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= _MAX_COUNT):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a whole number from 1 to {_MAX_COUNT}")
    return int(text)
