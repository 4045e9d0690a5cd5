"""What runs in which format: a precision map as the planner's other parts take it, and its shares."""

from __future__ import annotations

from collections import Counter

from snip_megatron.planner.memory import FormatsOf
from snip_megatron.planner.models import ModelShape
from snip_megatron.precision import DENSE_LAYER, FOUR_BIT, Gemm, LinearId, PrecisionMap
from snip_megatron.timing.shapes import Formats


def formats_of_map(model: ModelShape, precision_map: PrecisionMap) -> FormatsOf:
    """Return a map as a function of block and kind of linear."""
    chosen: dict[tuple[int, str], Formats] = {}
    for block in range(model.blocks):
        for kind in DENSE_LAYER:
            fprop, dgrad, wgrad = (
                precision_map.format_of(str(LinearId("decoder", block, kind)), gemm) for gemm in Gemm
            )
            chosen[block, kind] = (fprop, dgrad, wgrad)
    return lambda block, kind: chosen[block, kind]


def gemm_counts(model: ModelShape, formats_of: FormatsOf) -> dict[str, int]:
    """Return format → number of GEMMs."""
    each = (fmt for block in range(model.blocks) for kind in DENSE_LAYER for fmt in formats_of(block, kind))
    return dict(Counter(fmt.value for fmt in each))


def fp4_share(model: ModelShape, formats_of: FormatsOf) -> float:
    """Return the share of the linears' FLOPs in four bits."""
    four_bit = total = 0.0
    for block in range(model.blocks):
        for kind in DENSE_LAYER:
            n, k = model.linears[kind]
            for fmt in formats_of(block, kind):
                total += n * k
                four_bit += n * k if fmt in FOUR_BIT else 0.0
    return four_bit / total
