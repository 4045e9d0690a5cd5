"""The solver in its own process on rank 0's host: it may die, hang or fail, training goes on (DESIGN, rule 4)."""

from snip_megatron.sidecar.client import SidecarClient
from snip_megatron.sidecar.messages import SidecarFailure, SidecarResult, SolveJob

__all__ = ["SidecarClient", "SidecarFailure", "SidecarResult", "SolveJob"]
