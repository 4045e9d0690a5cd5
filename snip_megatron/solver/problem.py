"""The problem that the solver gets: one choice an item, a share to save, pipeline stages to keep in balance.

JSON form: ``snip.problem/1`` (DESIGN, contracts); :mod:`snip_megatron.solver.parse` reads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format

PROBLEM_SCHEMA = "snip.problem/1"
MAX_COST = 1e18
MAX_LOSS = 1e100
MAX_STAGE = 2**20
_ROUNDING = 1e-9  # a saving may pass its cost by this share: both are sums rounded to float64


@dataclass(frozen=True, slots=True)
class Choice:
    """One format an item may run in.

    Attributes:
        format: the number format.
        loss: what it costs in quality, any unit, may be negative.
        saving: what it saves, in the unit of the item's cost; negative where the format is slower than the reference.
    """

    format: Format
    loss: float
    saving: float


@dataclass(frozen=True, slots=True)
class Item:
    """One decision: a GEMM (granularity ``gemm``) or a whole linear (``layer``).

    Attributes:
        id: unique, any non-empty text; a training run uses the names of DESIGN.
        stage: pipeline stage, all chunks of a virtual pipeline together.
        cost: FLOPs or seconds in the reference format, at most 1e18.
        choices: at least one, each format once.
    """

    id: str
    stage: int
    cost: float
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Budget:
    """What must be saved.

    Attributes:
        target: Σ saving ≥ target · Σ cost over everything; in [0, 1].
        stage_tolerance: on every stage Σ saving ≥ (target − tolerance) · that stage's cost; None: no such constraint.
    """

    target: float
    stage_tolerance: float | None = None


@dataclass(frozen=True)
class Problem:
    """Minimise Σ loss, one choice per item, within the budget. Raises SnipError naming the JSON path at fault."""

    budget: Budget
    items: tuple[Item, ...]

    def __post_init__(self) -> None:
        for path, message in _faults(self):
            raise SnipError(f"{path}: {message}")

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "problem") -> Problem:
        """Parse and validate a ``snip.problem/1`` text; ``where`` names the file in errors. Raises SnipError."""
        from snip_megatron.solver.parse import parse_problem

        return parse_problem(text, where)

    def to_json(self) -> str:
        """The text of a ``snip.problem/1`` file; floats round-trip exactly."""
        body = {
            "schema": PROBLEM_SCHEMA,
            "budget": {"target": self.budget.target, "stage_tolerance": self.budget.stage_tolerance},
            "items": [
                {
                    "id": item.id,
                    "stage": item.stage,
                    "cost": item.cost,
                    "choices": [{"format": c.format.value, "loss": c.loss, "saving": c.saving} for c in item.choices],
                }
                for item in self.items
            ],
        }
        return json.dumps(body, allow_nan=False) + "\n"


def _faults(problem: Problem) -> Iterator[tuple[str, str]]:
    """(JSON path, what is wrong), first fault first."""
    yield from _budget_faults(problem.budget)
    if not problem.items:
        yield "items", "must hold at least one item"
    seen: dict[str, int] = {}
    for i, item in enumerate(problem.items):
        if not item.id:
            yield f"items[{i}].id", "must be a non-empty string"
        first = seen.setdefault(item.id, i)
        if first != i:
            yield f"items[{i}].id", f"{item.id!r} is also the id of items[{first}]"
        if not 0 <= item.stage < MAX_STAGE:
            yield f"items[{i}].stage", f"must be a stage number from 0 to {MAX_STAGE - 1}, got {item.stage}"
        if not 0 <= item.cost <= MAX_COST:
            yield f"items[{i}].cost", f"must be a finite number from 0 to {MAX_COST:g}, got {item.cost}"
        yield from _choice_faults(item, f"items[{i}].choices")


def _budget_faults(budget: Budget) -> Iterator[tuple[str, str]]:
    if not 0 <= budget.target <= 1:
        yield "budget.target", f"must be a share from 0 to 1, got {budget.target}"
    if budget.stage_tolerance is not None and not 0 <= budget.stage_tolerance <= 1:
        yield "budget.stage_tolerance", f"must be null or a share from 0 to 1, got {budget.stage_tolerance}"


def _choice_faults(item: Item, path: str) -> Iterator[tuple[str, str]]:
    if not item.choices:
        yield path, "must hold at least one choice"
    for j, choice in enumerate(item.choices):
        if not abs(choice.loss) <= MAX_LOSS:
            yield f"{path}[{j}].loss", f"must be a finite number of at most {MAX_LOSS:g}, got {choice.loss}"
        if not math.isfinite(choice.saving) or choice.saving > item.cost * (1 + _ROUNDING):
            yield f"{path}[{j}].saving", f"must be a finite number of at most the item's cost, got {choice.saving}"
        if choice.saving < -MAX_COST:
            yield f"{path}[{j}].saving", f"must be at least {-MAX_COST:g}, got {choice.saving}"
    formats = [choice.format for choice in item.choices]
    if len(set(formats)) != len(formats):
        j = next(j for j, f in enumerate(formats) if f in formats[:j])
        yield f"{path}[{j}].format", f"{formats[j].value!r} stands twice in one item"
