"""Names of the previous release, which work with a DeprecationWarning. The next release deletes this module."""

import sys
import types
import warnings
from typing import Any


def attribute_of_layers(name: str) -> Any:
    """Return the attribute ``name`` of ``snip_megatron.layers``, which had ``convert_model``."""
    if name != "convert_model":
        raise AttributeError(f"module 'snip_megatron.layers' has no attribute {name!r}")
    from snip_megatron.megatron import convert_model

    _warn("snip_megatron.layers.convert_model", "snip_megatron.megatron.convert_model")
    return convert_model


class _Quantization(types.ModuleType):
    """The module ``snip_megatron.quantization``, which had ``quantize_dequantize``."""

    def __getattr__(self, name: str) -> Any:
        if name != "quantize_dequantize":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        from snip_megatron.numerics import quantize_dequantize

        _warn("snip_megatron.quantization.quantize_dequantize", "snip_megatron.numerics.quantize_dequantize")
        return quantize_dequantize


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated and goes with the next release: use {new}", DeprecationWarning, stacklevel=3)


sys.modules["snip_megatron.quantization"] = _Quantization("snip_megatron.quantization")
