"""``snip plan``: predicts memory, time and speedup of a configuration, without a GPU and without weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snip_megatron.commands.numbers import positive
from snip_megatron.config import SnipConfig
from snip_megatron.config.options import add_options
from snip_megatron.config.run import DEPLOYED
from snip_megatron.config.values import load_schedule, parse_tolerance
from snip_megatron.errors import SnipError, cut, quoted
from snip_megatron.planner.layout import CUDA_GRAPHS, RECOMPUTE, Layout
from snip_megatron.records.output_file import check_folder, deliver
from snip_megatron.sensitivity.policies import POLICIES

if TYPE_CHECKING:
    from snip_megatron.planner.phases import PlannedRun
    from snip_megatron.planner.probes import Probes
    from snip_megatron.planner.rates import Links

_SHARED = (
    "granularity", "stage_tolerance", "policy", "estimator", "schedule", "communication", "gradient_reduction",
)  # fmt: skip
_MOST = 10**11
_BANDWIDTH = positive("a bandwidth from 1e-6 to 1e9 GB/s", 1e9, above=1e-6)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``snip plan``. Those that Megatron has too have the same names."""
    _add_model(parser.add_argument_group("model, parallel layout and batch").add_argument)
    as_in_training = parser.add_argument_group("as in training, where the names begin with --snip-")
    add_options(as_in_training, SnipConfig, prefix="--", only=_SHARED, filled=True)
    _add_program(parser.add_argument_group("budget and choice").add_argument)
    _add_phases(parser.add_argument_group("phases of the run").add_argument)
    _add_updates(parser.add_argument_group("updates").add_argument)
    _add_hardware(parser.add_argument_group("hardware").add_argument)
    parser.add_argument("--json", type=Path, metavar="OUT.json", help="also write the plan as JSON (snip.plan/1)")


def _add_model(add: Callable[..., Any]) -> None:
    add(
        "--model",
        required=True,
        metavar="NAME|config.json",
        help="the model: 1b, 3b, 7b, 8b, 70b, 405b, or the config.json of a Llama",
    )
    for name, text in (
        ("tp", "tensor parallel size"),
        ("pp", "pipeline parallel size"),
        ("vpp", "model chunks per pipeline stage"),
    ):
        add(f"--{name}", type=_count, default=1, metavar="N", help=f"{text}; default: 1")
    add("--dp", type=_count, default=1, metavar="N", help="data parallel size; default: 1")
    add("--seq-length", type=_count, metavar="N", help="tokens of a sequence; default: the model's context length")
    add("--micro-batch-size", type=_count, default=1, metavar="N", help="sequences of a microbatch; default: 1")
    add(
        "--global-batch-size",
        type=_count,
        metavar="N",
        help="sequences of a step; default: 8 microbatches per pipeline stage",
    )
    add("--vocab-size", type=_count, metavar="N", help="tokens of the vocabulary; default: the model's")
    add(
        "--recompute",
        choices=RECOMPUTE,
        default="none",
        help="activations to recompute in the backward; default: none",
    )
    add("--cuda-graph-impl", choices=CUDA_GRAPHS, default="none", help="CUDA graphs of training steps; default: none")
    for flag, text in _FLAGS.items():
        add(f"--{flag}", action="store_true", help=text)


def _add_program(add: Callable[..., Any]) -> None:
    add(
        "--budget",
        metavar="KIND=X",
        help="loss=NATS, speedup=FACTOR or fp4=SHARE, as --snip-budget; or step=FACTOR: speedup of the whole step over"
        " bf16; default: that of --snip alone, loss=0.002",
    )
    add(
        "--formats",
        metavar="F,F",
        help="candidate formats, comma separated; default: as in training, fp8,fp4 with a budget of fp4=, otherwise"
        " what the GPU of --timings multiplies",
    )
    add(
        "--statistics",
        type=Path,
        metavar="FILE.npz",
        help="statistics of a run (stats/step_<N>.npz) from which losses are computed; default: synthetic losses",
    )
    add("--seed", type=_seed, default=1, metavar="N", help="seed of synthetic losses; default: 1")


def _add_phases(add: Callable[..., Any]) -> None:
    add(
        "--train-iters", type=_count, metavar="N", help="training steps of the run; needed with --schedule auto or FILE"
    )
    add(
        "--deploy",
        choices=DEPLOYED,
        help="with --schedule auto or FILE: formats in which the trained model will be deployed; default: map",
    )


def _add_updates(add: Callable[..., Any]) -> None:
    add(
        "--update-interval",
        type=_count,
        default=1000,
        metavar="N",
        help="training steps between two updates; default: 1000",
    )
    add(
        "--probe-microbatches",
        type=_count,
        default=1,
        metavar="B",
        help="microbatches that a probe runs on each data parallel rank; default: 1",
    )
    add(
        "--probe-tokens",
        type=_count,
        default=512,
        metavar="N",
        help="tokens of each microbatch at which noise probes compare activations and gradients; default: 512",
    )
    add("--backward-noise", action="store_true", help="a probe runs one more pass, with noise in the gradients")


