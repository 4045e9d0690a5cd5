"""Predicts the times of a run's linears from Megatron's arguments, for ``speedup=`` and ``loss=`` budgets.

The times are seconds per training step on one rank of every pipeline stage, for the GEMMs of the decoder linears, the
quantisation of their operands, and the exchanges between tensor parallel ranks whose bytes formats decide
(``--snip-communication`` gather and all). Attention, norms, the other communication and the optimizer do not depend on
the precision and are left out: a ``speedup=`` budget is that of the linears on the slowest stage. The planner predicts
the exchanges, and the rest of the step for the report.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from snip_megatron.config import SnipConfig
from snip_megatron.errors import SnipError
from snip_megatron.gemm import EMULATIONS
from snip_megatron.megatron import compat
from snip_megatron.planner.layout import Layout
from snip_megatron.planner.models import ModelShape
from snip_megatron.planner.rates import Links, Rates
from snip_megatron.planner.step_time import StepModel
from snip_megatron.planner.tensor_parallel import TensorParallel
from snip_megatron.precision import DENSE_LAYER, Format, Gemm, LinearRow, Side
from snip_megatron.sensitivity.times import OptionTimes
from snip_megatron.timing.cost_model import CostModel
from snip_megatron.timing.loading import load_cost_model
from snip_megatron.timing.shapes import LinearShape
from snip_megatron.timing.table import TimingTable


def option_times(
    config: SnipConfig, args: argparse.Namespace, linears: Sequence[LinearRow], table: TimingTable | None = None
) -> OptionTimes | None:
    """Predict the times of every linear by ``table``, or by the cost model that the configuration names.

    Returns:
        The times. None if there is neither: a run then measures its own GEMMs (``own_times.py``).

    Raises:
        SnipError: If the named table cannot be read, or if the table lacks a candidate or pinned format.
    """
    named = "flops" if config.cost == "flops" else config.timings
    model: CostModel
    try:
        if table is not None:
            model = CostModel(table)
        elif named is not None:
            model = load_cost_model(named, torch.cuda.get_device_name() if torch.cuda.is_available() else None)
        else:
            return None
        formats = [Format(f) for f in (*config.formats, *(f for _, f in config.pins))]
        shapes = linear_shapes(args, linears)
        if config.communication == "bf16":
            times = OptionTimes.predict(model, shapes, formats)
        else:
            exchanges = TensorParallel(
                args.tensor_model_parallel_size,
                Rates(model),
                Links(),
                communication=config.communication,
                sequence_parallel=args.sequence_parallel,
            )
            times = OptionTimes.predict(model, shapes, formats, partial(_charge, exchanges))
    except SnipError as error:
        source = "measured times" if table is not None else f"--snip-timings {named}"
        raise type(error)(f"{source} with --snip-budget {config.budget}: {error}") from None
    step = step_model(args, model, config.gradient_reduction, config.communication)
    return times if step is None else replace(times, rest=step.fixed_seconds())


def check_measurable(config: SnipConfig, backend: str | None) -> None:
    """Raise SnipError if the budget weighs times that are neither named nor worth measuring.

    Args:
        config: SNIP's configuration.
        backend: the name of the GEMM backend; None on a CPU before there is one.
    """
    if not (config.timed and config.updates) or config.cost == "flops" or config.timings is not None:
        return
    if backend in (None, *EMULATIONS):
        here = "a CPU emulates them" if backend is None else f"--snip-gemm {backend} emulates them here"
        raise SnipError(
            f"--snip-budget {config.budget} weighs measured times of GEMMs, and {here}, which saves none: give"
            " --snip-timings h200 for the times of that card, or a budget of fp4="
        )


def _charge(exchanges: TensorParallel, name: str, shape: LinearShape, gemm: Gemm, fmt: Format) -> float:
    """Return the seconds of one GEMM's exchanges. Experts exchange nothing over tensor parallel ranks."""
    path = next((path for path in DENSE_LAYER if name.endswith(path)), None)
    return 0.0 if path is None else exchanges.charge(path, shape, gemm, fmt)


