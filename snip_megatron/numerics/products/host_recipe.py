"""The numbers that Transformer Engine's linears multiply under Megatron's own FP8 and FP4, in plain torch.

A job that never used ``--snip`` quantises by one of Megatron's recipes. :class:`RecipeGemms` multiplies what that
recipe's quantisers return, as the reference of :mod:`snip_megatron.numerics.products.backend` multiplies what ours
return. Scales are computed as Transformer Engine computes them, so that the quantised numbers are the same bits, except
where it rounds stochastically. Measuring passes alone run this: no map has these formats.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.products.grouped import GroupLoop
from snip_megatron.numerics.quantize.formats import E2M1, E4M3, E5M2, TILE, Element
from snip_megatron.numerics.quantize.operands import CachedPair, ExactOperand, OperandPair, OperandSpec
from snip_megatron.numerics.quantize.reference import of_elements, rotate
from snip_megatron.numerics.quantize.rounding import Key, random_bits, round_to_element
from snip_megatron.precision import Format

FORMATS = {
    "delayed": Format.FP8_TENSOR,
    "tensorwise": Format.FP8_TENSOR,
    "blockwise": Format.FP8,
    "mxfp8": Format.MXFP8,
    "nvfp4": Format.NVFP4,
}
"""Recipe → the format of a map that is nearest to it, with the same speed."""

_LARGEST = torch.finfo(torch.float32).max
_MX_TILE, _NVFP4_TILE = 32, 16
_SIGNS = sum(1 << row for row in (3, 5, 6, 7, 8, 9, 10, 12, 14, 15))
"""The signs of Transformer Engine's Hadamard transform: a set bit changes the sign of that row of a group."""

ScaleOf = Callable[[int, str, Tensor], Tensor]
"""Returns the scale (FP32, 0-dim) that the history gives an operand, called with the index of the expert (0 without
experts), "x", "w" or "g", and the operand."""


