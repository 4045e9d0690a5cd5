"""Refuses, before training starts, arguments that cannot be combined with SNIP. The error names both arguments."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from snip_megatron.layers.registry import load_map
from snip_megatron.megatron import compat
from snip_megatron.megatron.model_linears import ModelLinears
from snip_megatron.megatron.times import check_measurable, option_times
from snip_megatron.numerics.quantize.formats import TILE
from snip_megatron.precision import Side
from snip_megatron.precision.errors import SnipError, cut
from snip_megatron.precision.linears import matching_options, no_match_hint
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.run_data import replayed_maps, step_path
from snip_megatron.sensitivity.policies import fixed_map, late_shares, needs_forward_noise
from snip_megatron.sensitivity.problem import check_reachable
from snip_megatron.sensitivity.request import SolveRequest

_GRAPHS_WITHOUT_PIPELINE = {
    "full_iteration": "Megatron waits for the device between stages, which no graph holds",
    "local": "Megatron cannot free the output of a stage in the steps before the capture, and ends",
}
"""Implementation of CUDA graphs → why it cannot run a pipeline."""


def _more_than_one(value: Any) -> bool:
    return value is not None and int(value) > 1


_OWN_PRECISION = "SNIP chooses the precision of the linears itself; leave it out"
_WHOLE_SHARDS = "quantised linears hold their whole shard of the weight; leave it out"
_BUFFERS = "a captured optimizer step would not see the gradient buffers as probes leave them; leave it out"
_OWN_BACKWARD = "quantised wgrad of experts runs in the backward of its linear; leave it out"

CONFLICTS: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    "--te-precision-config-file": ("te_precision_config_file", bool, _OWN_PRECISION),
    "--kitchen-config-file": ("kitchen_config_file", bool, _OWN_PRECISION),
    "--use-kitchen": ("use_kitchen", bool, _OWN_PRECISION),
    "--optimizer-cuda-graph": ("optimizer_cuda_graph", bool, _BUFFERS),
    "--tensor-parallel-num-weight-shards": ("gtp_weight_remat_size", _more_than_one, _WHOLE_SHARDS),
    "--expert-tensor-parallel-num-weight-shards": ("expert_gtp_weight_remat_size", _more_than_one, _WHOLE_SHARDS),
    "--mlp-chunks-for-training": (
        "mlp_chunks_for_training",
        _more_than_one,
        "statistics would count each chunk as a microbatch; use 1",
    ),
    "--overlap-dispatch-backward-with-experts-wgrad": (
        "overlap_dispatch_backward_with_experts_wgrad",
        bool,
        _OWN_BACKWARD,
    ),
    "--non-persistent-ckpt-type local": (
        "non_persistent_ckpt_type",
        lambda value: bool(value == "local"),
        "SNIP cannot tell whether such a checkpoint holds its state; use global",
    ),
}
"""Argument → the attribute with its value, whether a value conflicts, and the reason with a remedy."""


def check(config: SnipConfig, args: argparse.Namespace) -> None:
    """Check that SNIP can run with these arguments. No collective is called.

    Raises SnipError if two arguments cannot be combined. The message names both.
    """
    for argument, (attribute, conflicts, why) in CONFLICTS.items():
        value = getattr(args, attribute, None)
        if conflicts(value):
            is_users = argument == f"--{attribute.replace('_', '-')}"  # and not computed by Megatron
            shown = f" {value}" if is_users and value is not True else ""
            raise SnipError(f"{argument}{shown} cannot be combined with --snip: {why}")
    _check_engine(config, args)
    _check_graphs(config, args)
    _check_optimizer(config, args)
    _check_full_sharding(config, args)
    if config.gradient_reduction != "fp32":
        compat.check_gradient_reduction(args)
    if not torch.cuda.is_available():
        check_measurable(config, None)


def _check_engine(config: SnipConfig, args: argparse.Namespace) -> None:
    """Check arguments against Megatron's local layers, Transformer Engine's GEMMs, and two validations."""
    engine, ranks = args.transformer_impl, args.context_parallel_size
    defers = getattr(args, "defer_embedding_wgrad_compute", False)
    if engine != "transformer_engine" and (ranks > 1 or defers):
        argument = (
            "--defer-embedding-wgrad-compute" if defers else f"--context-parallel-size {args.context_parallel_size}"
        )
        raise SnipError(
            f"{argument} cannot be combined with --transformer-impl {engine}: it needs Transformer Engine's layers; use"
            " --transformer-impl transformer_engine, which needs a GPU"
        )
    if config.gemm == "transformer_engine" and getattr(args, "tp_comm_overlap", False):
        raise SnipError(
            "--tp-comm-overlap cannot be combined with --snip-gemm transformer_engine: its buffers are made for bf16;"
            " leave it out, or use --snip-gemm hopper on such a card, which overlaps where a linear stays bf16"
        )
    for name in ("full_validation", "multiple_validation_sets"):  # both validations run on the same batches
        if config.eval == "both" and getattr(args, name):
            argument = f"--{name.replace('_', '-')}"
            raise SnipError(f"{argument} cannot be combined with --snip-eval both; use --snip-eval map or bf16")


def _check_graphs(config: SnipConfig, args: argparse.Namespace) -> None:
    """Check what CUDA graphs need, and what they conflict with."""
    implementation = compat.graph_implementation(args)
    if implementation is None:
        return
    graphs, stages = f"--cuda-graph-impl {implementation}", args.pipeline_model_parallel_size
    if not torch.cuda.is_available():
        raise SnipError(f"{graphs} needs a CUDA device, and there is none; leave it out")
    experts = getattr(args, "num_experts", None)
    if experts and not compat.graphs_leave_experts_out(args):
        raise SnipError(
            f"{graphs} cannot be combined with --num-experts {experts} under --snip: the host counts the rows of"
            " experts, which no graph may hold; use --cuda-graph-impl transformer_engine --cuda-graph-modules attn"
            " moe_router moe_preprocess"
        )
    if config.gemm == "transformer_engine":
        raise SnipError(
            f"{graphs} cannot be combined with --snip-gemm transformer_engine: a new map needs new graphs; leave it"
            " out, or use --snip-gemm hopper on such a card"
        )
    if stages > 1 and implementation in _GRAPHS_WITHOUT_PIPELINE:
        raise SnipError(
            f"{graphs} cannot be combined with --pipeline-model-parallel-size {stages} under --snip:"
            f" {_GRAPHS_WITHOUT_PIPELINE[implementation]}; use --cuda-graph-impl transformer_engine"
        )
    if implementation != "full_iteration":
        return
    if args.cuda_graph_warmup_steps < 1:
        raise SnipError(
            f"{graphs} cannot be combined with --cuda-graph-warmup-steps {args.cuda_graph_warmup_steps} under --snip:"
            " kernels are compiled in a step before the one that is captured; use 1 or more"
        )
    if ramp := compat.batch_size_ramp(args):
        raise SnipError(
            f"{graphs} cannot be combined with {ramp}: the graph holds microbatches of one batch size; leave one out"
        )


def _check_optimizer(config: SnipConfig, args: argparse.Namespace) -> None:
    """Check what Megatron cannot shard, which it reports late or not at all, and what weight divergence cannot do."""
    optimizer = f"--optimizer {args.optimizer}"
    if args.optimizer == "sgd" and args.use_distributed_optimizer:
        raise SnipError(
            f"{optimizer} cannot be combined with --use-distributed-optimizer: Megatron shards the state of adam alone;"
            " leave one of them out"
        )
    if getattr(args, "use_layer_wise_distributed_optimizer", False) and not args.bf16:
        raise SnipError(
            f"{optimizer} with --use-distributed-optimizer needs --bf16: Megatron shares out whole parameters of 16-bit"
            " models only; add --bf16 or leave --use-distributed-optimizer out"
        )
    if not (config.updates and needs_forward_noise(config.request())):
        return
    estimator = f"--snip-estimator {config.estimator}"
    if args.optimizer != "adam":
        raise SnipError(
            f"{optimizer} cannot be combined with {estimator}: weight divergence knows the update of adam alone; use"
            " it, or --snip-estimator fisher"
        )
    if config.first_update == 0 and not args.load:
        raise SnipError(
            f"--snip-first-update 0 cannot be combined with {estimator}: adam has no moments before its first step; use"
            " --snip-first-update 1 or later"
        )


def _check_full_sharding(config: SnipConfig, args: argparse.Namespace) -> None:
    """Check what is not supported beside full sharding."""
    argument = sharding(args)
    if argument is None:
        return
    strategy, instances = args.data_parallel_sharding_strategy, args.num_distributed_optimizer_instances
    stages, implementation = args.pipeline_model_parallel_size, compat.graph_implementation(args)
    version = getattr(args, "megatron_fsdp_version", 1)  # Megatron 0.19 has no other
    unsharded = argument == "--use-megatron-fsdp" and strategy in ("no_shard", "optim")
    overlaps_experts = getattr(args, "overlap_moe_expert_parallel_comm", False)
    for conflicts, option, way in (
        (unsharded, f"--data-parallel-sharding-strategy {strategy}", "use optim_grads_params"),
        # Megatron cannot load an optimizer from it
        (getattr(args, "ckpt_format", None) == "torch_dcp", "--ckpt-format torch_dcp", "use torch_dist"),
        (version != 1, f"--megatron-fsdp-version {version}", "use 1"),
        (instances > 1, f"--num-distributed-optimizer-instances {instances}", "use 1"),
        (stages > 1, f"--pipeline-model-parallel-size {stages}", "use 1"),
        (implementation is not None, f"--cuda-graph-impl {implementation}", "leave it out"),
        (getattr(args, "optimizer_cpu_offload", False), "--optimizer-cpu-offload", "leave it out"),
        (overlaps_experts, "--overlap-moe-expert-parallel-comm", "leave it out"),
        (config.guard_blame, "--snip-guard-blame", "leave it out"),
        (config.gradient_reduction != "fp32", f"--snip-gradient-reduction {config.gradient_reduction}", "use fp32"),
        (
            config.gemm == "transformer_engine",
            "--snip-gemm transformer_engine",
            "use --snip-gemm hopper on such a card",
        ),
    ):
        if conflicts:
            alone = "or use --use-distributed-optimizer alone"
            raise SnipError(f"{argument} cannot be combined with {option} under --snip; {way}, {alone}")


def sharding(args: argparse.Namespace) -> str | None:
    """Return the argument by which data parallel ranks shard all parameters. None if there is none."""
    names = ("use_megatron_fsdp", "use_torch_fsdp2")
    return next((f"--{name.replace('_', '-')}" for name in names if getattr(args, name, False)), None)


def check_layers_of_experts(args: argparse.Namespace) -> None:
    """Raise SnipError if ``--moe-layer-freq`` is no pattern of the layers. Megatron itself reports it late.

    The value is a number n, for every n-th layer, or a list with a flag for each layer.
    """
    pattern = args.moe_layer_freq
    if not getattr(args, "num_experts", None) or (isinstance(pattern, int) and pattern >= 1):
        return
    if isinstance(pattern, int):
        raise SnipError(f"--moe-layer-freq {pattern}: give 1 or more, or a list with a 0 or a 1 for each layer")
    if len(pattern) != args.num_layers:
        raise SnipError(f"--moe-layer-freq names {len(pattern)} layers, the decoder has {args.num_layers}")


def check_model(config: SnipConfig, args: argparse.Namespace, linears: ModelLinears) -> None:
    """Raise SnipError unless maps, globs and budgets fit the linears of a model. No collective is called."""
    if not linears.covered:
        raise SnipError("the model has no linear that SNIP can choose formats for")
    if config.budget.kind == "speedup" and config.updates and linears.uncovered:
        raise SnipError(
            f"--snip-budget {config.budget}: times of linears that stay bf16 are not predicted, and"
            f" {linears.uncovered[0].name} does; use loss= or fp4="
        )
    names, phases = linears.names, () if config.phases is None else config.phases.phases
    if config.map is not None:
        load_map(config.map, names)
    elif config.replay is not None:
        for step in replayed_maps(config.replay):
            load_map(str(step_path(Path(config.replay), "maps", step)), names, argument="--snip-replay")
    else:
        fixed_map(config.policy, names, pins(config, args), config.formats)
    if config.late:
        late_shares(solve_request(config, args, linears), linears.flops, sum(linears.uncovered_flops.values()))
    for i, phase in enumerate(phases):
        for glob in phase.change or ():
            if not matching_options(glob, names, "gemm"):
                hint = no_match_hint("a phase", glob, names, "gemm")
                raise SnipError(f"--snip-schedule: phases[{i}].change: {cut(glob)} matches no option; {hint}")
    if not config.updates:
        return
    request = solve_request(config, args, linears)
    if config.budget.timed and request.times is None:  # the run measures them
        return
    tokens = 1 if request.unquantised_stage_flops is None else _tokens_per_step(args)
    check_reachable(linears.covered, request, tokens_per_step=tokens)
    for i, phase in enumerate(phases):
        if phase.budget is not None:
            argument = f"--snip-schedule: phases[{i}].budget:"
            check_reachable(linears.covered, replace(request, budget=phase.budget), argument, tokens_per_step=tokens)


def pins(config: SnipConfig, args: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """Return the pins of Megatron's ``--first-last-layers-bf16``, followed by those of ``--snip-pin``."""
    layer_pins: list[tuple[str, str]] = []
    if getattr(args, "first_last_layers_bf16", False):
        start, end = args.num_layers_at_start_in_bf16, args.num_layers_at_end_in_bf16
        layers = [*range(start), *range(args.num_layers - end, args.num_layers)]
        layer_pins = [(f"decoder.layers.{layer}.*", "bf16") for layer in layers]
    return (*layer_pins, *config.pins)


