"""Which backend runs the GEMMs: ``--snip-gemm``."""

from __future__ import annotations

from snip_megatron.errors import SnipError
from snip_megatron.gemm.backend import REFERENCE, GemmBackend

BACKENDS: dict[str, GemmBackend] = {"reference": REFERENCE}


def select_backend(name: str) -> GemmBackend:
    """The backend of ``--snip-gemm``. ``auto`` is the best that this machine can run.

    Raises:
        SnipError: an unknown name.
    """
    if name == "auto":
        return REFERENCE
    if name not in BACKENDS:
        raise SnipError(f"--snip-gemm {name}: unknown; choose one of auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]
