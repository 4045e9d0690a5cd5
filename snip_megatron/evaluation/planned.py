"""The comparisons that an experiment file announces before its runs are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snip_megatron.errors import SnipError, quoted
from snip_megatron.evaluation.fields import Fields

VALIDATIONS = ("map", "bf16")
"""Formats in which a run is validated."""


@dataclass(frozen=True)
class Planned:
    """A comparison that the experiment file announces before its runs are made.

    Attributes:
        kind: ``from_warm`` or ``from_scratch``.
        ours: the label of the first policy.
        theirs: the labels that it is compared with. A policy with a fixed map has no budget, and is compared with every
            one.
        budgets: the budgets at which it is compared.
        validation: the formats of the validation, ``map`` or ``bf16``.
    """

    kind: str
    ours: str
    theirs: tuple[str, ...]
    budgets: tuple[float, ...]
    validation: str


def read_planned(fields: Fields, budgets: Mapping[str, Mapping[str, Sequence[float] | None]]) -> tuple[Planned, ...]:
    """Read the field ``planned`` of an experiment.

    Args:
        fields: the experiment.
        budgets: kind of runs → label → budgets at which the policy runs; None if it has a fixed map.

    Raises:
        SnipError: a comparison names a policy or a budget that the experiment does not run.
    """
    entries = fields.raw("planned") if fields.has("planned") else []
    if not isinstance(entries, list):
        raise SnipError(f"{fields.at('planned')}: expected a list of comparisons")
    return tuple(_comparison(entry, f"{fields.at('planned')}[{i}]", budgets) for i, entry in enumerate(entries))


def _comparison(body: Any, where: str, budgets: Mapping[str, Mapping[str, Sequence[float] | None]]) -> Planned:
    fields = Fields(body, where)
    planned = Planned(
        kind=fields.text("kind", next(iter(budgets))),
        ours=fields.text("ours"),
        theirs=fields.texts("theirs"),
        budgets=fields.numbers("budgets"),
        validation=fields.text("validation", "map"),
    )
    fields.close()
    if planned.kind not in budgets:
        raise SnipError(f"{fields.at('kind')}: {quoted(planned.kind)}: expected one of {', '.join(budgets)}")
    if planned.validation not in VALIDATIONS:
        raise SnipError(f"{fields.at('validation')}: {quoted(planned.validation)}: expected map or bf16")
    made = budgets[planned.kind]
    for label in (planned.ours, *planned.theirs):
        if label not in made or (label == planned.ours and made[label] is None):
            raise SnipError(f"{where}: {quoted(label)} is no policy of {planned.kind} with a budget")
        own = made[label]
        missing = None if own is None else next((budget for budget in planned.budgets if budget not in own), None)
        if missing is not None:
            raise SnipError(f"{fields.at('budgets')}: {quoted(label)} does not run at {missing:g}")
    return planned
