"""The integer program: chooses a format for every item, with a certified gap (README.md beside this file)."""

from snip_megatron.solver.api import solve
from snip_megatron.solver.problem import Choice, Item, Phase, Problem, Spent
from snip_megatron.solver.solution import Infeasibility, Solution, infeasibility

__all__ = ["Choice", "Infeasibility", "Item", "Phase", "Problem", "Solution", "Spent", "infeasibility", "solve"]
