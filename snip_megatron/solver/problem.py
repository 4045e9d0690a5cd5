"""The problem that the solver takes: a choice of format for every item, and a budget, for one map or for phases of a run.

Its JSON forms are ``snip.problem/1`` (one map) and ``snip.problem/2`` (phases), which
:mod:`snip_megatron.solver.parse` reads (docs/file-formats.md).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from snip_megatron.errors import SnipError
from snip_megatron.solver.items import Budget, Item, Phase, Spent
from snip_megatron.solver.parse import PHASED_SCHEMA, PROBLEM_SCHEMA, parse_problem
from snip_megatron.solver.validation import faults


@dataclass(frozen=True)
class Problem:
    """Minimise Σ loss within the budget, with one choice for every item, or for every item and phase.

    The *effective share* of a phase under ``target`` is the smaller of its share over everything and, with a stage
    tolerance, of every stage's share plus the tolerance. Its mean over all steps, those spent included, must reach the
    target. One map is the same as one phase of one step.

    Attributes:
        budget: the budget.
        items: the items.
        phases: what remains of the run, in the order of time; empty for one map.
        spent: what is over of the run; None for nothing.

    Raises:
        SnipError: a field is invalid. The message names its JSON path.
    """

    budget: Budget
    items: tuple[Item, ...]
    phases: tuple[Phase, ...] = ()
    spent: Spent | None = None

    def __post_init__(self) -> None:
        for path, message in faults(self.budget, self.items, self.phases, self.spent):
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
            return cls(*parts)
        except SnipError as error:
            raise SnipError(f"{where}: {error}") from None

    def to_json(self) -> str:
        """Return the text of a problem file. Floats round-trip exactly; unused fields are left out."""
        body: dict[str, Any] = {
            "schema": PHASED_SCHEMA if self.phases else PROBLEM_SCHEMA,
            "budget": _budget_body(self.budget),
        }
        if self.phases:
            targets = [{} if phase.target is None else {"target": phase.target} for phase in self.phases]
            body["phases"] = [{"steps": p.steps, **target} for p, target in zip(self.phases, targets, strict=True)]
        if self.spent is not None:
            body["spent"] = {"steps": self.spent.steps, "achieved": self.spent.achieved}
        body["items"] = [_item_body(item, phased=bool(self.phases)) for item in self.items]
        return json.dumps(body, allow_nan=False) + "\n"


def _budget_body(budget: Budget) -> dict[str, Any]:
    body: dict[str, Any] = {budget.kind: budget.wanted}
    if budget.kind == "target":
        body["stage_tolerance"] = budget.stage_tolerance
    if budget.fixed_cost:
        body["fixed_cost"] = {str(stage): cost for stage, cost in budget.fixed_cost}
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
