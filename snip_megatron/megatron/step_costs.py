"""Predicted times of a run's linears, from Megatron's arguments: what ``speedup=`` and ``loss=`` budgets weigh.

A training step's seconds of the decoder linears' GEMMs and quantisation on one rank of every pipeline stage. What
precision does not change (attention, norms, communication, optimizer) is not in it: the speedup asked for is that of
the linears, on the slowest stage. For the report the planner predicts the rest, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace

from snip_megatron.config import SnipConfig
from snip_megatron.errors import SnipError
from snip_megatron.layers.experts import ExpertLayers
from snip_megatron.planner.layout import Layout
from snip_megatron.planner.models import ModelShape
from snip_megatron.planner.step_time import StepModel
from snip_megatron.precision import Format
from snip_megatron.sensitivity.times import OptionTimes
from snip_megatron.solver.costs import CostModel, LinearShape, load_cost_model, local_shape
from snip_megatron.statistics.table import LinearRow


def option_times(config: SnipConfig, args: argparse.Namespace, linears: Sequence[LinearRow]) -> OptionTimes:
    """Times of every linear by the cost model of ``--snip-cost`` and ``--snip-timings``.

    Raises:
        SnipError: no table for this device, or one without figures for a candidate or pinned format.
    """
    wanted = "flops" if config.cost == "flops" else config.timings or "time"
    device = None if wanted == "flops" else _device_name()
    if wanted == "time" and device is None:
        raise SnipError(
            f"--snip-budget {config.budget} weighs measured times, and a CPU has no table of them:"
            " give --snip-timings FILE, or --snip-cost flops"
        )
    try:
        model = load_cost_model(wanted, device)
        formats = [Format(f) for f in (*config.formats, *(f for _, f in config.pins))]
        times = OptionTimes.predict(model, linear_shapes(args, linears), formats)
    except SnipError as error:
        argument = f"--snip-timings {config.timings}" if config.timings is not None else f"--snip-cost {config.cost}"
        raise SnipError(f"{argument} with --snip-budget {config.budget}: {error}") from None
    return replace(times, rest=rest_of_step(args, model))


def rest_of_step(args: argparse.Namespace, model: CostModel) -> dict[int, float]:
    """Stage → seconds a step that no format changes, as ``snip plan`` predicts them; empty where it cannot say.

    It knows dense Llamas whose layers are split evenly over the stages, without context parallelism.
    """
    uneven = (
        args.pipeline_model_parallel_layout,
        args.decoder_first_pipeline_num_layers,
        args.decoder_last_pipeline_num_layers,
    )
    vocabulary = getattr(args, "padded_vocab_size", None)  # known once Megatron has built its tokenizer
    if not args.swiglu or not vocabulary or ExpertLayers.of(args) or args.context_parallel_size > 1:
        return {}
    if any(value is not None for value in uneven):
        return {}
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
            recompute=args.recompute_granularity or "none",
            distributed_optimizer=args.use_distributed_optimizer,
            overlap_grad_reduce=args.overlap_grad_reduce,
            overlap_param_gather=args.overlap_param_gather,
            embedding_as_layer=args.account_for_embedding_in_pipeline_split,
            loss_as_layer=args.account_for_loss_in_pipeline_split,
        )
        return StepModel(layout, model).fixed_seconds()
    except SnipError:  # a layout that the planner does not know: the report says less, the run is as good
        return {}


def linear_shapes(args: argparse.Namespace, linears: Sequence[LinearRow]) -> Mapping[str, LinearShape]:
    """Every linear's shape on one rank in a step; by kind where nothing differs between layers."""
    shapes = {row.name: _linear_shape(args, row) for row in linears}
    by_kind = {row.id.kind: shapes[row.name] for row in linears}
    return by_kind if all(shapes[row.name] == by_kind[row.id.kind] for row in linears) else shapes


def _linear_shape(args: argparse.Namespace, row: LinearRow) -> LinearShape:
    """Of experts that share the tokens evenly: one GEMM for each of a rank's experts."""
    tokens = args.seq_length * args.micro_batch_size // args.context_parallel_size
    microbatches = max(1, args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))
    tensor_parallel, sequence_parallel = args.tensor_model_parallel_size, args.sequence_parallel
    if row.id.of_experts:
        own, expert_parallel = args.expert_tensor_parallel_size or tensor_parallel, args.expert_model_parallel_size
        tokens = max(1, tokens * row.active * expert_parallel * own // (tensor_parallel * row.experts))
        microbatches *= row.experts // expert_parallel
        tensor_parallel, sequence_parallel = own, False
    return local_shape(
        row.id.kind,
        row.n,
        row.k,
        tokens=tokens,
        tensor_parallel=tensor_parallel,
        microbatches=microbatches,
        sequence_parallel=sequence_parallel,
        recompute=_recomputed(args, row),
    )


def _recomputed(args: argparse.Namespace, row: LinearRow) -> bool:
    """Whether activation recomputation runs the linear's forward again (for an even split of the layers)."""
    if args.recompute_granularity == "selective":
        return row.id.kind.startswith("mlp.") and "mlp" in (args.recompute_modules or ())
    if args.recompute_granularity != "full" or args.recompute_method != "block":
        return bool(args.recompute_granularity == "full")
    chunks = args.pipeline_model_parallel_size * (args.virtual_pipeline_model_parallel_size or 1)
    per_chunk = max(1, -(-args.num_layers // chunks))
    return bool(row.id.layer % per_chunk < args.recompute_num_layers)


def _device_name() -> str | None:
    """The GPU's name; None on a CPU, which has no table of its own."""
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
