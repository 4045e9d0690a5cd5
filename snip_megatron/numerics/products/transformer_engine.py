"""Whether Transformer Engine's own linears can run a map on this machine (``--snip-gemm transformer_engine``)."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection
from types import ModuleType

import torch

from snip_megatron.precision import Format
from snip_megatron.precision.errors import first_line

QUANTIZERS = (Format.BF16, Format.FP8, Format.FP8_TENSOR, Format.MXFP8, Format.NVFP4)
"""Formats that a quantizer of Transformer Engine has."""

_HOPPER = (Format.BF16, Format.FP8, Format.FP8_TENSOR)


def te_map() -> ModuleType:
    """Return ``snip_te_map``, which is both imported by a run and the text of an exported map.

    Raises ImportError, or whatever the import of Transformer Engine raises.
    """
    return importlib.import_module("snip_megatron.numerics.products.snip_te_map")


def why_not_transformer_engine(formats: Collection[Format] | None) -> str | None:
    """Return why Transformer Engine's linears cannot run ``formats`` (None: unknown) on this machine, or None."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        return "needs a Hopper or Blackwell GPU, and there is none here"
    if importlib.util.find_spec("transformer_engine") is None:
        return "needs Transformer Engine 2.19 or later, which is not installed"
    try:
        te_map()
    except Exception as error:  # an incompatible shared object may raise anything
        return f"Transformer Engine cannot be used ({first_line(error)})"
    known = QUANTIZERS if torch.cuda.get_device_capability() >= (10, 0) else _HOPPER
    others = sorted(fmt.value for fmt in formats or () if fmt not in known)
    if others:
        listed = ", ".join(fmt.value for fmt in known)
        return f"its linears run {listed} on this card, not {', '.join(others)} (see --snip-formats, --snip-pin)"
    return None