def solve_request(config: SnipConfig, args: argparse.Namespace, linears: ModelLinears) -> SolveRequest:
    """Return the request that every update of this run solves, without times that the run must measure.

    Raises SnipError if the table of times that the configuration names cannot be used.
    """
    return config.request(
        times=option_times(config, args, linears.covered) if config.budget.timed and config.updates else None,
        pins=pins(config, args),
        unquantised_stage_flops={k: v * _tokens_per_step(args) for k, v in linears.uncovered_flops.items()} or None,
    )


def _tokens_per_step(args: argparse.Namespace) -> int:
    """Return the tokens of the full global batch. :meth:`SolveRequest.of_step` corrects for a ramp."""
    return int(args.global_batch_size * args.seq_length)


def cut_tiles(args: argparse.Namespace, linears: ModelLinears) -> list[str]:
    """Describe each dimension that is sharded into parts that are not multiples of 128.

    A tile ends at the end of a shard. Such a layout therefore has other tiles and other statistics than a layout that
    does not shard the dimension. Returns an empty list if all tiles are the same as on one rank.
    """
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    sizes = {}
    for row in linears.covered:
        side = {Side.OUTPUT: ("rows", row.n), Side.INPUT: ("columns", row.k)}.get(row.sharded)
        if side is not None:
            parts = tp if row.experts == 1 else args.expert_tensor_parallel_size or 1
            sizes[f"{side[0]} of {row.id.path}"] = (side[1], parts)
    tokens = args.seq_length * args.micro_batch_size
    if cp > 1:  # a rank holds two pieces of each sequence, one after the other
        sizes["tokens of a microbatch's pieces"] = (tokens // 2, cp)
    if args.sequence_parallel:
        sizes["tokens of a microbatch"] = (tokens, tp * cp)
    return [
        f"{name} {size} / {parts} ranks = {size / parts:g}"
        for name, (size, parts) in sizes.items()
        if parts > 1 and size % (parts * TILE)
    ]
