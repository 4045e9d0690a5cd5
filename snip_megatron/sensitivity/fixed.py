"""Policies whose maps are known before training, which ignore the scores of options.

One format for all GEMMs, and the recipes of others: ``nvidia`` is the recipe of NVIDIA's NVFP4 training (arXiv
2509.25149): the last 15 % of the blocks in bf16, all other GEMMs in four bits, Hadamard transforms in wgrad, gradients
rounded stochastically. ``mxfp8-forward`` has fprop in mxfp8 and the backward in four bits, as one of the recipes that
Transformer Engine ships.

``late-forward`` and ``late-all`` are plans of two maps: everything in four bits, and better formats for the last steps,
as many as the average share of the budget allows. ``late-all`` follows NVIDIA's training of a 12 B model, which ends in
a higher precision. The appendix of its report prefers to switch only the forward GEMMs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from snip_megatron.precision import Format, Gemm, LinearId, PrecisionMap, fp4_fraction, option_id
from snip_megatron.precision.errors import SnipError, cut
from snip_megatron.precision.linears import pinned_formats
from snip_megatron.precision.phases import PlanPhase, PrecisionPlan
from snip_megatron.sensitivity.request import SolveRequest

FIXED = ("uniform-fp8", "uniform-fp4", "bf16", "nvidia", "mxfp8-forward")
"""Policies with a fixed map."""

LATE = ("late-forward", "late-all")
"""Policies with a fixed plan of two maps."""

TAIL_SHARE = 0.15
"""Share of the blocks, from the end, that NVIDIA's NVFP4 recipe keeps in bf16."""

_HADAMARD = {Format.NVFP4: Format.NVFP4_HADAMARD, Format.MXFP4: Format.MXFP4_HADAMARD}


def tail_blocks(blocks: int) -> int:
    """Return how many of ``blocks`` blocks, from the end, are kept in bf16: at least one."""
    return max(1, round(TAIL_SHARE * blocks))


def fixed_formats(policy: str, formats: Sequence[str] = ()) -> tuple[dict[Gemm, Format], dict[Gemm, Format]]:
    """Return the formats of a policy of :data:`FIXED` by GEMM: those of most blocks, and those of the last ones.

    Of the candidates ``formats``, ``uniform-fp8`` takes the 8-bit one, or fp8; ``uniform-fp4`` the 4-bit one, or fp4;
    the recipes the 4-bit one of nvfp4 and mxfp4, or nvfp4.
    """
    candidates = [Format(name) for name in formats]
    if policy == "bf16":
        return _all(Format.BF16), _all(Format.BF16)
    if policy in ("uniform-fp8", "uniform-fp4"):
        bits, default = (8, Format.FP8) if policy == "uniform-fp8" else (4, Format.FP4)
        own = [fmt for fmt in candidates if fmt.bits == bits and fmt.base is fmt]
        fmt = own[0] if own and default not in own else default
        return _all(fmt), _all(fmt)
    low = next((fmt for fmt in candidates if fmt in _HADAMARD), Format.NVFP4)
    if policy == "nvidia":
        return _all(low) | {Gemm.WGRAD: _HADAMARD[low]}, _all(Format.BF16)
    if policy == "mxfp8-forward":
        most = _all(low) | {Gemm.FPROP: Format.MXFP8}
        return most, most
    raise ValueError(f"{policy} is not one of {', '.join(FIXED)}")


def formats_of(policy: str, formats: Sequence[str] = (), pins: Sequence[tuple[str, str]] = ()) -> frozenset[Format]:
    """Return all formats that maps of a policy may have: of its fixed map or the candidates, and those of pins."""
    own: set[Format] = set(map(Format, formats))
    if policy in FIXED:
        most, last = fixed_formats(policy, formats)
        own = {*most.values(), *last.values()}
    return frozenset(own | {Format(fmt) for _, fmt in pins})


