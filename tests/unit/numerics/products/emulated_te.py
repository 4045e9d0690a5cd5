"""Transformer Engine's quantizers and ``general_gemm``, emulated by the reference on a CPU."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from snip_megatron.numerics.products.transformer_engine import TransformerEngineGemms
from snip_megatron.numerics.quantize import quantize_dequantize

_draws = iter(range(10**6))


class Quantizer:
    """Keeps the numbers that a usage dequantises to; a gradient in NVFP4 is rounded stochastically."""

    def __init__(self, fmt: str, tensor: str) -> None:
        self.fmt, self.tensor = fmt, tensor

    def set_usage(self, *, rowwise: bool, columnwise: bool) -> None:
        self.usages = rowwise, columnwise

    def __call__(self, x: Tensor) -> Any:
        rounding = "stochastic" if (self.fmt, self.tensor) == ("nvfp4", "grad_output") else "nearest"

        def quantize(x: Tensor) -> Tensor:
            granularity = "block" if self.tensor == "weight" else "tile"
            seed = next(_draws) if rounding == "stochastic" else None
            return quantize_dequantize(x, self.fmt, granularity, rounding=rounding, seed=seed)

        row, col = self.usages
        if self.fmt == "fp8_tensor" and not row:
            raise NotImplementedError("Columnwise-only per-tensor FP8 quantization is not implemented")
        return SimpleNamespace(row=quantize(x) if row else None, col=quantize(x.t()).t() if col else None)


def general_gemm(
    a: Any, b: Any, *, layout: str, out_dtype: Any, out: Any, accumulate: bool, grad: bool, use_split_accumulator: bool
) -> tuple[Any, ...]:
    """B·A column-major, i.e. op(B)·op(A) row-major; a GEMM reads the usage whose tiles run along its reduction."""
    a_t, b_t = layout[0] == "T", layout[1] == "T"
    a, b = (
        (x if isinstance(x, Tensor) else (x.row if rowwise else x.col)).float()
        for x, rowwise in ((a, a_t), (b, not b_t))
    )
    product = (b.t() if b_t else b) @ (a.t() if a_t else a)
    assert grad == (layout != "TN")
    assert accumulate == (out is not None)
    assert use_split_accumulator == grad
    if out is None:
        return product.to(out_dtype), None, None, None
    return out.add_(product.to(out_dtype)), None, None, None


def gemms() -> TransformerEngineGemms:
    return TransformerEngineGemms(Quantizer, general_gemm)
