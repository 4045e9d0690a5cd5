"""The amax of a matrix whose shards lie on several tensor parallel ranks.

fp8_tensor and nvfp4 have one scale for the whole tensor. If each rank computed it from its shard, the scale would
depend on the tensor parallel layout. The ranks that share a matrix therefore use the maximum of their amaxes, which
costs one all-reduce of four bytes per matrix. Tensor parallel size 1 and formats with tile scales need no
communication. Under sequence parallelism the gathered tensor is quantised. Data and context parallel ranks do not take
part: the microbatch of a rank is a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from snip_megatron.precision import Format
from snip_megatron.quantization.formats import SPECS, Scaling
from snip_megatron.quantization.hadamard import ROTATED, Rotation, Signs, rotate

_SCALED = frozenset(fmt for fmt, spec in SPECS.items() if spec.scaling in (Scaling.FP32_TENSOR, Scaling.E4M3_FP32))

WHOLE_TENSOR = _SCALED - ROTATED
"""Formats that have one scale for the whole tensor, from the amax of the tensor itself."""

ROTATED_TENSOR = _SCALED & ROTATED
"""Formats that have one scale for the whole tensor, from the amax of its Hadamard transform."""

_SHARDED = {"column": ("w", "g"), "row": ("x", "w")}
_MAGNITUDE = 0x7FFFFFFF


def is_shared(parallel: str, operand: str) -> bool:
    """Return whether each tensor parallel rank holds only a shard of an operand.

    X of a column parallel linear and G of a row parallel linear are not sharded: every rank has the whole tensor, under
    sequence parallelism after the gather.

    Args:
        parallel: "column" or "row".
        operand: "x", "w" or "g".
    """
    return operand in _SHARDED[parallel]


def shared_amax(
    x: torch.Tensor, formats: Iterable[Format | str | None], group: dist.ProcessGroup | None
) -> torch.Tensor | None:
    """Return the maximum of abs(x) over the shards of all ranks in ``group``, FP32 and 0-dim.

    The result is NaN if any shard contains a NaN. Returns None, without communication, if there is no group or if none
    of ``formats`` has a scale for the whole tensor. Otherwise this is a collective of ``group``.
    """
    if group is None or not any(fmt in WHOLE_TENSOR for fmt in formats):
        return None
    return _largest(x, group)


def shared_rotation(x: torch.Tensor, fmt: Format, signs: Signs, group: dist.ProcessGroup | None) -> Rotation:
    """Return how wgrad transforms x, a shard of a matrix on each rank of ``group``.

    It is a collective of ``group`` if the format has a scale for the whole tensor.

    Args:
        x: [T, features], all tokens of the GEMM.
        fmt: format of the wgrad, which has a Hadamard transform.
        signs: see :class:`snip_megatron.quantization.hadamard.Rotation`. Formats without random signs ignore them.
        group: None if this rank holds the whole matrix.
    """
    if not SPECS[fmt].random_signs:
        signs = 0
    if group is None or fmt not in ROTATED_TENSOR:
        return Rotation(signs)
    return Rotation(signs, _largest(rotate(x, signs), group))


def _largest(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.detach()
    amax = torch.linalg.vector_norm(x, float("inf")) if x.numel() else x.new_zeros(())
    # The maximum is taken over the bits as integers. FP32 magnitudes have the order of their bits, with NaN above all
    # numbers; a maximum over floats may drop a NaN.
    bits = amax.to(torch.float32).view(1).view(torch.int32).bitwise_and_(_MAGNITUDE)
    dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
    return bits.view(torch.float32).view(())
