"""A better lower bound if the needs of several stages bind: each of these stages is solved to its integer optimum.

On every binding stage, the Lagrangian bound loses the value of the fractional item of the relaxation. Over 16 stages
these losses add up and leave many choices open. If only the need of the whole model is priced (λ), a stage is a small
problem of its own: minimise Σ loss − λ·saving within the need of the stage. The *lift* is the distance of its optimum
from the value of the relaxation. It raises the bound, and closes choices on other stages (Lagrangian decomposition,
Guignard & Kim 1987).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from snip_megatron.solver.limits import Outcome
from snip_megatron.solver.relaxation import Relaxation
from snip_megatron.solver.table import ChoiceTable, Floats, Ints

_ROUNDING = 1e-9  # share of a lift given up for rounding


@dataclass(frozen=True)
class Lifts:
    """The lifts of all stages.

    Attributes:
        lift: lifts ≥ 0, [K]; 0 if the stage's own need does not bind.
        pick: optimal picks of the binding stages, and the given picks on the others, [n].
    """

    lift: Floats
    pick: Ints


def lift_stages(
    table: ChoiceTable, relaxation: Relaxation, pick: Ints, solve: Callable[[ChoiceTable, Ints], Outcome]
) -> Lifts:
    """Solve every binding stage separately.

    Args:
        table: the problem.
        relaxation: its relaxation.
        pick: feasible picks [n].
        solve: takes (problem of a stage, its starting picks) and returns the outcome.
    """
    price = relaxation.total_price
    lift = np.zeros(len(table.stages))
    pick = pick.copy()
    for k, extra in enumerate((relaxation.stage_price - price).tolist()):
        if extra <= 0:
            continue
        rows = np.nonzero(table.stage == k)[0]
        need = float(table.stage_need[k])
        part = table.part(rows, table.loss[rows] - price * table.saving[rows], need)
        outcome = solve(part, pick[rows])
        pick[rows] = outcome.pick
        unproven = part.objective(outcome.pick) - outcome.bound
        lift[k] = max(0.0, _above(table, relaxation, rows, pick, extra, need) * (1 - _ROUNDING) - unproven)
    return Lifts(lift, pick)


def _above(table: ChoiceTable, relaxation: Relaxation, rows: Ints, pick: Ints, extra: float, need: float) -> float:
    """Return by how much the value of the picks on one stage exceeds the relaxation's, minus possible rounding."""
    chosen = pick[rows]
    saved = table.saving[rows, chosen]
    above = math.fsum(relaxation.reduced[rows, chosen]) + extra * math.fsum([*saved, -need])
    magnitude = math.fsum(np.abs(table.loss[rows, chosen]))
    magnitude += 2 * (relaxation.total_price + extra) * math.fsum(np.abs(table.saving[rows]).max(axis=1))
    return above - 8 * np.finfo(np.float64).eps * magnitude
