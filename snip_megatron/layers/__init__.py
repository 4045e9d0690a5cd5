"""Linears with quantised GEMMs, and the registry through which a precision map is adopted."""

from snip_megatron.deprecated import attribute_of_layers as __getattr__  # noqa: F401
from snip_megatron.layers.registry import LinearRegistry

__all__ = ["LinearRegistry"]
