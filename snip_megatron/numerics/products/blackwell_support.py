"""Whether the Blackwell backend can run on this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Collection

import torch

from snip_megatron.numerics.products.blackwell_engine import NATIVE, transformer_engine
from snip_megatron.precision import Format
from snip_megatron.precision.errors import first_line

CAPABILITIES = ((10, 0), (10, 3))
"""sm_100 and sm_103. On sm_110 and above, stochastic rounding to E2M1 returns zeros in released versions of
Transformer Engine (its pull request 3281), and MXFP8 lacks layouts on sm_120."""

LEAST_VERSION = (2, 9)


def is_blackwell() -> bool:
    """Whether the CUDA device is of compute capability 10.0 or above."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)


def availability(formats: Collection[Format] | None = None, *, sharded: bool = False) -> str | None:
    """Return why the Blackwell backend cannot run on this machine, or None if it can.

    Args:
        formats: the formats that GEMMs will use; None if they are unknown.
        sharded: whether weights are sharded over tensor parallel ranks.
    """
    return _no_device() or _no_transformer_engine() or _no_format(formats, sharded)


def _no_device() -> str | None:
    if not torch.cuda.is_available():
        return "needs a Blackwell GPU (sm_100 or sm_103) and there is no CUDA device here"
    capability = torch.cuda.get_device_capability()
    if capability in CAPABILITIES:
        return None
    found = f"{torch.cuda.get_device_name()} is sm_{capability[0]}{capability[1]}"
    if capability > CAPABILITIES[0]:
        found += ", where stochastic rounding of gradients to nvfp4 gives zeros or mxfp8 lacks a GEMM"
    return f"needs a Blackwell GPU (sm_100 or sm_103) and {found}"


def _no_transformer_engine() -> str | None:
    least = ".".join(map(str, LEAST_VERSION))
    if importlib.util.find_spec("transformer_engine") is None:
        return f"needs Transformer Engine {least} or later, which is not installed"
    version = importlib.metadata.version("transformer_engine")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < LEAST_VERSION:
        return f"needs Transformer Engine {least} or later and {version} is installed"
    try:
        transformer_engine()
    except Exception as error:  # an incompatible shared object may raise anything
        return f"Transformer Engine {version} cannot be imported ({first_line(error)})"
    return None


def _no_format(formats: Collection[Format] | None, sharded: bool) -> str | None:
    others = sorted(fmt.value for fmt in formats or () if fmt not in (*NATIVE, Format.BF16))
    if others:
        own = ", ".join(fmt.value for fmt in NATIVE)
        return f"runs {own} and bf16, not {', '.join(others)} (see --snip-formats, --snip-pin, --snip-map)"
    wants_nvfp4 = formats is None or any(fmt.base is Format.NVFP4 for fmt in formats)
    if sharded and wants_nvfp4 and not transformer_engine().takes_amax:
        return "nvfp4 under tensor parallelism needs Transformer Engine 2.17 or later: one amax for all shards"
    return None
