"""The table of number formats: the element type, the scales and the tile shape of each.

Sources: docs/how-it-works.md (fp8, fp4, fp8_tensor); OCP Microscaling Formats 1.0 (mxfp4, mxfp8);
NVIDIA's NVFP4 (nvfp4).
"""

from dataclasses import dataclass, replace
from enum import Enum

from snip_megatron.precision import Format
from snip_megatron.precision.errors import SnipError, quoted

TILE = 128  # edge of the paper's tiles (1×128) and blocks (128×128)


@dataclass(frozen=True)
class Element:
    """A small floating-point type, whose infinities are left out: a sign bit, exponent bits and mantissa bits."""

    mantissa_bits: int  # explicit bits of the mantissa
    min_exponent: int  # exponent of the smallest normal number. Subnormal numbers have the same spacing
    max_exponent: int  # exponent of the largest number (``emax`` in the OCP text)
    maximum: float


E2M1 = Element(mantissa_bits=1, min_exponent=0, max_exponent=2, maximum=6.0)
E4M3 = Element(mantissa_bits=3, min_exponent=-6, max_exponent=8, maximum=448.0)
E5M2 = Element(mantissa_bits=2, min_exponent=-14, max_exponent=15, maximum=57344.0)


class Scaling(Enum):
    """How the scale of a tile is stored."""

    FP32 = "fp32"  # amax / maximum, an FP32 number per tile
    FP32_TENSOR = "fp32_tensor"  # the same, the whole tensor is one tile
    E4M3_FP32 = "e4m3_fp32"  # E4M3 per tile times one FP32 number per tensor
    E8M0 = "e8m0"  # a power of two per tile


@dataclass(frozen=True)
class FormatSpec:
    """One row of the table."""

    element: Element
    scaling: Scaling
    tile: int  # edge of a tile; 0 if the whole tensor has one scale
    square_blocks: bool  # whether granularity "block" means blocks of tile×tile. Other formats ignore the granularity
    stochastic: bool = False  # whether the elements of gradients are rounded stochastically
    # whether the amax of each tile becomes 6 or 4, whichever gives the smaller squared error (arXiv 2512.02010)
    four_over_six: bool = False
    hadamard: bool = False  # whether the operands of wgrad are transformed first (``reference.rotate``)
    random_signs: bool = False  # whether that transform has signs drawn anew in every step

    def tile_shape(self, axis: int, block: bool) -> tuple[int, int]:
        """Return the (rows, columns) of a tile along ``axis``, or of a square ``block`` if the format has blocks."""
        if block and self.square_blocks:
            return self.tile, self.tile
        return (self.tile, 1) if axis == 0 else (1, self.tile)

    @property
    def largest_scale(self) -> float:
        """The E4M3 scale of the tile with the tensor's amax. Under four-over-six 1.5 times it is an E4M3 number too."""
        return 256.0 if self.four_over_six else E4M3.maximum


_NVFP4 = FormatSpec(E2M1, Scaling.E4M3_FP32, 16, True, stochastic=True)
_MXFP4 = FormatSpec(E2M1, Scaling.E8M0, 32, False, stochastic=True)

SPECS: dict[Format, FormatSpec] = {
    Format.FP4: FormatSpec(E2M1, Scaling.FP32, TILE, True, stochastic=True),
    Format.FP8: FormatSpec(E4M3, Scaling.FP32, TILE, True),
    Format.FP8_TENSOR: FormatSpec(E4M3, Scaling.FP32_TENSOR, 0, False),
    Format.NVFP4: _NVFP4,
    Format.MXFP4: _MXFP4,
    Format.MXFP8: FormatSpec(E4M3, Scaling.E8M0, 32, False),
    Format.NVFP4_46: replace(_NVFP4, square_blocks=False, stochastic=False, four_over_six=True),
    Format.NVFP4_HADAMARD: replace(_NVFP4, hadamard=True, random_signs=True),
    Format.NVFP4_HADAMARD_FIXED: replace(_NVFP4, hadamard=True),
    Format.MXFP4_HADAMARD: replace(_MXFP4, hadamard=True, random_signs=True),
    Format.MXFP4_HADAMARD_FIXED: replace(_MXFP4, hadamard=True),
}

STOCHASTIC = frozenset(fmt for fmt, spec in SPECS.items() if spec.stochastic)
"""Formats in which the elements of gradients are rounded stochastically."""


def resolve(format: Format | str) -> Format:
    """Return the quantised :class:`Format` with this name. Raises SnipError for bf16 and unknown names."""
    value = format.value if isinstance(format, Format) else format
    for fmt in SPECS:
        if fmt.value == value:
            return fmt
    raise SnipError(f"format {quoted(value)} cannot be quantised to (known: {', '.join(f.value for f in SPECS)})")
