"""The problem that the solver takes: a choice of format for every item, and a budget.

Its JSON forms are ``snip.problem/1`` (one map) and ``snip.problem/2`` (the phases of a run), which
:mod:`snip_megatron.solver.parse` reads (docs/file-formats.md).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from snip_megatron.errors import SnipError
from snip_megatron.precision.budget import Budget
from snip_megatron.solver.items import Item, Phase, Spent
from snip_megatron.solver.parse import PHASED_SCHEMA, PROBLEM_SCHEMA, parse_problem
from snip_megatron.solver.validation import faults


@dataclass(frozen=True)
class Problem:
    """One choice for every item, or for every item and phase, within a budget. One map is one phase of one step.

    Under ``fp4``, Σ loss is minimised so that the mean *effective share* of all steps, those spent included, reaches
    the budget. That of a phase is the smaller of Σ saving / Σ cost and, with a stage tolerance, of every stage's share
    plus the tolerance.

    Under ``speedup`` and ``loss``, costs are times. A stage takes the cost of its items less their savings, plus its
    fixed cost, and a step takes as long as its slowest stage. The reference time is that of a step without any saving.
    ``speedup`` minimises Σ loss so that reference time / mean time reaches the budget. ``loss`` minimises the time so
    that Σ loss is at most the budget.

    Attributes:
        budget: the budget, of the kinds ``fp4``, ``speedup`` and ``loss``.
        items: the items.
        stage_tolerance: how far the share of a stage may stay below an ``fp4`` budget; in [0, 1]. None: no constraint.
        fixed_cost: (stage, cost) pairs of the time that no choice changes, such as attention. Others have 0.
        phases: what remains of the run, in the order of time; empty for one map.
        spent: what is over of the run; None for nothing.

    Raises:
        SnipError: a field is invalid. The message names its JSON path.
    """

    budget: Budget
    items: tuple[Item, ...]
    stage_tolerance: float | None = None
    fixed_cost: tuple[tuple[int, float], ...] = ()
    phases: tuple[Phase, ...] = ()
    spent: Spent | None = None

    def __post_init__(self) -> None:
        for path, message in faults(self):
            raise SnipError(f"{path}: {message}")

    @property
    def steps(self) -> int:
        """All steps of the run, spent and remaining; 1 for one map."""
        remaining = sum(phase.steps for phase in self.phases) or 1
        return remaining + (self.spent.steps if self.spent is not None else 0)

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "problem") -> Problem:
        """Parse the text of a problem file of either schema; ``where`` names the file in errors. Raises SnipError."""
        parts = parse_problem(text, where)
        try:
            return cls(**parts)
        except SnipError as error:
            raise SnipError(f"{where}: {error}") from None

    def to_json(self) -> str:
        """Return the text of a problem file. Floats round-trip exactly; unused fields are left out."""
        body: dict[str, Any] = {
            "schema": PHASED_SCHEMA if self.phases else PROBLEM_SCHEMA,
            "budget": _budget_body(self),
        }
        if self.phases:
            targets = [{} if phase.target is None else {"target": phase.target} for phase in self.phases]
            body["phases"] = [{"steps": p.steps, **target} for p, target in zip(self.phases, targets, strict=True)]
        if self.spent is not None:
            body["spent"] = {"steps": self.spent.steps, "achieved": self.spent.achieved}
        body["items"] = [_item_body(item, phased=bool(self.phases)) for item in self.items]
        return json.dumps(body, allow_nan=False) + "\n"


def _budget_body(problem: Problem) -> dict[str, Any]:
    budget = problem.budget
    body: dict[str, Any] = {"target" if budget.kind == "fp4" else budget.kind: budget.value}
    if budget.kind == "fp4":
        body["stage_tolerance"] = problem.stage_tolerance
    if problem.fixed_cost:
        body["fixed_cost"] = {str(stage): cost for stage, cost in problem.fixed_cost}
    return body


def _item_body(item: Item, *, phased: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"id": item.id, "stage": item.stage, "cost": item.cost}
    if phased:
        body["choices"] = [
            {"format": c.format.value, "saving": c.saving, "losses": list(c.losses)} for c in item.choices
        ]
    else:
        body["choices"] = [{"format": c.format.value, "loss": c.losses[0], "saving": c.saving} for c in item.choices]
    if item.pin is not None:
        body["pin"] = item.pin.value
    if item.keeps:
        body["keeps"] = list(item.keeps)
    return body
