"""One amax for a matrix whose shards lie on several tensor parallel ranks.

fp8_tensor and nvfp4 have a scale for the whole tensor. Taken from a shard, it would depend on the tensor parallel
layout, so ranks that share a matrix take the largest of their amaxes: one all-reduce of four bytes a matrix, none at
tensor parallel size 1 or for formats that scale tile by tile. Under sequence parallelism the gathered tensor is what is
quantised. Data and context parallel ranks are not asked: a rank's microbatch is a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from snip_megatron.precision import Format
from snip_megatron.quantization.formats import SPECS, Scaling

WHOLE_TENSOR = frozenset(fmt for fmt, spec in SPECS.items() if spec.scaling in (Scaling.FP32_TENSOR, Scaling.E4M3_FP32))
"""Formats with a scale for the whole tensor."""

_SHARDED = {"column": ("w", "g"), "row": ("x", "w")}
_MAGNITUDE = 0x7FFFFFFF


def is_shared(parallel: str, operand: str) -> bool:
    """Whether tensor parallel ranks hold shards of "x", "w" or "g" of a "column" or "row" parallel linear.

    Not so X of a column parallel linear and G of a row parallel one: every rank has them whole, under sequence
    parallelism after their gather.
    """
    return operand in _SHARDED[parallel]


def shared_amax(
    x: torch.Tensor, formats: Iterable[Format | str | None], group: dist.ProcessGroup | None
) -> torch.Tensor | None:
    """max|x| over the shards ``x`` of the ranks in ``group``: FP32, 0-dim, NaN where any rank holds one.

    None, and no communication, without a group or where none of ``formats`` scales the whole tensor. All ranks of
    the group must call it alike.
    """
    if group is None or not any(fmt in WHOLE_TENSOR for fmt in formats):
        return None
    x = x.detach()
    amax = torch.linalg.vector_norm(x, float("inf")) if x.numel() else x.new_zeros(())
    # The bits of FP32 magnitudes are ordered like the numbers, with NaN above all: a maximum of floats may drop it.
    bits = amax.to(torch.float32).view(1).view(torch.int32).bitwise_and_(_MAGNITUDE)
    dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
    return bits.view(torch.float32).view(())
