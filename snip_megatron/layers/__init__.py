"""Linears with quantised GEMMs, and the registry through which a precision map is adopted."""

from snip_megatron.layers.registry import LinearRegistry

__all__ = ["LinearRegistry"]
