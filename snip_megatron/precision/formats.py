"""Number formats, the GEMMs that they are chosen for, and the variants of formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Format(str, Enum):
    """Number format of the operands of a GEMM.

    The order of declaration is the int8 code by which maps are compared and hashed. It is stored nowhere.
    """

    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"
    FP8_TENSOR = "fp8_tensor"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"
    MXFP8 = "mxfp8"
    NVFP4_46 = "nvfp4_46"
    NVFP4_HADAMARD = "nvfp4_hadamard"
    NVFP4_HADAMARD_FIXED = "nvfp4_hadamard_fixed"
    MXFP4_HADAMARD = "mxfp4_hadamard"
    MXFP4_HADAMARD_FIXED = "mxfp4_hadamard_fixed"

    @property
    def code(self) -> int:
        """The int8 code of this format."""
        return FORMATS.index(self)

    @property
    def bits(self) -> int:
        return 16 if self is Format.BF16 else 4 if self in FOUR_BIT else 8

    @property
    def base(self) -> Format:
        """The format that this one is a variant of. A format that is no variant is its own base."""
        return VARIANTS[self].base if self in VARIANTS else self

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """The GEMMs that may run in this format: all three, unless it is a variant."""
        return VARIANTS[self].gemms if self in VARIANTS else tuple(Gemm)


FORMATS: tuple[Format, ...] = tuple(Format)
"""Formats in the order of their codes."""

Formats = tuple[Format, Format, Format]
"""Formats of fprop, dgrad and wgrad."""

FormatPair = tuple[Format | None, Format | None]
"""Formats of the two GEMMs that read a matrix: X, W or G. A format is None if its GEMM does not run."""

ALL_BF16: Formats = (Format.BF16,) * 3


class Gemm(str, Enum):
    """The three GEMMs of a linear: Y = X·Wᵀ, dX = G·W, dW = Gᵀ·X."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


@dataclass(frozen=True)
class Variant:
    """A format with the bits of another one but other scales or rounding (``numerics/quantize/formats.py``).

    Its GEMM runs on the same hardware in the same time as that of its base.
    """

    base: Format  # the format that it is a variant of
    gemms: tuple[Gemm, ...]  # the GEMMs that may run in it
    separate_weight: bool = False  # whether fprop and dgrad cannot share one quantised W


VARIANTS: Mapping[Format, Variant] = {
    Format.NVFP4_46: Variant(Format.NVFP4, (Gemm.FPROP,), separate_weight=True),
    Format.NVFP4_HADAMARD: Variant(Format.NVFP4, (Gemm.WGRAD,)),
    Format.NVFP4_HADAMARD_FIXED: Variant(Format.NVFP4, (Gemm.WGRAD,)),
    Format.MXFP4_HADAMARD: Variant(Format.MXFP4, (Gemm.WGRAD,)),
    Format.MXFP4_HADAMARD_FIXED: Variant(Format.MXFP4, (Gemm.WGRAD,)),
}
"""The formats that are variants of another one."""

FOUR_BIT = frozenset(fmt for fmt in Format if fmt.base in (Format.FP4, Format.NVFP4, Format.MXFP4))
"""Formats that count towards the fp4 share."""


def misplaced(fmt: Format, gemm: Gemm | None) -> str | None:
    """Return why a GEMM, or a whole linear if ``gemm`` is None, cannot run in ``fmt``. None if it can."""
    gemms = tuple(Gemm) if gemm is None else (gemm,)
    missing = [g.value for g in gemms if g not in fmt.gemms]
    return f"{fmt.value} is a format of {' and '.join(fmt.gemms)}, not of {missing[0]}" if missing else None


def candidates_fault(formats: Sequence[str], *, granularity: str, share: bool) -> str | None:
    """Return why ``formats`` cannot be the candidates of a budget, or None if they can.

    ``granularity`` is ``gemm``, or ``layer``, where a format must be one of all three GEMMs. ``share`` says whether the
    budget is a share of FLOPs in four bits, where bf16 would cost nothing.
    """
    if not formats or len(set(formats)) < len(formats) or not set(formats) <= set(FORMATS):
        return f"expected distinct names of {', '.join(FORMATS)}"
    candidates = [Format(name) for name in formats]
    if set(candidates) == {Format.BF16}:
        return "leaves nothing to choose; add fp8, fp8_tensor or fp4"
    if share and Format.BF16 in candidates:
        return "bf16 is no candidate under fp4=, where it costs nothing; pin GEMMs to it, or budget time or loss"
    if granularity == "layer":
        faults = [why for fmt in candidates if (why := misplaced(fmt, None)) is not None]
        return f"{faults[0]}, and at granularity layer a linear has one format" if faults else None
    for gemm in Gemm:
        if all(gemm not in fmt.gemms for fmt in candidates):
            return f"none is a format of {gemm.value}; add {candidates[0].base.value}"
    return None
