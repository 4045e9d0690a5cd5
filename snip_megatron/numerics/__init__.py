"""Number formats, rounding and quantised GEMMs."""

from snip_megatron.numerics.quantize import quantize_dequantize

__all__ = ["quantize_dequantize"]
