"""Megatron's linears with quantised GEMMs, and the registry that a precision map is adopted through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from snip_megatron.layers.registry import LinearRegistry

if TYPE_CHECKING:
    from snip_megatron.layers.conversion import convert_model

__all__ = ["LinearRegistry", "convert_model"]


def __getattr__(name: str) -> Any:
    """``convert_model`` on demand: only it needs Megatron; the autograd function runs without."""
    if name == "convert_model":
        from snip_megatron.layers.conversion import convert_model

        return convert_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