def _add_hardware(add: Callable[..., Any]) -> None:
    add(
        "--timings",
        default="h200",
        metavar="NAME|FILE",
        help="times of GEMMs: h200, a file that snip calibrate wrote, or flops (no times); default: h200",
    )
    add("--gpus-per-node", type=_count, default=8, metavar="N", help="GPUs of a node; default: 8")
    add(
        "--node-bandwidth",
        type=_BANDWIDTH,
        default=350.0,
        metavar="GB/s",
        help="GB that one GPU sends to the others of its node in a second; default: 350",
    )
    add(
        "--network-bandwidth",
        type=_BANDWIDTH,
        default=40.0,
        metavar="GB/s",
        help="GB that one GPU sends to other nodes in a second; default: 40",
    )
    add(
        "--gpu-memory",
        type=positive("GiB above 0", 1e6),
        metavar="GIB",
        help="memory of a GPU in GiB; default: that of the GPU of --timings, if its table has it",
    )


_FLAGS = {
    "sequence-parallel": "tensor parallel ranks share the tokens of norms and additions",
    "no-distributed-optimizer": "every data parallel rank holds the whole state of the optimizer",
    "no-gradient-accumulation-fusion": "Megatron's layers add weight gradients in a kernel of its own, as without Apex",
    "overlap-grad-reduce": "gradients are reduced during the backward",
    "overlap-param-gather": "parameters are gathered during the forward",
    "account-for-embedding-in-pipeline-split": "the embedding counts as a layer of the first pipeline stage",
    "account-for-loss-in-pipeline-split": "output layer and loss count as a layer of the last pipeline stage",
}


def run(args: argparse.Namespace) -> int:
    """Plan, print tables and write JSON.

    Returns:
        Exit code 0.

    Raises:
        SnipError: On bad input, or with exit code 3 if the budget is out of reach.
    """
    from snip_megatron.config.defaults import backend_of
    from snip_megatron.planner.plan import make_plan
    from snip_megatron.planner.render import render
    from snip_megatron.planner.request import parse_request
    from snip_megatron.planner.step_time import StepModel
    from snip_megatron.timing.loading import load_cost_model

    check_folder("--json", args.json)
    if args.policy not in POLICIES:
        raise SnipError(f"--policy {cut(args.policy)}: unknown; choose one of {', '.join(POLICIES)}")
    layout = _layout(args)
    model = load_cost_model(args.timings)
    request = parse_request(
        args.budget,
        args.formats,
        model.formats,
        backend=backend_of(model),
        granularity=args.granularity,
        tolerance=parse_tolerance(args.stage_tolerance, "--"),
        statistics=args.statistics,
        seed=args.seed,
        policy=args.policy,
        estimator=args.estimator,
    )
    gpu = None if args.gpu_memory is None else args.gpu_memory * 2**30
    step, planned = StepModel(layout, model, _links(args)), _run(args, request.kind)
    plan = make_plan(step, request, _probes(args), planned, gpu_memory=gpu)
    if args.json is not None:
        deliver("--json", args.json, json.dumps(plan, indent=1, allow_nan=False) + "\n")
    print(render(plan), end="")
    return 0


def _layout(args: argparse.Namespace) -> Layout:
    from dataclasses import replace

    from snip_megatron.timing.models import load_model

    model = load_model(args.model)
    if args.vocab_size is not None:
        model = replace(model, vocabulary=args.vocab_size)
    return Layout(
        model=model,
        tp=args.tp,
        pp=args.pp,
        vpp=args.vpp,
        dp=args.dp,
        seq_length=args.seq_length or model.context,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size or 8 * args.pp * args.micro_batch_size * args.dp,
        sequence_parallel=args.sequence_parallel,
        recompute=args.recompute,
        distributed_optimizer=not args.no_distributed_optimizer,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        embedding_as_layer=args.account_for_embedding_in_pipeline_split,
        loss_as_layer=args.account_for_loss_in_pipeline_split,
        cuda_graph_impl=args.cuda_graph_impl,
        gradient_accumulation_fusion=not args.no_gradient_accumulation_fusion,
        communication=args.communication,
        gradient_reduction=args.gradient_reduction,
    )


def _probes(args: argparse.Namespace) -> Probes:
    from snip_megatron.planner.probes import Probes

    return Probes(
        microbatches=args.probe_microbatches,
        tokens=args.probe_tokens,
        estimator=args.estimator,
        backward_noise=args.backward_noise,
        interval=args.update_interval,
        policy=args.policy,
    )


def _run(args: argparse.Namespace, budget: str) -> PlannedRun | None:
    """Return the run whose map changes with time; None for one map."""
    from snip_megatron.planner.phases import PlannedRun

    schedule = load_schedule(args.schedule, budget, prefix="--")
    if schedule is None:
        for name in ("train_iters", "deploy"):
            if getattr(args, name) is not None:
                raise SnipError(
                    f"--{name.replace('_', '-')} {getattr(args, name)} has no effect with --schedule static: give"
                    " --schedule auto or a file of phases, or leave it out"
                )
        return None
    if args.train_iters is None:
        raise SnipError(f"--schedule {cut(args.schedule)}: needs the length of the run: give --train-iters")
    return PlannedRun(schedule, args.schedule, args.train_iters, args.deploy or "map")


def _links(args: argparse.Namespace) -> Links:
    from snip_megatron.planner.rates import Links

    return Links(args.gpus_per_node, args.node_bandwidth * 1e9, args.network_bandwidth * 1e9)


def _count(text: str) -> int:
    return _whole(text, 1)


def _seed(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= _MOST):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a whole number from {least} to {_MOST}")
    return int(text)
