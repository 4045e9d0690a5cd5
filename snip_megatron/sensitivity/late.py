"""The policies ``late-forward`` and ``late-all``: everything in four bits, and better formats for the last steps.

They are baselines for the plans that the solver makes. ``late-all`` follows NVIDIA's NVFP4 training of a 12 B model,
which ends in a higher precision. The appendix of its report prefers to switch only the forward GEMMs, as
``late-forward`` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from snip_megatron.errors import SnipError, cut
from snip_megatron.precision import Format, Gemm, PrecisionMap, fp4_fraction, option_id
from snip_megatron.precision.phases import PlanPhase, PrecisionPlan
from snip_megatron.sensitivity.policies import LATE, pinned_formats
from snip_megatron.sensitivity.request import BITS, SolveRequest

_ROUNDING = 1e-9  # of a step: a number of steps that is whole but for rounding is not cut by one


def late_maps(request: SolveRequest, names: Sequence[str]) -> tuple[PrecisionMap, PrecisionMap]:
    """Return the map of the first steps and the map of the last steps, with the request's pins applied.

    Raises:
        SnipError: no candidate format has four bits, or a pin is invalid.
    """
    low = {gemm: Format(request.formats[request.lowest(gemm)]) for gemm in Gemm}
    if any(fmt.bits > 4 for fmt in low.values()):
        raise SnipError(
            f"--snip-policy {request.policy} begins in four bits, and none of --snip-formats"
            f" {cut(','.join(request.formats))} has; add fp4"
        )
    better = {gemm: Format(max(request.formats_of(gemm), key=BITS.__getitem__)) for gemm in Gemm}
    better = {gemm: Format.BF16 if fmt.bits == low[gemm].bits else fmt for gemm, fmt in better.items()}
    switched = (Gemm.FPROP,) if request.policy == "late-forward" else tuple(Gemm)
    first = {option_id(name, gemm): low[gemm] for name in names for gemm in Gemm}
    last = first | {option_id(name, gemm): better[gemm] for name in names for gemm in switched}
    fixed = {key: Format(fmt) for key, fmt in pinned_formats(names, request.pins).items()}
    return PrecisionMap(choices=first | fixed), PrecisionMap(choices=last | fixed)


def late_shares(
    request: SolveRequest, flops: Mapping[str, float], unquantised: float = 0.0
) -> tuple[tuple[PrecisionMap, float], tuple[PrecisionMap, float]]:
    """Return both maps of :func:`late_maps` with their fp4 shares.

    Args:
        request: the request, whose ``target`` is the average share.
        flops: name of a linear → FLOPs a token of one of its GEMMs.
        unquantised: FLOPs a token of the decoder's linears that no map covers, for all GEMMs together.

    Raises:
        SnipError: the average share is above that of the first map, so that no plan reaches it.
    """
    first, last = late_maps(request, list(flops))
    high, low = (fp4_fraction(each, flops, unquantised) for each in (first, last))
    if high < request.target - 1e-9:
        raise SnipError(
            f"--snip-policy {request.policy} reaches an average fp4 share of {math.floor(high * 1e4) / 1e4:.4f} at"
            f" most, less than the {request.target:g} of --snip-budget; lower the budget or pin less"
        )
    return (first, high), (last, low)


def late_plan(
    request: SolveRequest,
    flops: Mapping[str, float],
    origin: int,
    last: int,
    unquantised: float = 0.0,
    *,
    step: int | None = None,
    spent: float = 0.0,
) -> PrecisionPlan:
    """Return the plan of a run over the steps [origin, last): as many precise steps as the average share allows.

    Args:
        origin: the first step of the run. last: the step before which it ends.
        step: the first step of the plan, if the run has begun before; None for ``origin``.
        spent: Σ of the fp4 shares of the steps before ``step``.

    The other arguments and errors are those of :func:`late_shares`.
    """
    if request.policy not in LATE:
        raise ValueError(f"{request.policy} is not one of {', '.join(LATE)}")
    (early, high), (late, low) = late_shares(request, flops, unquantised)
    begin = origin if step is None else step
    steps, rest = last - origin, last - begin
    spare = max(0.0, math.fsum([spent, rest * high, -request.target * steps]))
    precise = 0 if high <= low else min(rest, math.floor(spare / (high - low) + _ROUNDING))
    parts = [(begin, rest - precise, early, high), (last - precise, precise, late, low)]
    phases = tuple(
        PlanPhase(begin, precision_map.with_fields(target=request.target, achieved=share))
        for begin, count, precision_map, share in parts
        if count
    )
    average = math.fsum([spent, *(count * share for _, count, _, share in parts)]) / steps
    return PrecisionPlan(phases, last, target=request.target, achieved=average)
