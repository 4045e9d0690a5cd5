"""A sharper bound where several pipeline stages bind: each of them solved to its integer optimum.

The Lagrangian bound pays, on every binding stage, for the fraction of an item that the relaxation takes there; over 16
stages that adds up, and leaves much open. With only the total's constraint priced (λ), a stage is a small problem of
its own: minimise Σ loss − λ·saving over the stage's need. How far its optimum lies above the relaxation's value, its
*lift*, raises the bound, and narrows what other stages may leave open (Lagrangian decomposition, Guignard & Kim 1987).
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
    """[K] lifts ≥ 0 (0 where the stage's own need does not bind), and the stages' optimal picks [n] (the given ones
    elsewhere)."""

    lift: Floats
    pick: Ints


def lift_stages(
    table: ChoiceTable, relaxation: Relaxation, pick: Ints, solve: Callable[[ChoiceTable, Ints], Outcome]
) -> Lifts:
    """Solve every binding stage by ``solve(its table, starting picks)``; ``pick`` is feasible."""
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
    """The picks' value on one stage above the relaxation's, less what rounding may have added."""
    chosen = pick[rows]
    saved = table.saving[rows, chosen]
    above = math.fsum(relaxation.reduced[rows, chosen]) + extra * math.fsum([*saved, -need])
    magnitude = math.fsum(np.abs(table.loss[rows, chosen]))
    magnitude += 2 * (relaxation.total_price + extra) * math.fsum(np.abs(table.saving[rows]).max(axis=1))
    return above - 8 * np.finfo(np.float64).eps * magnitude
