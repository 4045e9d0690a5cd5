"""The GEMMs of a linear in NVFP4 and MXFP8 on a Blackwell GPU, quantised and multiplied by Transformer Engine.

Each operand is quantised for the GEMM that reads it, so that the three GEMMs may have three formats, for example NVFP4
in the forward and MXFP8 or bf16 in the backward. The reference runs GEMMs in other formats. See blackwell.md.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from snip_megatron.numerics.products.backend import NOT_GATHERED, GemmBackend, refuse_gathers
from snip_megatron.numerics.products.blackwell_engine import (
    COLUMN,
    NATIVE,
    ROW,
    NativeOperand,
    QuantizerKey,
    TransformerEngine,
    one_usage,
)
from snip_megatron.numerics.products.operands import GemmOperand
from snip_megatron.numerics.products.scaled import ScaledProducts
from snip_megatron.numerics.quantize.formats import SPECS
from snip_megatron.numerics.quantize.operands import CachedPair, OperandPair, OperandSpec
from snip_megatron.numerics.quantize.rounding import Key
from snip_megatron.precision import Format, Gemm
from snip_megatron.precision.errors import SnipError

EDGE = 32
"""Rows and columns are padded with zeros to a multiple of this: MXFP8's tile, two of NVFP4's, 16 bytes of E2M1."""

_OUTPUTS = (torch.bfloat16, torch.float32)


class BlackwellBackend(GemmBackend):
    """GEMMs of NVFP4 and MXFP8 on a Blackwell GPU.

    ``products`` are bf16 products into FP32 gradients.
    """

    name = "blackwell"

    def __init__(self, engine: TransformerEngine, products: ScaledProducts) -> None:
        self._engine = engine
        self.plain_products = products

    def check_graphs(self) -> None:
        """See the base class. The generator that Transformer Engine draws from is seeded by the host."""
        raise SnipError(
            "--cuda-graph-impl cannot be combined with the blackwell GEMMs, whose draws are seeded by the host:"
            " use --cuda-graph-impl none, or --snip-gemm reference"
        )

    def check_gathers(self, formats: Collection[Format]) -> None:
        """See the base class. Gathers of quantised operands are not implemented for this backend."""
        refuse_gathers(set(formats).intersection(NATIVE), NOT_GATHERED.format(self.name))

    # -- quantisation --------------------------------------------------------------------------------------------
    def quantize(self, x: Tensor, spec: OperandSpec, cached: CachedPair | None = None) -> OperandPair:
        """See the base class. If both formats are equal, one call serves both GEMMs and rounds with the first key."""
        keys = spec.keys
        if cached is not None or (
            keys is not None and (isinstance(keys.dgrad, Tensor) or isinstance(keys.wgrad, Tensor))
        ):
            self.check_graphs()  # weights are cached, and keys on the device, for CUDA graphs alone
        formats, seeds = (spec.rowwise, spec.columnwise), (None, None) if keys is None else (keys.dgrad, keys.wgrad)
        if formats[0] is not None and formats[0] is formats[1] and formats[0] in NATIVE:
            return self._native(x, formats[0], (ROW, COLUMN), spec, seeds[0])
        pair = list(super().quantize(x, spec))
        for place, usage in enumerate((ROW, COLUMN)):
            fmt = formats[place]
            if fmt is not None and fmt in NATIVE:
                (pair[place],) = self._native(x, fmt, (usage,), spec, seeds[place])
        return pair[0], pair[1]

    def _native(
        self, x: Tensor, fmt: Format, usages: tuple[str, ...], spec: OperandSpec, seed: Key | None
    ) -> tuple[Any, ...]:
        x = x.detach()
        rows, cols = x.shape
        if x.numel() == 0:
            return tuple(NativeOperand(fmt, (rows, cols), usage, None, {}, ("",), (x,)) for usage in usages)
        of_format = SPECS[fmt]
        square, stochastic = spec.weight and of_format.square_blocks, seed is not None and of_format.stochastic
        assert not isinstance(seed, Tensor)
        key = QuantizerKey(fmt.base, ROW in usages, COLUMN in usages, square, stochastic)
        quantized = self._engine.quantize(padded(x), key, seed=seed, amax=spec.amax)
        return tuple(one_usage(quantized, usage, fmt, (rows, cols)) for usage in usages)

    # -- products ------------------------------------------------------------------------------------------------
    def multiply(
        self, gemm: Gemm, a: GemmOperand, b: GemmOperand, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        if isinstance(a, NativeOperand) and isinstance(b, NativeOperand):
            if gemm is Gemm.WGRAD:
                return self._accumulate(a, b, out)
            rows, cols = a.shape[0], b.shape[0 if gemm is Gemm.FPROP else 1]
            return self._multiply(b, a, "TN" if gemm is Gemm.FPROP else "NN", (rows, cols), dtype)
        return super().multiply(gemm, a, b, dtype, out)

    def _accumulate(self, g: NativeOperand, x: NativeOperand, out: Tensor | None) -> Tensor:
        shape = (g.shape[1], x.shape[1])
        if out is None:
            return self._multiply(x, g, "NT", shape, torch.float32)
        if _empty(g, x):
            return out
        if not any(size % EDGE for size in shape) and out.dtype is torch.float32 and out.is_contiguous():
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


def _empty(a: NativeOperand, b: NativeOperand) -> bool:
    return a.storage is None or b.storage is None
