"""The problem that the solver takes: a choice of format for every item, and a budget.

Its JSON forms are ``snip.problem/1`` (one map) and ``snip.problem/2`` (the phases of a run; docs/file-formats.md).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from snip_megatron.precision import Format
from snip_megatron.precision.budget import MAX_LOSS, MAX_SPEEDUP, Budget
from snip_megatron.precision.errors import SnipError, cut, located, quoted
from snip_megatron.precision.phases import MOST_PHASES
from snip_megatron.precision.strict_json import (
    JsonFields,
    array,
    check_schema,
    field,
    finite,
    mapping,
    read_object,
)

PROBLEM_SCHEMA, PHASED_SCHEMA = "snip.problem/1", "snip.problem/2"
_KINDS = {"target": "fp4", "speedup": "speedup", "loss": "loss"}  # field of a file → kind of the Budget
_MAX_COST = 1e18
_MAX_JOINT = 2  # a decision of three items has the product of their choices
_ROUNDING = 1e-9  # a saving may pass its cost by this share: both are sums rounded to float64
_NO_AVERAGE = "has no meaning beside loss: what remains is made as fast as the bound allows"
_Faults = Iterator[tuple[str, str]]  # JSON path and what is wrong


@dataclass(frozen=True, slots=True)
class Choice(JsonFields):
    """One format that an item may run in."""

    format: Format
    # the loss of quality in any unit, which may be negative. One number, or one for each phase, which is that of all
    # steps of the phase
    losses: tuple[float, ...]
    saving: float  # what of the item's cost the format saves in a step, negative if it is slower than the reference

    @property
    def loss(self) -> float:
        return self.losses[0] if len(self.losses) == 1 else math.fsum(self.losses)


@dataclass(frozen=True, slots=True)
class Item(JsonFields):
    """What gets one format in each phase: a GEMM (granularity ``gemm``) or a whole linear (``layer``)."""

    id: str  # unique non-empty text. A training run uses names such as ``decoder.layers.0.mlp.linear_fc1:fprop``
    stage: int  # pipeline stage. All chunks of a virtual pipeline have the same stage
    cost: float  # FLOPs or seconds of a step in the reference format, at most 1e18
    choices: tuple[Choice, ...]  # at least one; each format at most once
    pin: Format | None = None  # the format that the item must take, one of its choices. None if it may take any
    # indices of the phases, from 1 on, in which the item keeps the preceding phase's format
    keeps: tuple[int, ...] = ()
    # id of another item → format → what a step saves in addition if both items take that format. Two GEMMs save so
    # where one call quantises their common operand for both
    joint: Mapping[str, Mapping[Format, float]] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Phase(JsonFields):
    """One phase of what remains of a run."""

    steps: int
    target: float | None = None  # the share, or speedup, that it must reach itself. None if only the average counts


@dataclass(frozen=True, slots=True)
class Spent(JsonFields):
    """The part of a run that is over, and its mean share; under a ``speedup`` budget its speedup, the harmonic mean."""

    steps: int
    achieved: float


@dataclass(frozen=True)
class Problem:
    """One choice for every item, or for every item and phase, within a budget. One map is one phase of one step.

    Under ``fp4``, Σ loss is minimised so that the mean *effective share* of all steps, those spent included, reaches
    the budget. That of a phase is the smaller of Σ saving / Σ cost and, with a stage tolerance, of every stage's share
    plus the tolerance.

    Under ``speedup`` and ``loss``, costs are times. A stage takes the cost of its items less their savings, plus its
    fixed cost, and a step takes as long as its slowest stage. Items with a ``joint`` saving save it in addition where
    both take the same format. The reference time is that of a step without any saving.
    ``speedup`` minimises Σ loss so that reference time / mean time reaches the budget. ``loss`` minimises the time so
    that Σ loss is at most the budget.

    Raises SnipError if a field is invalid. The message names its JSON path.
    """

    budget: Budget
    items: tuple[Item, ...]
    # how far the share of a stage may stay below an ``fp4`` budget; in [0, 1]. None: stages have no constraint
    stage_tolerance: float | None = None
    # (stage, cost) pairs of the time that no choice changes, such as attention. Other stages have 0
    fixed_cost: tuple[tuple[int, float], ...] = ()
    phases: tuple[Phase, ...] = ()  # what remains of the run, in the order of time. Empty for one map
    spent: Spent | None = None  # the part of the run that is over. None if there is none

    def __post_init__(self) -> None:
        for path, message in _faults(self):
            raise SnipError(f"{path}: {message}")

    @property
    def steps(self) -> int:
        """All steps of the run, spent and remaining; 1 for one map."""
        return self.past[0] + (sum(phase.steps for phase in self.phases) or 1)

    @property
    def past(self) -> tuple[int, float]:
        """Steps that are spent and what they achieved. Without any, a share or speedup of 1."""
        return (0, 1.0) if self.spent is None else (self.spent.steps, self.spent.achieved)

    def at(self, value: float) -> Problem:
        """Return the problem with another value of its budget."""
        return replace(self, budget=replace(self.budget, value=value))

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "problem") -> Problem:
        """Parse the text of a problem file of either schema; ``where`` names the file in errors. Raises SnipError."""
        with located(where):
            body = read_object(text)
            field(body, "schema")
            phased = check_schema(body, PROBLEM_SCHEMA, PHASED_SCHEMA) == PHASED_SCHEMA
            parts = _budget(mapping(field(body, "budget"), "budget"))
            if phased:
                phases = array(field(body, "phases"), "phases")
                if not phases:
                    raise SnipError(f"phases: must hold 1 to {MOST_PHASES} phases, got 0")
                parts["phases"] = tuple(Phase.from_dict(raw, f"phases[{p}]") for p, raw in enumerate(phases))
                parts["spent"] = None if body.get("spent") is None else Spent.from_dict(body["spent"], "spent")
            items = array(field(body, "items"), "items", " of objects")
            return cls(items=tuple(_item(raw, f"items[{i}]", phased) for i, raw in enumerate(items)), **parts)

    def to_json(self) -> str:
        """Return the text of a problem file. Floats round-trip exactly; unused fields are left out."""
        kind, value = self.budget.kind, self.budget.value
        budget: dict[str, Any] = {"target" if kind == "fp4" else kind: value}
        if kind == "fp4":
            budget["stage_tolerance"] = self.stage_tolerance
        if self.fixed_cost:
            budget["fixed_cost"] = {str(stage): cost for stage, cost in self.fixed_cost}
        body: dict[str, Any] = {"schema": PHASED_SCHEMA if self.phases else PROBLEM_SCHEMA, "budget": budget}
        if self.phases:
            body["phases"] = [_used(phase.as_dict()) for phase in self.phases]
        if self.spent is not None:
            body["spent"] = self.spent.as_dict()
        body["items"] = [_used(item.as_dict()) for item in self.items]
        for item in [] if self.phases else body["items"]:
            for choice in item["choices"]:
                (choice["loss"],) = choice.pop("losses")
        return json.dumps(body, allow_nan=False) + "\n"


# -- files -----------------------------------------------------------------------------------------------------
def _budget(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a problem that its object ``budget`` holds."""
    keys = (*_KINDS, "stage_tolerance", "fixed_cost")
    for key in raw:
        if key not in keys:
            raise SnipError(f"budget.{cut(key)}: unknown field (known: {', '.join(keys)})")
    kinds = [key for key in _KINDS if key in raw]
    if not kinds:
        raise SnipError("budget.target: missing")
    if len(kinds) > 1:
        raise SnipError(f"budget: must have exactly one of {', '.join(_KINDS)}, has {' and '.join(kinds)}")
    (key,) = kinds
    value = finite(raw[key], f"budget.{key}")
    try:
        budget = Budget(_KINDS[key], value)
    except SnipError as error:
        raise SnipError(f"budget.{key}: {error}, got {value}") from None
    tolerance = field(raw, "stage_tolerance", "budget.") if key == "target" else raw.get("stage_tolerance")
    fixed = mapping(raw.get("fixed_cost", {}), "budget.fixed_cost", " of <stage>: cost")
    for stage in fixed:
        if not (stage.isascii() and stage.isdigit()):
            raise SnipError(f"budget.fixed_cost: {quoted(stage)} is not a stage number")
    return {
        "budget": budget,
        "stage_tolerance": None if tolerance is None else finite(tolerance, "budget.stage_tolerance"),
        "fixed_cost": tuple((int(k), finite(cost, f"budget.fixed_cost.{k}")) for k, cost in fixed.items()),
    }


