"""Number formats and rounding in plain torch. ``kernels`` has the same functions in Triton, with the same results."""

from snip_megatron.numerics.quantize.reference import (
    Quantized,
    fake_quantize,
    quantize,
    quantize_dequantize,
)
from snip_megatron.numerics.quantize.rounding import derive_seed, derive_seeds, random_normal

__all__ = [
    "Quantized",
    "derive_seed",
    "derive_seeds",
    "fake_quantize",
    "quantize",
    "quantize_dequantize",
    "random_normal",
]
