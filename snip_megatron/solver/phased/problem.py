"""The problem over the phases of a run: one choice an item and phase, and a budget that is the average over the run.

JSON form: ``snip.problem/2`` (README.md of the solver); :mod:`snip_megatron.solver.phased.parse` reads it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format
from snip_megatron.solver.items import Budget
from snip_megatron.solver.parse import load_object
from snip_megatron.solver.phased.parse import parse_phased
from snip_megatron.solver.phased.parts import Phase, PhasedChoice, PhasedItem, Spent
from snip_megatron.solver.phased.validation import phased_faults
from snip_megatron.solver.problem import Problem, budget_body

PHASED_SCHEMA = "snip.problem/2"


@dataclass(frozen=True)
class PhasedProblem:
    """Minimise Σ loss over items and phases, one choice an item and phase, within a budget over the whole run.

    The *effective share* of a phase under ``target`` is the smaller of its share over everything and, with a stage
    tolerance, of every stage's share plus the tolerance. Its mean over all steps, those spent included, must reach the
    target. Under ``speedup``, a phase takes the time of its slowest stage; the mean time of a step counts. ``loss``
    bounds Σ loss and asks for the least Σ of the times. With one phase and nothing spent this is a ``Problem``.

    Attributes:
        budget: as of a ``Problem``.
        phases: what remains of the run, in the order of time.
        items: what is decided. spent: what is over; None for nothing.
    """

    budget: Budget
    phases: tuple[Phase, ...]
    items: tuple[PhasedItem, ...]
    spent: Spent | None = None

    def __post_init__(self) -> None:
        for path, message in phased_faults(self.budget, self.phases, self.items, self.spent):
            raise SnipError(f"{path}: {message}")

    @property
    def steps(self) -> int:
        """All steps of the run: spent and remaining."""
        return sum(phase.steps for phase in self.phases) + (self.spent.steps if self.spent is not None else 0)

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "problem") -> PhasedProblem:
        """Parse and validate a ``snip.problem/2`` text; ``where`` names the file in errors. Raises SnipError."""
        parts = parse_phased(text, where, PHASED_SCHEMA)
        try:
            return cls(*parts)
        except SnipError as error:
            raise SnipError(f"{where}: {error}") from None

    def to_json(self) -> str:
        """The text of a ``snip.problem/2`` file; floats round-trip exactly, what is not used is left out."""
        body: dict[str, Any] = {
            "schema": PHASED_SCHEMA,
            "budget": budget_body(self.budget),
            "phases": [_phase_body(phase) for phase in self.phases],
        }
        if self.spent is not None:
            body["spent"] = {"steps": self.spent.steps, "achieved": self.spent.achieved}
        body["items"] = [_item_body(item) for item in self.items]
        return json.dumps(body, allow_nan=False) + "\n"


def read_problem(text: str | bytes, where: str = "problem") -> Problem | PhasedProblem:
    """Parse a problem file of either kind; ``where`` names the file in errors. Raises SnipError."""
    named = PHASED_SCHEMA.encode() in text if isinstance(text, bytes) else PHASED_SCHEMA in text
    if named and load_object(text, where).get("schema") == PHASED_SCHEMA:
        return PhasedProblem.from_json(text, where)
    return Problem.from_json(text, where, others=(PHASED_SCHEMA,))


def _phase_body(phase: Phase) -> dict[str, Any]:
    return {"steps": phase.steps} if phase.target is None else {"steps": phase.steps, "target": phase.target}


def _item_body(item: PhasedItem) -> dict[str, Any]:
    body: dict[str, Any] = {
        "id": item.id,
        "stage": item.stage,
        "cost": item.cost,
        "choices": [_choice_body(choice) for choice in item.choices],
    }
    if item.group is not None:
        body["group"] = item.group
    if item.pin is not None:
        body["pin"] = item.pin.value
    if item.keeps:
        body["keeps"] = list(item.keeps)
    return body


def _choice_body(choice: PhasedChoice) -> dict[str, Any]:
    return {"format": Format(choice.format).value, "saving": choice.saving, "losses": list(choice.losses)}
