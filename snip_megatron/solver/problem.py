"""The problem that the solver takes: a choice of format for every item, and a budget.

Its JSON form is ``snip.problem/1`` (docs/file-formats.md), which :mod:`snip_megatron.solver.parse` reads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from snip_megatron.errors import SnipError
from snip_megatron.solver.items import Budget, Item
from snip_megatron.solver.parse import parse_problem
from snip_megatron.solver.validation import faults

PROBLEM_SCHEMA = "snip.problem/1"


@dataclass(frozen=True)
class Problem:
    """Minimise Σ loss within the budget, with one choice for every item.

    Attributes:
        budget: the budget.
        items: the items.

    Raises:
        SnipError: a field is invalid. The message names its JSON path.
    """

    budget: Budget
    items: tuple[Item, ...]

    def __post_init__(self) -> None:
        for path, message in faults(self.budget, self.items):
            raise SnipError(f"{path}: {message}")

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "problem", others: Sequence[str] = ()) -> Problem:
        """Parse the text of a ``snip.problem/1`` file.

        Args:
            text: the text.
            where: names the file in errors.
            others: schemas that the caller takes as well, for the error about another schema.

        Raises:
            SnipError: the text is not a valid problem.
        """
        budget, items = parse_problem(text, where, PROBLEM_SCHEMA, others)
        try:
            return cls(budget, items)
        except SnipError as error:
            raise SnipError(f"{where}: {error}") from None

    def to_json(self) -> str:
        """Return the text of a ``snip.problem/1`` file. Floats round-trip exactly; unused fields are left out."""
        body = {
            "schema": PROBLEM_SCHEMA,
            "budget": budget_body(self.budget),
            "items": [_item_body(item) for item in self.items],
        }
        return json.dumps(body, allow_nan=False) + "\n"


def budget_body(budget: Budget) -> dict[str, Any]:
    """Return the object ``budget`` of a problem file."""
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
