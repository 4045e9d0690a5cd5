"""Number formats, rounding and quantised GEMMs.

:func:`quantize_dequantize` is the public function of this room. It is imported when it is used, because commands and
the solver process import names of backends from here, and must not import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snip_megatron.numerics.quantize import quantize_dequantize

__all__ = ["quantize_dequantize"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from snip_megatron.numerics import quantize

    return getattr(quantize, name)