def step_model(
    args: argparse.Namespace, model: CostModel, gradient_reduction: str = "fp32", communication: str = "bf16"
) -> StepModel | None:
    """Return what ``snip plan`` predicts the steps of this run with.

    Returns None if the planner does not support the model or its layout. It supports dense Llamas whose layers are
    split evenly over the stages, without context parallelism, and recomputation of all blocks or of their attention.
    """
    recompute = _planned_recompute(args)
    uneven = (
        args.pipeline_model_parallel_layout,
        args.decoder_first_pipeline_num_layers,
        args.decoder_last_pipeline_num_layers,
    )
    vocabulary = getattr(args, "padded_vocab_size", None)  # set after Megatron has built its tokenizer
    if not args.swiglu or not vocabulary or getattr(args, "num_experts", None) or args.context_parallel_size > 1:
        return None
    gated = getattr(args, "attention_output_gate", False)
    if recompute is None or gated or any(value is not None for value in uneven):
        return None
    try:
        shape = ModelShape(
            name="run",
            blocks=args.num_layers,
            hidden=args.hidden_size,
            ffn=args.ffn_hidden_size,
            heads=args.num_attention_heads,
            groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
            head_size=args.kv_channels,
            vocabulary=vocabulary,
            context=args.seq_length,
            tied=not args.untie_embeddings_and_output_weights,
        )
        layout = Layout(
            model=shape,
            tp=args.tensor_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
            vpp=args.virtual_pipeline_model_parallel_size or 1,
            dp=args.data_parallel_size,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            global_batch_size=args.global_batch_size,
            sequence_parallel=args.sequence_parallel,
            recompute=recompute,
            distributed_optimizer=args.use_distributed_optimizer,
            overlap_grad_reduce=args.overlap_grad_reduce,
            overlap_param_gather=args.overlap_param_gather,
            embedding_as_layer=args.account_for_embedding_in_pipeline_split,
            loss_as_layer=args.account_for_loss_in_pipeline_split,
            cuda_graph_impl=compat.graph_implementation(args) or "none",
            communication=communication,
            gradient_reduction=gradient_reduction,
            gradient_accumulation_fusion=args.gradient_accumulation_fusion,
        )
        return StepModel(layout, model)
    except SnipError:  # the planner does not support this layout, and the report omits the rest of the step
        return None


def linear_shapes(args: argparse.Namespace, linears: Sequence[LinearRow]) -> Mapping[str, LinearShape]:
    """Return the shapes of the linears on one rank in a step, by name.

    If all layers have the same shapes, they are returned by kind instead.
    """
    shapes = {row.name: _linear_shape(args, row) for row in linears}
    by_kind = {row.id.path: shapes[row.name] for row in linears}
    return by_kind if all(shapes[row.name] == by_kind[row.id.path] for row in linears) else shapes


def _linear_shape(args: argparse.Namespace, row: LinearRow) -> LinearShape:
    """Shape of one linear. Tokens are assumed to be spread evenly over experts, with one GEMM per expert and rank."""
    tokens = args.seq_length * args.micro_batch_size // args.context_parallel_size
    microbatches = max(1, args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))
    tensor_parallel, sequence_parallel = args.tensor_model_parallel_size, args.sequence_parallel
    if row.experts > 1:
        own, expert_parallel = args.expert_tensor_parallel_size or tensor_parallel, args.expert_model_parallel_size
        tokens = max(1, tokens * row.active * expert_parallel * own // (tensor_parallel * row.experts))
        microbatches *= row.experts // expert_parallel
        tensor_parallel, sequence_parallel = own, False
    n, k = row.n, row.k
    split = {Side.OUTPUT: n, Side.INPUT: k, Side.NEITHER: 0}[row.sharded]
    if split % tensor_parallel:
        raise SnipError(f"{row.name} [{n}, {k}]: {split} features cannot be split over {tensor_parallel} ranks")
    return LinearShape(
        tokens=tokens // tensor_parallel if row.sharded is Side.NEITHER and sequence_parallel else tokens,
        n=n // tensor_parallel if row.sharded is Side.OUTPUT else n,
        k=k // tensor_parallel if row.sharded is Side.INPUT else k,
        microbatches=microbatches,
        gathered=row.sharded is Side.OUTPUT and sequence_parallel and tensor_parallel > 1,
        forwards=2 if _recomputed(args, row) else 1,
        fused_accumulation=args.gradient_accumulation_fusion,
    )


def _recomputed(args: argparse.Namespace, row: LinearRow) -> bool:
    """Whether activation recomputation repeats the forward of the linear, for an even split of the layers."""
    if args.recompute_granularity == "selective":
        return row.id.path.startswith("mlp.") and "mlp" in (args.recompute_modules or ())
    if args.recompute_granularity != "full" or args.recompute_method != "block":
        return bool(args.recompute_granularity == "full")
    return bool(row.id.layer % _layers_of_chunk(args) < args.recompute_num_layers)


def _planned_recompute(args: argparse.Namespace) -> str | None:
    """Return the planner's name of what the backward recomputes, or None if it has none."""
    if args.recompute_granularity == "selective":
        return "selective" if args.recompute_modules in (None, ["core_attn"]) else None
    if args.recompute_granularity == "full" and args.recompute_method == "block":
        return "full" if args.recompute_num_layers >= _layers_of_chunk(args) else None
    return args.recompute_granularity or "none"


def _layers_of_chunk(args: argparse.Namespace) -> int:
    """Return the layers of a model chunk, for an even split."""
    chunks = args.pipeline_model_parallel_size * (args.virtual_pipeline_model_parallel_size or 1)
    return int(max(1, -(-args.num_layers // chunks)))