def _item(raw: Any, path: str, phased: bool) -> Item:
    body = mapping(raw, path)
    listed = array(field(body, "choices", f"{path}."), f"{path}.choices", " of objects")
    choices = tuple(_choice(each, f"{path}.choices[{j}]", phased) for j, each in enumerate(listed))
    return replace(Item.from_dict({**body, "choices": []}, path), choices=choices)


def _choice(raw: Any, path: str, phased: bool) -> Choice:
    body = dict(mapping(raw, path))
    if not phased:
        body["losses"] = [finite(field(body, "loss", f"{path}."), f"{path}.loss")]
        del body["loss"]
    return Choice.from_dict(body, path)


def _used(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value not in (None, [], {})}


# -- checks ----------------------------------------------------------------------------------------------------
def _faults(problem: Problem) -> _Faults:
    phases, spent = problem.phases, problem.spent
    yield from _budget_faults(problem)
    if len(phases) > MOST_PHASES:
        yield "phases", f"must hold 1 to {MOST_PHASES} phases, got {len(phases)}"
    for p, phase in enumerate(phases):
        yield from _phase_faults(problem.budget, phase, f"phases[{p}]")
    if spent is not None:
        yield from _spent_faults(problem.budget, spent)
    if not problem.items:
        yield "items", "must hold at least one item"
    first_index: dict[str, int] = {}
    for i, item in enumerate(problem.items):
        if not item.id:
            yield f"items[{i}].id", "must be a non-empty string"
        first = first_index.setdefault(item.id, i)
        if first != i:
            yield f"items[{i}].id", f"{quoted(item.id)} is also the id of items[{first}]"
        yield from _item_faults(item, len(phases), f"items[{i}]")
    yield from _joint_faults(problem)


