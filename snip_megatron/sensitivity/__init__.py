"""Sensitivity: from one update's statistics to scores of every option, and to the Problem a solver takes.

NumPy only: the sidecar process imports this room without torch and without Megatron.
"""

from __future__ import annotations

from snip_megatron.sensitivity.policies import ESTIMATORS, FIXED, POLICIES, fixed_map, needs_forward_noise
from snip_megatron.sensitivity.problem import build_problem, check_reachable, reachable_share
from snip_megatron.sensitivity.quality import Q_RULES
from snip_megatron.sensitivity.request import SolveRequest

__all__ = [
    "ESTIMATORS",
    "FIXED",
    "POLICIES",
    "Q_RULES",
    "SolveRequest",
    "build_problem",
    "check_reachable",
    "fixed_map",
    "needs_forward_noise",
    "reachable_share",
]