def fixed_map(
    policy: str, linears: Iterable[str], pins: Sequence[tuple[str, str]] = (), formats: Sequence[str] = ()
) -> PrecisionMap | None:
    """Return the map of a policy of :data:`FIXED` with (glob, format) ``pins`` applied, or None for other policies.

    ``formats`` are the candidates. Raises SnipError if a pin matches nothing.
    """
    if policy not in FIXED:
        return None
    most, last = fixed_formats(policy, formats)
    layer = {name: LinearId.parse(name).layer for name in linears}
    blocks = 1 + max(layer.values(), default=0)
    kept = blocks - tail_blocks(blocks)
    of_layer = {name: last if at >= kept else most for name, at in layer.items()}
    choices = {option_id(name, gemm): by_gemm[gemm] for name, by_gemm in of_layer.items() for gemm in Gemm}
    return PrecisionMap(choices=choices | pinned_formats(layer, pins))


def _all(fmt: Format) -> dict[Gemm, Format]:
    return dict.fromkeys(Gemm, fmt)


# -- plans of two maps ---------------------------------------------------------------------------------------------
def late_shares(
    request: SolveRequest, flops: Mapping[str, float], unquantised: float = 0.0
) -> tuple[tuple[PrecisionMap, float], tuple[PrecisionMap, float]]:
    """Return the map of the first steps and the map of the last steps, pinned as asked, with their fp4 shares.

    ``flops`` are those a token of one GEMM by the linear's name, ``unquantised`` those of all GEMMs that no map covers.
    Raises SnipError if no candidate format has four bits, a pin is invalid, or the average share that the request's
    budget asks for is above that of the first map, so that no plan reaches it.
    """
    low = {gemm: Format(request.formats[request.lowest(gemm)]) for gemm in Gemm}
    if any(fmt.bits > 4 for fmt in low.values()):
        raise SnipError(
            f"--snip-policy {request.policy} begins in four bits, and none of --snip-formats"
            f" {cut(','.join(request.formats))} has; add fp4"
        )
    better = {gemm: max(map(Format, request.formats_of(gemm)), key=lambda fmt: fmt.bits) for gemm in Gemm}
    better = {gemm: Format.BF16 if fmt.bits == low[gemm].bits else fmt for gemm, fmt in better.items()}
    switched = (Gemm.FPROP,) if request.policy == "late-forward" else tuple(Gemm)
    first = {option_id(name, gemm): low[gemm] for name in flops for gemm in Gemm}
    last = first | {option_id(name, gemm): better[gemm] for name in flops for gemm in switched}
    fixed = pinned_formats(flops, request.pins)
    early, late = PrecisionMap(choices=first | fixed), PrecisionMap(choices=last | fixed)
    high = fp4_fraction(early, flops, unquantised)
    if high < request.budget.value - 1e-9:
        raise SnipError(
            f"--snip-policy {request.policy} reaches an average fp4 share of {math.floor(high * 1e4) / 1e4:.4f} at"
            f" most, less than the {request.budget.value:g} of --snip-budget; lower the budget or pin less"
        )
    return (early, high), (late, fp4_fraction(late, flops, unquantised))


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

    ``step`` is the first step of the plan if the run has begun before, and ``spent`` Σ of the fp4 shares of the steps
    before it. The other arguments and errors are those of :func:`late_shares`.
    """
    (early, high), (late, low) = late_shares(request, flops, unquantised)
    begin = origin if step is None else step
    steps, rest = last - origin, last - begin
    spare = max(0.0, math.fsum([spent, rest * high, -request.budget.value * steps]))
    precise = 0 if high <= low else min(rest, math.floor(spare / (high - low) + 1e-9))
    parts = [(begin, rest - precise, early, high), (last - precise, precise, late, low)]
    phases = tuple(
        PlanPhase(begin, replace(precision_map, target=request.budget.value, achieved=share))
        for begin, count, precision_map, share in parts
        if count
    )
    average = math.fsum([spent, *(count * share for _, count, _, share in parts)]) / steps
    return PrecisionPlan(phases, last, target=request.budget.value, achieved=average)
