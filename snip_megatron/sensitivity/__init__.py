"""Sensitivity: computes a score of every option from the statistics of one update, and builds the solver's Problem.

NumPy only: the sidecar process imports this room without torch and without Megatron.
"""

from __future__ import annotations

from snip_megatron.sensitivity.fixed import FIXED, fixed_map
from snip_megatron.sensitivity.phased import PhasedRequest, carried_weights
from snip_megatron.sensitivity.policies import POLICIES
from snip_megatron.sensitivity.problem import build_problem, check_reachable, reachable_share
from snip_megatron.sensitivity.request import SolveRequest

__all__ = [
    "FIXED",
    "POLICIES",
    "PhasedRequest",
    "SolveRequest",
    "build_problem",
    "carried_weights",
    "check_reachable",
    "fixed_map",
    "reachable_share",
]
