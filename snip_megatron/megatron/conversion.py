"""Converts the linears of built model chunks to SNIP's classes, in place and without changing their parameters."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
from megatron.core.transformer.heterogeneous.linear_replacements import ColumnParallelLinearGathered
from megatron.core.transformer.transformer_layer import TransformerLayer

from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.megatron.compat.meta_model import stages_on_meta
from snip_megatron.megatron.compat.routing import skip_sorting
from snip_megatron.megatron.linears import (
    SnipColumnParallelLinear,
    SnipColumnParallelLinearGathered,
    SnipRowParallelLinear,
    fuse_swiglu,
)
from snip_megatron.megatron.model_linears import BuiltLinear, ModelLinears, built_linears, gather_stages
from snip_megatron.megatron.startup import say
from snip_megatron.numerics.products.selection import resolve_gemm, select_backend
from snip_megatron.precision import LinearId, Side
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config import SnipConfig

_CLASSES: dict[type, type] = {
    ColumnParallelLinear: SnipColumnParallelLinear,
    ColumnParallelLinearGathered: SnipColumnParallelLinearGathered,
    RowParallelLinear: SnipRowParallelLinear,
}
"""Class of a built linear → the class after conversion. It must match exactly: a subclass may do more than its base."""
_PARALLEL = {Side.OUTPUT: "column", Side.INPUT: "row", Side.NEITHER: "whole"}
if HAVE_TE:
    from snip_megatron.megatron import te_linears

    _CLASSES |= te_linears.CLASSES
for _stock_class, _converted in _CLASSES.items():
    _converted.__name__ = _stock_class.__name__  # Megatron-FSDP derives the sharding of a weight from the class name
_CLASSES |= {converted: converted for converted in _CLASSES.values()}


def convert_model(model_chunks: Sequence[torch.nn.Module], config: SnipConfig) -> LinearRegistry:
    """Convert every decoder linear of this rank's model chunks. See :func:`snip_megatron.megatron.convert_model`."""
    built = built_linears(model_chunks)
    stock = gather_stages(_stock(built))
    linears = ModelLinears.split(gather_stages({each.row: None for each in built}), stock)  # experts share a row
    formats = config.formats_in_use()
    # The selection is completed when its kernels are compiled: runtime/warmup.py.
    selection = select_backend(config.gemm, formats, library=config.gemm_library, checks=False)
    use_te_recipe = config.gemm == "transformer_engine"
    context = StepContext(seed=config.seed, backend=selection.backend, use_te_recipe=use_te_recipe)
    registry = LinearRegistry(linears.covered, context, stock, linears.uncovered)
    for linear in built:
        if str(linear.id) not in stock:
            if use_te_recipe and isinstance(linear.module, ColumnParallelLinear | RowParallelLinear):
                raise SnipError(
                    f"--snip-gemm transformer_engine: {linear.id} is a {type(linear.module).__name__} of Megatron; use"
                    " --transformer-impl transformer_engine, or --snip-gemm auto"
                )
            _convert_linear(linear, registry)
    skip_sorting(model_chunks)
    if HAVE_TE:
        te_linears.convert_expert_mlps(model_chunks, fuse_swiglu=config.fusions == "auto" and not use_te_recipe)
    say(f"GEMMs by {context.gemm_backend} ({selection.reason})")
    for stays in what_stays(registry.stock):
        say(f"{stays}; it counts in the fp4 share")
    if config.fusions == "auto" and not use_te_recipe:
        modules = (named for chunk in model_chunks for named in chunk.named_modules())
        layers = [m for name, m in modules if isinstance(m, TransformerLayer) and "mtp" not in name.split(".")]
        fused = fuse_swiglu(layers, selection.backend)
        if selection.backend.fuses_swiglu:
            say(f"fused with quantisation: {fused}")
    return registry


def linears_on_meta(args: argparse.Namespace, model_config: Any) -> ModelLinears:
    """Return the linears of a model without starting ranks. Raises CannotBuildError if it cannot be built here."""
    built = [linear for chunks in stages_on_meta(args, model_config) for linear in built_linears(chunks)]
    return ModelLinears.split((linear.row for linear in built), _stock(built))


