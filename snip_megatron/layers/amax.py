"""The amax of a matrix whose shards lie on several tensor parallel ranks.

fp8_tensor and nvfp4 have one scale for the whole tensor. If each rank computed it from its shard, the scale would
depend on the tensor parallel layout. The ranks that share a matrix therefore use the maximum of their amaxes, which
costs one all-reduce of four bytes per matrix. Tensor parallel size 1 and formats with tile scales need no
communication. Under sequence parallelism the gathered tensor is quantised. Data and context parallel ranks do not take
part, because the microbatch of a rank is a tensor of its own.
"""

import torch
import torch.distributed as dist

from snip_megatron.numerics.quantize.formats import SPECS, Scaling
from snip_megatron.numerics.quantize.reference import ROTATED

_SCALED = frozenset(fmt for fmt, spec in SPECS.items() if spec.scaling in (Scaling.FP32_TENSOR, Scaling.E4M3_FP32))

WHOLE_TENSOR = _SCALED - ROTATED
"""Formats that have one scale for the whole tensor, from the amax of the tensor itself."""

ROTATED_TENSOR = _SCALED & ROTATED
"""Formats that have one scale for the whole tensor, from the amax of its Hadamard transform."""

_MAGNITUDE = 0x7FFFFFFF


def largest_of_shards(amax: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the maximum of ``amax`` (FP32 and 0-dim) over the ranks of ``group``, or ``amax`` if there is no group.

    The result is NaN if the amax of any rank is NaN. With a group this is a collective of it.
    """
    if group is None:
        return amax
    # FP32 magnitudes have the order of their bits as integers, with NaN above all numbers. A maximum over floats may
    # drop a NaN.
    bits = amax.view(1).view(torch.int32).bitwise_and(_MAGNITUDE)
    dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
    return bits.view(torch.float32).view(())


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """Return max|x|, FP32 and 0-dim. It is NaN if x holds a NaN."""
    x = x.detach()
    amax = torch.linalg.vector_norm(x, float("inf")) if x.numel() else x.new_zeros(())
    return amax.to(torch.float32)
