"""Predicts the times of a run's linears from Megatron's arguments, for ``speedup=`` and ``loss=`` budgets.

The times are seconds per training step on one rank of every pipeline stage, for the GEMMs of the decoder linears and
the quantisation of their operands. Attention, norms, communication and the optimizer are left out: a ``speedup=``
budget is that of the linears on the slowest stage. The planner predicts them from the model's linears, and the rest of
the step for the report.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch

from snip_megatron.numerics.products import EMULATIONS
from snip_megatron.planner.layout import Layout
from snip_megatron.planner.models import Model
from snip_megatron.planner.step_time import StepModel
from snip_megatron.precision import Format, LinearRow
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.sensitivity.times import OptionTimes
from snip_megatron.timing.cost_model import CostModel
from snip_megatron.timing.loading import load_cost_model
from snip_megatron.timing.table import TimingTable


def option_times(
    config: SnipConfig, args: argparse.Namespace, linears: Sequence[LinearRow], table: TimingTable | None = None
) -> OptionTimes | None:
    """Predict the times of every linear by ``table``, or by the cost model that the configuration names.

    Returns None if there is neither: a run then measures its own GEMMs (``own_times.py``). Raises SnipError if the
    named table cannot be read, or if the table lacks a candidate or pinned format.
    """
    model: CostModel
    try:
        if table is not None:
            model = CostModel(table)
        elif config.timings is not None:
            model = load_cost_model(config.timings, torch.cuda.get_device_name() if torch.cuda.is_available() else None)
        else:
            return None
        formats = [Format(f) for f in (*config.formats, *(f for _, f in config.pins))]
        step = StepModel(layout_of(args, linears, config), model)
        times = step.option_times(formats)
    except SnipError as error:
        source = "measured times" if table is not None else f"--snip-timings {config.timings}"
        raise type(error)(f"{source} with --snip-budget {config.budget}: {error}") from None
    scans = any(row.id.path.endswith("in_proj") for row in linears)  # Mamba's and gated DeltaNet's: times are not known
    if not step.layout.model.vocabulary or scans:
        return times
    return replace(times, rest=step.fixed_seconds(), bubble=step.layout.bubble)


def check_measurable(config: SnipConfig, backend: str | None) -> None:
    """Raise SnipError if the budget weighs times that are neither named nor worth measuring.

    ``backend`` is None on a CPU before there is one.
    """
    if not (config.budget.timed and config.updates) or config.timings is not None:
        return
    if backend in (None, *EMULATIONS):
        here = "a CPU emulates them" if backend is None else f"--snip-gemm {backend} emulates them here"
        raise SnipError(
            f"--snip-budget {config.budget} weighs measured times of GEMMs, and {here}, which saves none: give"
            " --snip-timings h200 for the times of that card, or a budget of fp4="
        )


def layout_of(args: argparse.Namespace, linears: Sequence[LinearRow], config: SnipConfig) -> Layout:
    """Return what the planner knows of a run.

    Raises SnipError if ranks cannot share the features of a linear.
    """
    latent = getattr(args, "multi_latent_attention", False)
    groups = args.num_query_groups if args.group_query_attention and not latent else args.num_attention_heads
    keys = args.qk_head_dim + args.qk_pos_emb_head_dim if latent else args.kv_channels
    model = Model(
        name="run",
        rows=tuple(linears),
        hidden=args.hidden_size,
        heads=args.num_attention_heads,
        groups=groups,
        head_size=(keys + args.v_head_dim) // 2 if latent else keys,
        vocabulary=getattr(args, "padded_vocab_size", None) or 0,  # set after Megatron has built its tokenizer
        context=args.seq_length,
        tied=not args.untie_embeddings_and_output_weights,
    )
    modules = args.recompute_modules or ("core_attn",)
    return Layout(
        model=model,
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        vpp=args.virtual_pipeline_model_parallel_size or 1,
        dp=args.data_parallel_size,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
        cp=args.context_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size,
        sequence_parallel=args.sequence_parallel,
        recompute=args.recompute_granularity or "none",
        recompute_layers=args.recompute_num_layers if args.recompute_method == "block" else None,
        recompute_modules=tuple(modules),
        distributed_optimizer=args.use_distributed_optimizer,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        gradient_bytes=4 if args.accumulate_allreduce_grads_in_fp32 else 2,
        gradient_accumulation_fusion=args.gradient_accumulation_fusion,
        fused_swiglu=config.fusions == "auto" and args.swiglu,
        grouped_experts=bool(args.moe_grouped_gemm) and args.transformer_impl == "transformer_engine",
    )