@dataclass(frozen=True)
class HostRecipe:
    """One of Megatron's recipes."""

    name: str  # "delayed", "tensorwise", "blockwise", "mxfp8" or "nvfp4"
    hybrid: bool = False  # whether gradients are in E5M2, not E4M3 (``--fp8-format hybrid``)
    power_of_two: bool = False  # whether scales of tensors or blocks are rounded to powers of two
    # margin, history, most_recent: delayed scaling's margin in powers of two, length of the history, and whether the
    # scale comes from the latest amax alone
    margin: int = 0
    history: int = 1
    most_recent: bool = True
    # hadamard, stochastic, square: nvfp4's transform of the operands of wgrad, rounding of gradients, and blocks of
    # 16×16 of weights
    hadamard: bool = True
    stochastic: bool = True
    square: bool = True

    @property
    def format(self) -> Format:
        """The nearest format of a map."""
        return FORMATS[self.name]

    def __str__(self) -> str:
        if self.name == "nvfp4":
            return "fp4 e2m1, recipe nvfp4"
        return f"fp8 {'hybrid' if self.hybrid else 'e4m3'}, recipe {self.name}"

    def element(self, operand: str) -> Element:
        """Return the element type of "x", "w" or "g"."""
        if self.name == "nvfp4":
            return E2M1
        return E5M2 if self.hybrid and operand == "g" else E4M3

    def quantize(
        self, x: Tensor, operand: str, axis: int, *, scale: Tensor | None = None, draws: Tensor | None = None
    ) -> ExactOperand:
        """Quantise a matrix for the GEMM that reduces over ``axis`` (0 or 1).

        Args:
            x: bf16, fp16 or fp32 [rows, cols].
            operand: "x", "w" or "g".
            axis: 1 for the rowwise operand, 0 for the columnwise one.
            scale: the scale that the history gives, FP32 and 0-dim. Delayed scaling alone has one.
            draws: bits of stochastic rounding in the shape of ``x``. None rounds to nearest.
        """
        if self.name == "nvfp4":
            return self._nvfp4(x, operand, axis, draws)
        element, values = self.element(operand), x.detach().to(torch.float32)
        if self.name in ("delayed", "tensorwise"):
            if scale is None:
                scale = encode_scale(largest(values), element.maximum, power_of_two=self.power_of_two)
            scale = scale.reshape(1)
            return ExactOperand(round_to_element(values * scale, element).bfloat16(), scale.reciprocal(), None)
        width = TILE if self.name == "blockwise" else _MX_TILE
        square = self.name == "blockwise" and operand == "w"
        tile = (width, width) if square else (1, width) if axis else (width, 1)
        amax = _amax(values, tile)
        if self.name == "blockwise":
            encode = encode_scale(amax, element.maximum, power_of_two=self.power_of_two)
            decode = encode.reciprocal()
        else:
            encode, decode = _e8m0_scales(amax, element.maximum)
        quantized = round_to_element(values * of_elements(encode, tile, values.shape), element)
        return ExactOperand(quantized.bfloat16(), decode, tile)

    def _nvfp4(self, x: Tensor, operand: str, axis: int, draws: Tensor | None) -> ExactOperand:
        values = x.detach().to(torch.float32)
        if self.hadamard and axis == 0 and operand != "w":
            values = rotate(x, _SIGNS).to(x.dtype).to(torch.float32)
            if draws is not None:
                draws = functional.pad(draws, (0, 0, 0, len(values) - len(draws)))
        square = self.square and operand == "w"
        tile = (_NVFP4_TILE, _NVFP4_TILE) if square else (1, _NVFP4_TILE) if axis else (_NVFP4_TILE, 1)
        maximum, whole = E2M1.maximum * E4M3.maximum, largest(values)
        encode = (torch.full_like(whole, maximum) / whole).clamp_(max=_LARGEST)
        encode = torch.where(encode == 0, 1.0, encode)
        tile_scale = _amax(values, tile) * (encode * torch.full_like(encode, E2M1.maximum).reciprocal())
        tile_scale = round_to_element(tile_scale, E4M3)
        factor = (tile_scale * encode.reciprocal()).reciprocal_().clamp_(max=_LARGEST)
        quantized = round_to_element(values * of_elements(factor, tile, values.shape), E2M1, draws)
        exact = quantized * of_elements(tile_scale, tile, values.shape)
        return ExactOperand(exact.bfloat16(), (whole / torch.full_like(whole, maximum)).reshape(1), None)


