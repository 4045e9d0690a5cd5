"""Sensitivity: computes a score of every option from the statistics of one update, and builds the solver's Problem.

NumPy only: the sidecar process imports this room without torch and without Megatron.
"""

from snip_megatron.sensitivity.problem import build_problem
from snip_megatron.sensitivity.request import SolveRequest

__all__ = ["SolveRequest", "build_problem"]
