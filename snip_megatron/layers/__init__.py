"""Linears with quantised GEMMs, and the registry through which a precision map is adopted."""

import importlib
from typing import Any

from snip_megatron.layers.registry import LinearRegistry

__all__ = ["LinearRegistry", "convert_model"]


def __getattr__(name: str) -> Any:
    """Import ``convert_model(model_chunks, config) -> LinearRegistry`` at first use, because it needs Megatron."""
    if name == "convert_model":
        return importlib.import_module("snip_megatron.megatron.conversion").convert_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
