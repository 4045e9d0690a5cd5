"""Formats and rounding: the plain torch reference; Triton kernels beside it compute the same numbers."""

from snip_megatron.quantization.formats import FOUR_BIT
from snip_megatron.quantization.reference import (
    Quantized,
    fake_quantize,
    quantize,
    quantize_dequantize,
    squared_error,
)
from snip_megatron.quantization.rounding import derive_seed, derive_seeds, random_normal, random_signs

__all__ = [
    "FOUR_BIT",
    "Quantized",
    "derive_seed",
    "derive_seeds",
    "fake_quantize",
    "quantize",
    "quantize_dequantize",
    "random_normal",
    "random_signs",
    "squared_error",
]
