"""Number formats, and the GEMMs that they are chosen for."""

from __future__ import annotations

from collections.abc import Sequence
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

    @property
    def code(self) -> int:
        """The int8 code of this format."""
        return FORMATS.index(self)

    @property
    def bits(self) -> int:
        return 16 if self is Format.BF16 else 4 if self in FOUR_BIT else 8


FORMATS: tuple[Format, ...] = tuple(Format)
"""Formats in the order of their codes."""

Formats = tuple[Format, Format, Format]
"""Formats of fprop, dgrad and wgrad."""

ALL_BF16: Formats = (Format.BF16,) * 3


class Gemm(str, Enum):
    """The three GEMMs of a linear: Y = X·Wᵀ, dX = G·W, dW = Gᵀ·X."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


FOUR_BIT = frozenset((Format.FP4, Format.NVFP4, Format.MXFP4))
"""Formats that count towards the fp4 share."""


def candidates_fault(formats: Sequence[str], *, share: bool) -> str | None:
    """Return why ``formats`` cannot be the candidates of a budget, or None if they can.

    ``share`` says whether the budget is a share of FLOPs in four bits, where bf16 would cost nothing.
    """
    if not formats or len(set(formats)) < len(formats) or not set(formats) <= set(FORMATS):
        return f"expected distinct names of {', '.join(FORMATS)}"
    known = [Format(name) for name in formats]
    if set(known) == {Format.BF16}:
        return "leaves nothing to choose; add fp8, fp8_tensor or fp4"
    if share and Format.BF16 in known:
        return "bf16 is no candidate under fp4=, where it costs nothing; pin GEMMs to it, or budget time or loss"
    return None
