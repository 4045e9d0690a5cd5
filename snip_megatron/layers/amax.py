"""The amax of a matrix whose shards lie on several tensor parallel ranks.

fp8_tensor and nvfp4 have one scale for the whole tensor. If each rank computed it from its shard, the scale would
depend on the tensor parallel layout. The ranks that share a matrix therefore use the maximum of their amaxes, which
costs one all-reduce of four bytes per matrix. Tensor parallel size 1 and formats with tile scales need no
communication. Under sequence parallelism the gathered tensor is quantised. If shards are quantised before the gather,
the amax of the gathered tensor is used (:func:`gathered_amaxes`). Data and context parallel ranks do not take part,
because the microbatch of a rank is a tensor of its own.
"""

import torch
import torch.distributed as dist

from snip_megatron.numerics.quantize.formats import SPECS, Scaling
from snip_megatron.numerics.quantize.reference import ROTATED
from snip_megatron.precision import Format

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
    return amax if group is None else largest(amax.view(1), group).view(())


def gathered_amaxes(
    shard: torch.Tensor, formats: tuple[Format | None, Format | None], group: dist.ProcessGroup | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the amaxes of the gathered matrix, for token shards that are quantised before they are gathered.

    nvfp4 scales by the largest finite number, fp8_tensor by the largest of all. If a result is needed, this is a
    collective of ``group``.

    Args:
        shard: this rank's tokens [T, cols]. T is not zero.
        formats: formats for the GEMM that reduces over columns and for the one that reduces over tokens.
        group: the tensor parallel group; None for a single shard.

    Returns:
        For each GEMM FP32 and 0-dim, or None if its format has no scale for the whole tensor. Equal formats get one
        tensor.
    """
    wanted = [fmt for fmt in formats if fmt in WHOLE_TENSOR]
    if not wanted:
        return None, None
    kinds = list(dict.fromkeys(wanted))
    own = torch.stack([amax_of(shard, finite=SPECS[fmt].scaling is Scaling.E4M3_FP32) for fmt in kinds])
    found: dict[Format | None, torch.Tensor] = dict(zip(kinds, largest(own, group).unbind(), strict=True))
    return found.get(formats[0]), found.get(formats[1])


def amax_of(x: torch.Tensor, *, finite: bool = False) -> torch.Tensor:
    """Return max|x|, FP32 and 0-dim, NaN if x holds a NaN; with ``finite`` that of the finite numbers."""
    x = x.detach().nan_to_num(0.0, 0.0, 0.0) if finite else x.detach()
    amax = torch.linalg.vector_norm(x, float("inf")) if x.numel() else x.new_zeros(())
    return amax.to(torch.float32)


def largest(amaxes: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the maxima over the ranks of ``group`` of FP32 magnitudes [n].

    The maximum is taken over the bits as integers. FP32 magnitudes have the order of their bits, with NaN above all
    numbers; a maximum over floats may drop a NaN.
    """
    bits = amaxes.view(torch.int32).bitwise_and(_MAGNITUDE)
    if group is not None:
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
    return bits.view(torch.float32)
