"""The integer program over the phases of a run: which format each item takes, and when."""

from snip_megatron.solver.phased.api import solve_phased
from snip_megatron.solver.phased.parts import Phase, PhasedChoice, PhasedItem, Spent
from snip_megatron.solver.phased.problem import PHASED_SCHEMA, PhasedProblem, read_problem
from snip_megatron.solver.phased.solution import PhasedSolution

__all__ = [
    "PHASED_SCHEMA",
    "Phase",
    "PhasedChoice",
    "PhasedItem",
    "PhasedProblem",
    "PhasedSolution",
    "Spent",
    "read_problem",
    "solve_phased",
]
