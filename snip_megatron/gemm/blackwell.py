"""The GEMMs of a linear in NVFP4 and MXFP8 on a Blackwell GPU, quantised and multiplied by Transformer Engine.

Each operand is quantised for the GEMM that reads it, so that the three GEMMs may have three formats, for example NVFP4
in the forward and MXFP8 or bf16 in the backward. The reference runs GEMMs in other formats. See blackwell.md.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.nn import functional

from snip_megatron.errors import SnipError
from snip_megatron.gemm.backend import Formats, GemmBackend, Sides, refuse_gathers
from snip_megatron.gemm.blackwell_engine import (
    COLUMN,
    NATIVE,
    ROW,
    NativeOperand,
    QuantizerKey,
    TransformerEngine,
    one_usage,
)
from snip_megatron.gemm.operands import HeldSides, Plain, Side
from snip_megatron.gemm.scaled import ScaledProducts
from snip_megatron.precision import Format
from snip_megatron.quantization.formats import SPECS
from snip_megatron.quantization.hadamard import Rotation
from snip_megatron.quantization.rounding import Key

EDGE = 32
"""Rows and columns are padded with zeros to a multiple of this: MXFP8's tile, two of NVFP4's, 16 bytes of E2M1."""

_OUTPUTS = (torch.bfloat16, torch.float32)


class BlackwellBackend(GemmBackend):
    """GEMMs of NVFP4 and MXFP8 on a Blackwell GPU.

    Args:
        engine: Transformer Engine.
        products: bf16 products into FP32 gradients.
    """

    name = "blackwell"

    def __init__(self, engine: TransformerEngine, products: ScaledProducts) -> None:
        self._engine = engine
        self._products = products

    def check_graphs(self) -> None:
        """See the base class. The generator that Transformer Engine draws from is seeded by the host."""
        raise SnipError(
            "--cuda-graph-impl cannot be combined with the blackwell GEMMs, whose draws are seeded by the host:"
            " use --cuda-graph-impl none, or --snip-gemm reference"
        )

    def check_gathers(self, formats: Collection[Format]) -> None:
        """See the base class. Gathers of quantised operands are not implemented for this backend."""
        refuse_gathers(self.name, set(formats).intersection(NATIVE))

    # -- quantisation --------------------------------------------------------------------------------------------
    def _quantize(
        self,
        x: Tensor,
        formats: Formats,
        amax: Tensor | None,
        *,
        weight: bool = False,
        keys: tuple[Key | None, Key | None] = (None, None),
        cols: Tensor | None = None,
        first_row: int = 0,
        rotation: Rotation | None = None,
    ) -> Sides:
        """See the base class. If both formats are equal, one call serves both GEMMs and rounds with the first key."""
        row, col = formats
        seeds = (self._number(keys[0]), self._number(keys[1]))
        if row is not None and row is col and row in NATIVE:
            both = self._native(x, row, (ROW, COLUMN), amax, weight, seeds[0])
            return both[0], both[1]
        sides = list(super()._quantize(x, formats, amax, keys=seeds, cols=cols, first_row=first_row, rotation=rotation))
        for place, usage in enumerate((ROW, COLUMN)):
            fmt = formats[place]
            if fmt is not None and fmt in NATIVE:
                (sides[place],) = self._native(x, fmt, (usage,), amax, weight, seeds[place])
        return sides[0], sides[1]

    def _renew(self, w: Tensor, formats: Formats, amax: Tensor | None, held: HeldSides) -> None:
        """See the base class. Weights are held only for CUDA graphs."""
        self.check_graphs()

    def _number(self, key: Key | None) -> int | None:
        """Return the key as a number. Keys on the device exist only for CUDA graphs."""
        if isinstance(key, Tensor):
            self.check_graphs()
            return None
        return key

    def _native(
        self, x: Tensor, fmt: Format, usages: tuple[str, ...], amax: Tensor | None, square: bool, seed: int | None
    ) -> tuple[NativeOperand, ...]:
        x = x.detach()
        rows, cols = x.shape
        if x.numel() == 0:
            return tuple(NativeOperand(fmt, (rows, cols), usage, None, {}, ("",), (x,)) for usage in usages)
        spec = SPECS[fmt]
        square, stochastic = square and spec.square_blocks, seed is not None and spec.stochastic
        key = QuantizerKey(fmt.base, ROW in usages, COLUMN in usages, square, stochastic)
        quantized = self._engine.quantize(padded(x), key, seed=seed, amax=amax)
        return tuple(one_usage(quantized, usage, fmt, (rows, cols)) for usage in usages)

    # -- products ------------------------------------------------------------------------------------------------
    def fprop(self, x: Side, w: Side, *, dtype: torch.dtype) -> Tensor:
        """See the base class."""
        if isinstance(x, NativeOperand) and isinstance(w, NativeOperand):
            return self._multiply(w, x, "TN", (x.shape[0], w.shape[0]), dtype)
        return super().fprop(x, w, dtype=dtype)

    def dgrad(self, g: Side, w: Side, *, dtype: torch.dtype) -> Tensor:
        """See the base class."""
        if isinstance(g, NativeOperand) and isinstance(w, NativeOperand):
            return self._multiply(w, g, "NN", (g.shape[0], w.shape[1]), dtype)
        return super().dgrad(g, w, dtype=dtype)

    def wgrad(self, g: Side, x: Side, *, out: Tensor | None) -> Tensor:
        """See the base class. A bf16 wgrad of a mixed linear is a library GEMM that accumulates into ``out``."""
        if isinstance(g, NativeOperand) and isinstance(x, NativeOperand):
            return self._accumulate(g, x, out)
        if isinstance(g, Plain) and isinstance(x, Plain) and g.format is Format.BF16:
            return self._products.accumulate_plain(g.tensor, x.tensor, out)
        return super().wgrad(g, x, out=out)

    def _accumulate(self, g: NativeOperand, x: NativeOperand, out: Tensor | None) -> Tensor:
        shape = (g.shape[1], x.shape[1])
        if out is None:
            return self._multiply(x, g, "NT", shape, torch.float32)
        if _empty(g, x):
            return out
        if _whole(shape) and out.dtype is torch.float32 and out.is_contiguous():
            self._engine.gemm(x, g, "NT", torch.float32, out=out)
        else:
            out.add_(self._multiply(x, g, "NT", shape, torch.float32))
        return out

    def _multiply(
        self, a: NativeOperand, b: NativeOperand, layout: str, shape: tuple[int, int], dtype: torch.dtype
    ) -> Tensor:
        """Return the product in ``dtype``, with the shape ``shape``, which has no padding."""
        assert a.format is b.format
        if _empty(a, b):
            return torch.zeros(shape, dtype=dtype, device=a.tensors[0].device)
        product = self._engine.gemm(a, b, layout, dtype if dtype in _OUTPUTS else torch.float32)
        return product[: shape[0], : shape[1]].contiguous().to(dtype)


def padded(x: Tensor) -> Tensor:
    """Return ``x`` [rows, cols], contiguous and padded with zeros to multiples of 32.

    Zeros change neither an amax nor a product.
    """
    below, right = -x.shape[0] % EDGE, -x.shape[1] % EDGE
    return functional.pad(x, (0, right, 0, below)) if below or right else x.contiguous()


def _whole(shape: tuple[int, int]) -> bool:
    return shape[0] % EDGE == 0 and shape[1] % EDGE == 0


def _empty(a: NativeOperand, b: NativeOperand) -> bool:
    return a.storage is None or b.storage is None
