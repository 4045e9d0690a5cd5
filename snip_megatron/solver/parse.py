"""Reads ``snip.problem/1`` and ``/2``. Every error names the file, the JSON path and what is wrong."""

from __future__ import annotations

from typing import Any

from snip_megatron.errors import SnipError, cut, quoted
from snip_megatron.precision import Format
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.phases import MOST_PHASES
from snip_megatron.precision.strict import array, check_schema, field, mapping, number, read_object, whole
from snip_megatron.solver.items import Choice, Item, Phase, Spent

PROBLEM_SCHEMA = "snip.problem/1"
PHASED_SCHEMA = "snip.problem/2"
_FORMATS = {f.value: f for f in Format}
_KINDS = {"target": "fp4", "speedup": "speedup", "loss": "loss"}  # field of a file → kind of the Budget


def parse_problem(text: str | bytes, where: str) -> dict[str, Any]:
    """Return the fields of a problem, whose ranges are not checked. Raises SnipError("<where>: <path>: <what>")."""
    try:
        body = read_object(text)
        field(body, "schema")
        phased = check_schema(body, PROBLEM_SCHEMA, PHASED_SCHEMA) == PHASED_SCHEMA
        fields = _budget(mapping(field(body, "budget"), "budget"))
        raw_phases = array(field(body, "phases"), "phases") if phased else []
        if phased and not raw_phases:
            raise SnipError(f"phases: must hold 1 to {MOST_PHASES} phases, got 0")
        phases = tuple(_phase(raw, f"phases[{p}]") for p, raw in enumerate(raw_phases))
        raw_items = array(field(body, "items"), "items", " of objects")
        items = tuple(_item(raw, f"items[{i}]", phased) for i, raw in enumerate(raw_items))
        return fields | {"items": items, "phases": phases, "spent": _spent(body) if phased else None}
    except SnipError as error:
        raise SnipError(f"{where}: {error}") from None


def _budget(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a problem that its object ``budget`` holds."""
    known = (*_KINDS, "stage_tolerance", "fixed_cost")
    for key in raw:
        if key not in known:
            raise SnipError(f"budget.{cut(key)}: unknown field (known: {', '.join(known)})")
    given = [key for key in _KINDS if key in raw]
    if not given:
        raise SnipError("budget.target: missing")
    if len(given) > 1:
        raise SnipError(f"budget: must have exactly one of {', '.join(_KINDS)}, has {' and '.join(given)}")
    (key,) = given
    value = number(raw[key], f"budget.{key}")
    try:
        budget = Budget(_KINDS[key], value)
    except SnipError as error:
        raise SnipError(f"budget.{key}: {error}, got {value}") from None
    tolerance = field(raw, "stage_tolerance", "budget.") if key == "target" else raw.get("stage_tolerance")
    fixed = mapping(raw.get("fixed_cost", {}), "budget.fixed_cost", " of <stage>: cost")
    for stage in fixed:
        if not (stage.isascii() and stage.isdigit() and len(stage) < 8):
            raise SnipError(f"budget.fixed_cost: {quoted(stage)} is not a stage number")
    return {
        "budget": budget,
        "stage_tolerance": None if tolerance is None else number(tolerance, "budget.stage_tolerance"),
        "fixed_cost": tuple((int(k), number(cost, f"budget.fixed_cost.{k}")) for k, cost in fixed.items()),
    }


def _phase(raw: Any, path: str) -> Phase:
    target = mapping(raw, path).get("target")
    steps = whole(field(raw, "steps", f"{path}."), f"{path}.steps", 1)
    return Phase(steps, None if target is None else number(target, f"{path}.target"))


def _spent(body: dict[str, Any]) -> Spent | None:
    if body.get("spent") is None:
        return None
    raw = mapping(body["spent"], "spent")
    steps = whole(field(raw, "steps", "spent."), "spent.steps")
    return Spent(steps, number(field(raw, "achieved", "spent."), "spent.achieved"))


def _item(raw: Any, path: str, phased: bool) -> Item:
    def get(key: str) -> Any:
        return field(mapping(raw, path), key, f"{path}.")

    choices = array(get("choices"), f"{path}.choices", " of objects")
    id_, stage = get("id"), get("stage")
    if not isinstance(id_, str):
        raise SnipError(f"{path}.id: must be a non-empty string")
    if isinstance(stage, bool) or not isinstance(stage, int):
        raise SnipError(f"{path}.stage: must be a stage number, got {quoted(stage)}")
    if raw.get("group") is not None:
        raise SnipError(f"{path}.group: items no longer share formats; leave it out, or pin the items")
    pin, keeps = raw.get("pin"), raw.get("keeps") if phased else None
    return Item(
        id_,
        stage,
        number(get("cost"), f"{path}.cost"),
        tuple(_choice(c, f"{path}.choices[{j}]", phased) for j, c in enumerate(choices)),
        None if pin is None else _format(pin, f"{path}.pin"),
        tuple(whole(p, f"{path}.keeps[{j}]") for j, p in enumerate(array(keeps or [], f"{path}.keeps"))),
    )


def _choice(raw: Any, path: str, phased: bool) -> Choice:
    name = "losses" if phased else "loss"
    fmt, losses, saving = (field(mapping(raw, path), key, f"{path}.") for key in ("format", name, "saving"))
    if phased:
        each = tuple(number(x, f"{path}.losses[{p}]") for p, x in enumerate(array(losses, f"{path}.losses")))
    else:
        each = (number(losses, f"{path}.loss"),)
    return Choice(_format(fmt, f"{path}.format"), each, number(saving, f"{path}.saving"))


def _format(name: Any, path: str) -> Format:
    if not isinstance(name, str) or name not in _FORMATS:
        raise SnipError(f"{path}: unknown format {quoted(name)} (known: {', '.join(_FORMATS)})")
    return _FORMATS[name]