def encode_scale(amax: Tensor, maximum: float, *, power_of_two: bool) -> Tensor:
    """Return the factor that takes ``amax`` to ``maximum``, rounded down to a power of two if requested.

    It is 1 if the amax is 0 or infinite.
    """
    scale = torch.full((), maximum, device=amax.device) / amax
    scale = torch.where(scale.isinf(), _LARGEST, scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((amax == 0) | amax.isinf(), 1.0, scale)


def _e8m0_scales(amax: Tensor, maximum: float) -> tuple[Tensor, Tensor]:
    """Return the factor and its reciprocal, 2^⌈log2(amax / maximum)⌉. The smallest E8M0 number has the factor 1."""
    ratio = amax * torch.full((), maximum, device=amax.device).reciprocal()
    bits = ratio.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    exponent = (exponent + up.int()).clamp_(max=0xFE)
    ones = torch.ones_like(amax)
    return torch.where(exponent == 0, 1.0, torch.ldexp(ones, 127 - exponent)), torch.ldexp(ones, exponent - 127)


def _amax(x: Tensor, tile: Sequence[int]) -> Tensor:
    """Return max|x| of each tile, [⌈rows/tile⌉, ⌈cols/tile⌉]. NaN does not count, as in the kernels."""
    if x.numel() == 0:
        return x.new_zeros([-(-size // edge) for size, edge in zip(x.shape, tile, strict=True)])
    return functional.max_pool2d(_magnitudes(x)[None], tuple(tile), ceil_mode=True)[0]


def largest(x: Tensor) -> Tensor:
    """Return max|x| of a matrix, FP32 and 0-dim. NaN does not count. It is 0 if the matrix is empty."""
    return _magnitudes(x.detach()).amax() if x.numel() else torch.zeros((), device=x.device)


def _magnitudes(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), 0.0, x.abs()).to(torch.float32)


# -- delayed scaling ---------------------------------------------------------------------------------------------------
@dataclass
class DelayedScale:
    """The scale of one tensor in every microbatch of a pass, from the amaxes of the microbatches before."""

    maximum: float  # largest number of the element type, divided by two to the power of the margin
    history: Tensor  # FP32 [length], amaxes of earlier microbatches. It is copied
    scale: Tensor  # FP32, 0-dim, the scale of the first microbatch
    most_recent: bool  # whether the scale comes from the latest amax alone
    # takes the maximum over the ranks that share the history. A collective if there are several
    shared: Callable[[Tensor], Tensor] = lambda amax: amax

    def __post_init__(self) -> None:
        self.history = self.history.detach().clone().float()
        self._scales, self._amaxes = [self.scale.detach().clone().float()], list[Tensor]()

    def of(self, microbatch: int, x: Tensor) -> Tensor:
        """Return the scale of a microbatch, whose tensor is ``x``. Microbatches come in order, and may come again."""
        microbatch = min(microbatch, len(self._amaxes))
        if len(self._scales) == microbatch:
            self._scales.append(self._next())
        if len(self._amaxes) == microbatch:
            self._amaxes.append(self.shared(largest(x)))
        return self._scales[microbatch]

    def _next(self) -> Tensor:
        history, latest, scale = self.history, self._amaxes[-1], self._scales[-1]
        history[0] = latest
        amax = latest if self.most_recent else history.amax()
        self.history = history.roll(-1)
        self.history[0] = 0.0
        new = torch.full((), self.maximum, device=amax.device) / amax
        new = torch.where(new.isinf(), _LARGEST, new)
        return torch.where((amax > 0) & amax.isfinite(), new, scale)


# -- the products ------------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class RecipeGemms(GemmBackend):
    """The GEMMs of a recipe. GEMMs in bf16 are those of the reference."""

    recipe: HostRecipe
    scale_of: ScaleOf | None = None  # what the histories of one linear give. None unless scaling is delayed

    name = "host_recipe"

    def quantize(self, x: Tensor, spec: OperandSpec, cached: CachedPair | None = None, expert: int = 0) -> OperandPair:
        """See the base class. Every format but bf16 stands for the recipe."""
        pair = list(super().quantize(x, spec, cached))
        operand, scale = "w" if spec.weight else "x" if spec.keys is None else "g", None
        if self.scale_of is not None and not {None, Format.BF16}.issuperset(spec.formats):
            scale = self.scale_of(expert, operand, x)
        for side, axis, fmt, key in zip((0, 1), (1, 0), spec.formats, spec.seeds, strict=True):
            if fmt is not None and fmt is not Format.BF16:
                draws = None if key is None or not self.recipe.stochastic else _draws(x, key, spec)
                pair[side] = self.recipe.quantize(x, operand, axis, scale=scale, draws=draws)
        return pair[0], pair[1]

    def grouped(self, n: int, k: int, dtype: torch.dtype) -> GroupLoop:
        """See the base class."""
        return _Experts(self.quantize, self.multiply)


class _Experts(GroupLoop):
    """Products of experts, each of which has histories of its own."""

    def quantize_expert(self, expert: int, x: Tensor, spec: OperandSpec) -> OperandPair:
        """See the base class."""
        return self._quantize(x, spec, expert=expert)


def _draws(x: Tensor, key: Key, spec: OperandSpec) -> Tensor:
    assert spec.keys is not None
    cols = torch.arange(x.shape[1], device=x.device) if spec.keys.cols is None else spec.keys.cols
    return random_bits(key, torch.arange(len(x), device=x.device) + spec.keys.first_row, cols)
