"""The problem that the solver gets: one choice an item, a share to save, pipeline stages to keep in balance.

JSON form: ``snip.problem/1`` (docs/file-formats.md); :mod:`snip_megatron.solver.parse` reads it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from snip_megatron.errors import SnipError
from snip_megatron.solver.items import Budget, Item
from snip_megatron.solver.parse import parse_problem
from snip_megatron.solver.validation import faults

PROBLEM_SCHEMA = "snip.problem/1"


@dataclass(frozen=True)
class Problem:
    """Minimise Σ loss, one choice per item, within the budget. Raises SnipError naming the JSON path at fault."""

    budget: Budget
    items: tuple[Item, ...]

    def __post_init__(self) -> None:
        for path, message in faults(self.budget, self.items):
            raise SnipError(f"{path}: {message}")

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "problem") -> Problem:
        """Parse and validate a ``snip.problem/1`` text; ``where`` names the file in errors. Raises SnipError."""
        budget, items = parse_problem(text, where, PROBLEM_SCHEMA)
        try:
            return cls(budget, items)
        except SnipError as error:
            raise SnipError(f"{where}: {error}") from None

    def to_json(self) -> str:
        """The text of a ``snip.problem/1`` file; floats round-trip exactly, what is not used is left out."""
        body = {
            "schema": PROBLEM_SCHEMA,
            "budget": budget_body(self.budget),
            "items": [_item_body(item) for item in self.items],
        }
        return json.dumps(body, allow_nan=False) + "\n"


def budget_body(budget: Budget) -> dict[str, Any]:
    """The object ``budget`` of a problem's file."""
    body: dict[str, Any] = {budget.kind: budget.wanted}
    if budget.kind == "target":
        body["stage_tolerance"] = budget.stage_tolerance
    if budget.fixed_cost:
        body["fixed_cost"] = {str(stage): cost for stage, cost in budget.fixed_cost}
    return body


def _item_body(item: Item) -> dict[str, Any]:
    body: dict[str, Any] = {
        "id": item.id,
        "stage": item.stage,
        "cost": item.cost,
        "choices": [{"format": c.format.value, "loss": c.loss, "saving": c.saving} for c in item.choices],
    }
    if item.group is not None:
        body["group"] = item.group
    if item.pin is not None:
        body["pin"] = item.pin.value
    return body
