"""Policies with a fixed map, which ignore the budget: one format for all GEMMs, and the recipes of others.

``nvidia`` is the recipe of NVIDIA's NVFP4 training (arXiv 2509.25149): the last 15 % of the blocks in bf16, all other
GEMMs in four bits, Hadamard transforms in wgrad, gradients rounded stochastically. ``mxfp8-forward`` has fprop in mxfp8
and the backward in four bits, as one of the recipes that Transformer Engine ships.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from snip_megatron.precision import Format, Gemm, LinearId, option_id

FIXED = ("uniform-fp8", "uniform-fp4", "bf16", "nvidia", "mxfp8-forward")
"""Policies with a fixed map."""

TAIL_SHARE = 0.15
"""Share of the blocks, from the end, that NVIDIA's NVFP4 recipe keeps in bf16."""

_HADAMARD = {Format.NVFP4: Format.NVFP4_HADAMARD, Format.MXFP4: Format.MXFP4_HADAMARD}


def tail_blocks(blocks: int) -> int:
    """Return how many of ``blocks`` blocks, from the end, are kept in bf16: at least one."""
    return max(1, round(TAIL_SHARE * blocks))


def fixed_formats(policy: str, formats: Sequence[str] = ()) -> tuple[dict[Gemm, Format], dict[Gemm, Format]]:
    """Return the formats of a fixed policy by GEMM: those of most blocks, and those of the last ones.

    Args:
        policy: one of :data:`FIXED`.
        formats: the candidate formats of the run. ``uniform-fp8`` takes the 8-bit format among them, or fp8;
            ``uniform-fp4`` the 4-bit one, or fp4; the recipes the 4-bit one of nvfp4 and mxfp4, or nvfp4.
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
    """Return all formats that maps of a policy may have: those of its fixed map or the candidates, and those of pins.

    Args:
        policy: any policy.
        formats: the candidate formats of the run.
        pins: (glob, format).
    """
    own: set[Format] = set(map(Format, formats))
    if policy in FIXED:
        most, last = fixed_formats(policy, formats)
        own = {*most.values(), *last.values()}
    return frozenset(own | {Format(fmt) for _, fmt in pins})


def fixed_choices(policy: str, linears: Iterable[str], formats: Sequence[str] = ()) -> dict[str, Format]:
    """Return option id → format of every GEMM of ``linears``. The arguments are those of :func:`fixed_formats`."""
    most, last = fixed_formats(policy, formats)
    names = list(linears)
    layer = {name: LinearId.parse(name).layer for name in names}
    blocks = 1 + max(layer.values(), default=0)
    kept = blocks - tail_blocks(blocks)
    return {option_id(name, gemm): (last if layer[name] >= kept else most)[gemm] for name in names for gemm in Gemm}


def _all(fmt: Format) -> dict[Gemm, Format]:
    return dict.fromkeys(Gemm, fmt)