def with_resolved_gemm(config: SnipConfig, args: argparse.Namespace) -> SnipConfig:
    """Return the configuration with the backend that ``--snip-gemm auto`` selects for this machine and this model."""
    te_linears = args.transformer_impl == "transformer_engine"
    return replace(config, gemm=resolve_gemm(config.gemm, config.formats_in_use(), te_linears=te_linears))


def _stock(built: Sequence[BuiltLinear]) -> dict[str, str]:
    """Return the name of each linear that is not converted → the reason."""
    return {str(linear.id): why for linear in built if (why := _why_stock(linear)) is not None}


def _why_stock(linear: BuiltLinear) -> str | None:
    """Return why a linear is not converted and stays in bf16. None if it can be converted."""
    kind = type(linear.module)
    if isinstance(linear.parent, AbsorbedMLASelfAttention) and linear.id.path.endswith(".linear_kv_up_proj"):
        return "attention multiplies by parts of its weight"
    if kind not in _CLASSES:
        return f"no quantised form of {kind.__qualname__}"
    if getattr(linear.module, "single_grouped_weight", False):
        return "one parameter holds the weights of all experts"
    weights = [weight for name, weight in linear.module.named_parameters(recurse=False) if name.startswith("weight")]
    return None if all(weight.requires_grad for weight in weights) else "frozen"


def what_stays(stock: Mapping[str, str]) -> list[str]:
    """Return one line for each kind of linear that stays in bf16, with the reason."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for name, why in stock.items():
        linear = LinearId.parse(name)
        kinds.setdefault((f"{linear.stack}.layers.*.{linear.path}", why), []).append(linear.layer)
    return [f"{kind} of {len(layers)} layers stays bf16 ({why})" for (kind, why), layers in kinds.items()]


def _convert_linear(linear: BuiltLinear, registry: LinearRegistry) -> None:
    module, row, weight = linear.module, linear.row, getattr(linear.module, linear.parameter)
    module.__class__, parallel = _CLASSES[type(module)], _PARALLEL[row.sharded]
    # Transformer Engine's linears have the group under another name where they exchange nothing themselves.
    group = getattr(module, "_tp_group", None) or module.tp_group
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    shared = size > 1 and (parallel != "whole" or module.config.sequence_parallel)
    n, k = weight.shape
    out_features, in_features = torch.arange(n), torch.arange(k)
    if parallel == "column":
        # Grouped linears do not mark that gate and up projection are sharded separately.
        halves = linear.parameter != "weight" and module.config.gated_linear_unit
        out_features = _global_features([n // 2] * 2 if halves else _parts(weight), rank, size)
    elif parallel == "row":
        in_features = _global_features([k], rank, size)
    handle = LinearHandle(
        id=linear.id, parallel=parallel, n=row.n, k=row.k, stage=row.stage, tp_rank=rank, tp_size=size,
        out_features=out_features, in_features=in_features, context=registry.context, module=module,
        tp_group=group if shared else None, expert=linear.expert,
        delays=module.config.delay_wgrad_compute and hasattr(module, "wgrad_store"), parameter=linear.parameter,
    )  # fmt: skip
    if linear.parameter == "weight":
        module.snip = handle
    elif linear.parameter == "weight0":  # one module for all experts of this rank
        module.snip_experts = [handle]
    else:
        module.snip_experts.append(handle)
    registry.add(handle)


def _parts(weight: torch.Tensor) -> list[int]:
    """Return the sizes of the parts of a shard [N local, K] that are sharded separately.

    Megatron marks a linear of several parts: a mixer's ``in_proj`` by sizes, and gate and up projection by a stride.
    """
    sizes = getattr(weight, "partition_sizes", None)
    if sizes is not None:
        return list(sizes)
    stride = getattr(weight, "partition_stride", 1)
    return [len(weight) // stride] * stride


def _global_features(parts: Sequence[int], rank: int, size: int) -> torch.Tensor:
    """Return the global indices of a rank's features, int64, given the local sizes of the ``parts``."""
    indices, start = [], 0
    for count in parts:
        indices.append(torch.arange(count) + start + rank * count)
        start += count * size
    return torch.cat(indices)
