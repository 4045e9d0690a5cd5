"""The solver in a separate process on rank 0's host. If it dies, hangs or fails, training goes on (how-it-works.md)."""

from snip_megatron.runtime.sidecar.client import SidecarClient
from snip_megatron.runtime.sidecar.solving import SidecarResult, SolveJob

__all__ = ["SidecarClient", "SidecarResult", "SolveJob"]
