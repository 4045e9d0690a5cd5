"""Megatron's linears with quantised GEMMs, and the registry that a precision map is adopted through."""

from snip_megatron.layers.conversion import convert_model
from snip_megatron.layers.registry import LinearRegistry

__all__ = ["LinearRegistry", "convert_model"]