def _budget_faults(problem: Problem) -> _Faults:
    kind, tolerance = problem.budget.kind, problem.stage_tolerance
    if tolerance is not None and kind != "fp4":
        yield "budget.stage_tolerance", f"has no meaning beside {kind}: a stage's time is what counts there"
    if tolerance is not None and not 0 <= tolerance <= 1:
        yield "budget.stage_tolerance", f"must be null or a share from 0 to 1, got {tolerance}"
    if problem.fixed_cost and kind == "fp4":
        yield "budget.fixed_cost", "has no meaning beside target"
    for stage, cost in problem.fixed_cost:
        if not 0 <= cost <= _MAX_COST:
            yield f"budget.fixed_cost.{stage}", f"must be a finite number from 0 to {_MAX_COST:g}, got {cost}"


def _phase_faults(budget: Budget, phase: Phase, path: str) -> _Faults:
    if phase.steps < 1:
        yield f"{path}.steps", f"must be a number of steps, 1 or more, got {phase.steps}"
    if phase.target is None:
        return
    if budget.kind == "loss":
        yield f"{path}.target", _NO_AVERAGE
    low, high, what = (0, 1, "share") if budget.kind == "fp4" else (1, MAX_SPEEDUP, "factor")
    if not low <= phase.target <= high:
        yield f"{path}.target", f"must be a {what} from {low} to {high:g}, got {phase.target}"


def _spent_faults(budget: Budget, spent: Spent) -> _Faults:
    if budget.kind == "loss":
        yield "spent", _NO_AVERAGE
    if spent.steps < 0:
        yield "spent.steps", f"must be a number of steps, 0 or more, got {spent.steps}"
    if budget.kind == "speedup" and not (math.isfinite(spent.achieved) and spent.achieved > 0):
        yield "spent.achieved", f"must be a factor above 0, got {spent.achieved}"
    if budget.kind == "fp4" and not 0 <= spent.achieved <= 1:
        yield "spent.achieved", f"must be a share from 0 to 1, got {spent.achieved}"


def _item_faults(item: Item, phases: int, path: str) -> _Faults:
    if item.stage < 0:
        yield f"{path}.stage", f"must be a stage number, 0 or more, got {item.stage}"
    if not 0 <= item.cost <= _MAX_COST:
        yield f"{path}.cost", f"must be a finite number from 0 to {_MAX_COST:g}, got {item.cost}"
    if not item.choices:
        yield f"{path}.choices", "must hold at least one choice"
    for j, choice in enumerate(item.choices):
        choice_path = f"{path}.choices[{j}]"
        if len(choice.losses) != (phases or 1):
            yield f"{choice_path}.losses", f"must hold {phases or 1} numbers, one a phase, got {len(choice.losses)}"
        for p, loss in enumerate(choice.losses):
            if not abs(loss) <= MAX_LOSS:
                name = f"{choice_path}.losses[{p}]" if phases else f"{choice_path}.loss"
                yield name, f"must be a finite number of at most {MAX_LOSS:g}, got {loss}"
        if not -_MAX_COST <= choice.saving <= item.cost * (1 + _ROUNDING):
            yield f"{choice_path}.saving", f"must be a finite number of at most the item's cost, got {choice.saving}"
    formats = [choice.format for choice in item.choices]
    if len(set(formats)) != len(formats):
        j = next(j for j, f in enumerate(formats) if f in formats[:j])
        yield f"{path}.choices[{j}].format", f"{quoted(formats[j].value)} stands twice in one item"
    if item.pin is not None and item.pin not in formats:
        yield f"{path}.pin", f"{quoted(item.pin.value)} is not among the item's choices"
    if not all(1 <= p < phases for p in item.keeps) or len(set(item.keeps)) != len(item.keeps):
        yield f"{path}.keeps", f"must hold distinct indices of phases that follow another, from 1 to {phases - 1}"


def _joint_faults(problem: Problem) -> _Faults:
    stages = {item.id: item.stage for item in problem.items}
    for i, item in enumerate(problem.items):
        joint_path = f"items[{i}].joint"
        if len(item.joint) > _MAX_JOINT:
            yield joint_path, f"must name at most {_MAX_JOINT} items, got {len(item.joint)}"
        for other, savings in item.joint.items():
            if other == item.id or stages.get(other) != item.stage:
                yield joint_path, f"{quoted(cut(other))} is not the id of another item of the same stage"
            for saving in savings.values():
                if not 0 <= saving <= _MAX_COST:
                    yield joint_path, f"a saving must be a finite number from 0 to {_MAX_COST:g}, got {saving}"
