"""Runs Transformer Engine's own linears in the formats of the precision map.

Each combination of three formats has one recipe. Transformer Engine makes new quantizers for a module whose recipe is
another object than before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor
from transformer_engine.common.recipe import CustomRecipe, MMParams

from snip_megatron.layers.context import LinearHandle
from snip_megatron.numerics.products.transformer_engine import te_map
from snip_megatron.numerics.quantize.operands import OperandPair
from snip_megatron.precision import Format, Formats


@functools.cache
def recipe_of(formats: Formats) -> Any:
    """Return the recipe of a linear whose fprop, dgrad and wgrad have these formats."""
    names = tuple(fmt.value for fmt in formats)
    quantizer = te_map().quantizer
    recipe = CustomRecipe(qfactory=lambda role: quantizer(names, "" if role is None else role.tensor_type))
    if formats[0] is Format.FP8:  # cuBLAS multiplies tiles in no other way, and grouped linears ask the recipe
        recipe.fp8_gemm_fprop = MMParams(use_split_accumulator=True)
    return recipe


class StockState:
    """Keeps recipes of maps out of checkpoints, so that any model of Megatron loads them."""

    def get_extra_state(self: Any) -> Tensor | None:
        """Return what a linear without a recipe has, if its recipe is one of a map: these keep nothing."""
        if isinstance(self.fp8_meta.get("recipe"), CustomRecipe):
            return torch.empty(0, dtype=torch.uint8)
        return super().get_extra_state()  # type: ignore[misc,no-any-return]


def forward_under(
    module: Any, handle: LinearHandle, weights: Sequence[Tensor], forward: Callable[..., Any], *arguments: Any
) -> Any:
    """Return ``forward(*arguments)`` of a stock linear in the formats of ``handle``. Its backward has them too.

    Megatron tells linears of a new optimizer step only where it quantises itself. So the quantised weight is forgotten
    here as soon as the cache of ``handle`` would be made anew.
    """
    recipe = recipe_of(handle.formats)

    def forget() -> OperandPair:
        module._fp8_workspaces.clear()
        return None, None

    handle.state.weights.get(recipe, weights, handle.formats[:2], forget)
    with te.autocast(enabled=True, recipe=recipe):
        return forward(*arguments)
