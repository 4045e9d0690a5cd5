"""Reads ``snip.problem/1`` and ``/2``. Every error names the file, the JSON path and what is wrong."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator
from typing import Any

from snip_megatron.errors import SnipError, cut, quoted
from snip_megatron.precision import Format
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.phases import MOST_PHASES
from snip_megatron.solver.items import Choice, Item, Phase, Spent

PROBLEM_SCHEMA = "snip.problem/1"
PHASED_SCHEMA = "snip.problem/2"
_FORMATS = {f.value: f for f in Format}
_KINDS = {"target": "fp4", "speedup": "speedup", "loss": "loss"}  # field of a file → kind of the Budget
_MISSING = object()


def parse_problem(text: str | bytes, where: str) -> dict[str, Any]:
    """Return the fields of a problem. Raises SnipError("<where>: <JSON path>: <what is wrong>")."""
    with collector_paused():
        body = _load_object(text, where)
        try:
            schema = _field(body, "schema", "")
            if schema not in (PROBLEM_SCHEMA, PHASED_SCHEMA):
                raise SnipError(f'schema: must be "{PROBLEM_SCHEMA}" or "{PHASED_SCHEMA}"')
            fields = _budget(_object(_field(body, "budget", ""), "budget"))
            phased = schema == PHASED_SCHEMA
            raw_phases = _array(body, "phases", "") if phased else []
            if phased and not raw_phases:
                raise SnipError(f"phases: must hold 1 to {MOST_PHASES} phases, got 0")
            phases = tuple(_phase(raw, f"phases[{p}]") for p, raw in enumerate(raw_phases))
            items = tuple(
                _item(raw, f"items[{i}]", phased) for i, raw in enumerate(_array(body, "items", "", " of objects"))
            )
            return fields | {"items": items, "phases": phases, "spent": _spent(body) if phased else None}
        except SnipError as error:
            raise SnipError(f"{where}: {error}") from None


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Disable cyclic garbage collection while millions of objects without cycles are made. It would double the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _load_object(text: str | bytes, where: str) -> dict[str, Any]:
    """Return the top-level object. Text that does not start with ``{`` is refused before it is parsed."""
    start = text[:4096].lstrip()
    if text and start[:1] not in ("{", b"{"):
        raise SnipError(f"{where}: not a JSON object (it must start with '{{')")
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        body = json.loads(text, object_pairs_hook=_pairs)
    except UnicodeDecodeError as error:
        raise SnipError(f"{where}: not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise SnipError(f"{where}: not JSON: {error}") from None
    except RecursionError:
        raise SnipError(f"{where}: not a problem: nested too deeply") from None
    except (ValueError, SnipError) as error:
        raise SnipError(f"{where}: {error}") from None
    if not isinstance(body, dict):
        raise SnipError(f"{where}: not a problem: schema, budget and items are missing")
    return body


def _pairs(pairs: list[tuple[str, Any]]) -> Any:
    """Return an object as a dict, and a complete choice as a tuple, because a million dicts would not fit in memory."""
    if len(pairs) == 3 and pairs[0][0] == "format" and pairs[1][0] == "loss" and pairs[2][0] == "saving":
        return (pairs[0][1], pairs[1][1], pairs[2][1])
    body = dict(pairs)
    if len(body) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise SnipError(f"not a problem: the key {quoted(twice)} stands twice in one object")
    return body


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
    value = _number(raw[key], f"budget.{key}")
    try:
        budget = Budget(_KINDS[key], value)
    except SnipError as error:
        raise SnipError(f"budget.{key}: {error}, got {value}") from None
    tolerance = _field(raw, "stage_tolerance", "budget.") if key == "target" else raw.get("stage_tolerance")
    fixed = raw.get("fixed_cost", {})
    if not isinstance(fixed, dict):
        raise SnipError("budget.fixed_cost: must be an object of <stage>: cost")
    return {
        "budget": budget,
        "stage_tolerance": None if tolerance is None else _number(tolerance, "budget.stage_tolerance"),
        "fixed_cost": tuple((_stage(k), _number(cost, f"budget.fixed_cost.{k}")) for k, cost in fixed.items()),
    }


def _stage(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 8):
        raise SnipError(f"budget.fixed_cost: {quoted(text)} is not a stage number")
    return int(text)


def _phase(raw: Any, path: str) -> Phase:
    target = _object(raw, path).get("target")
    steps = _whole(_field(raw, "steps", f"{path}."), f"{path}.steps")
    return Phase(steps, None if target is None else _number(target, f"{path}.target"))


def _spent(body: dict[str, Any]) -> Spent | None:
    if body.get("spent") is None:
        return None
    raw = _object(body["spent"], "spent")
    steps = _whole(_field(raw, "steps", "spent."), "spent.steps")
    return Spent(steps, _number(_field(raw, "achieved", "spent."), "spent.achieved"))


def _item(raw: Any, path: str, phased: bool) -> Item:
    prefix = path + "."
    choices = _array(_object(raw, path), "choices", prefix, " of objects")
    id_, stage = _field(raw, "id", prefix), _field(raw, "stage", prefix)
    if not isinstance(id_, str):
        raise SnipError(f"{path}.id: must be a non-empty string")
    if isinstance(stage, bool) or not isinstance(stage, int):
        raise SnipError(f"{path}.stage: must be a stage number, got {quoted(stage)}")
    cost = _number(_field(raw, "cost", prefix), f"{path}.cost")
    if raw.get("group") is not None:
        raise SnipError(f"{path}.group: items no longer share formats; leave it out, or pin the items")
    pin = None if raw.get("pin") is None else _format(raw["pin"], f"{path}.pin")
    parsed = tuple([_choice(c, f"{path}.choices[{j}]", phased) for j, c in enumerate(choices)])
    keeps = _array(raw, "keeps", prefix) if phased and raw.get("keeps") is not None else []
    return Item(id_, stage, cost, parsed, pin, tuple([_whole(p, f"{path}.keeps[{j}]") for j, p in enumerate(keeps)]))


def _choice(raw: Any, path: str, phased: bool) -> Choice:
    if isinstance(raw, tuple):  # a complete choice of snip.problem/1, see _pairs
        raw = dict(zip(("format", "loss", "saving"), raw, strict=True)) if phased else raw
    elif not phased:
        raw = tuple(_field(_object(raw, path), key, path + ".") for key in ("format", "loss", "saving"))
    losses: tuple[float, ...]
    if not phased:
        name, loss, saving = raw
        losses = (_number(loss, f"{path}.loss"),)
    else:
        name, saving = (_field(_object(raw, path), key, path + ".") for key in ("format", "saving"))
        losses = tuple([_number(x, f"{path}.losses[{p}]") for p, x in enumerate(_array(raw, "losses", path + "."))])
    return Choice(_format(name, f"{path}.format"), losses, _number(saving, f"{path}.saving"))


def _format(name: Any, path: str) -> Format:
    fmt = _FORMATS.get(name) if isinstance(name, str) else None
    if fmt is None:
        raise SnipError(f"{path}: unknown format {quoted(name)} (known: {', '.join(_FORMATS)})")
    return fmt


def _field(body: dict[str, Any], key: str, prefix: str) -> Any:
    """Return the value of a required key."""
    value = body.get(key, _MISSING)
    if value is _MISSING:
        raise SnipError(f"{prefix}{key}: missing")
    return value


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SnipError(f"{path}: must be an object")
    return value


def _array(body: dict[str, Any], key: str, prefix: str, of: str = "") -> list[Any]:
    value = _field(body, key, prefix)
    if not isinstance(value, list):
        raise SnipError(f"{prefix}{key}: must be an array{of}")
    return value


def _number(value: Any, path: str) -> float:
    """Return a number as float64. NaN and Infinity are refused with their range, by Problem."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SnipError(f"{path}: must be a number, got {quoted(value)}")
    try:
        return float(value)
    except OverflowError:
        raise SnipError(f"{path}: must be a finite number") from None


def _whole(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SnipError(f"{path}: must be a whole number")
    return value
