"""Reads ``snip.problem/1``. Every error names the file, the JSON path and what is wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from snip_megatron.errors import SnipError, cut, quoted
from snip_megatron.precision import Format
from snip_megatron.solver.collector import collector_paused
from snip_megatron.solver.items import KINDS, Budget, Choice, Item

_CHOICE_FIELDS = ("format", "loss", "saving")
_FORMATS = {f.value: f for f in Format}
_MISSING = object()


def parse_problem(
    text: str | bytes, where: str, schema: str, others: Sequence[str] = ()
) -> tuple[Budget, tuple[Item, ...]]:
    """Parse the budget and the items of a problem.

    Args:
        text: the problem.
        where: names the file in errors.
        schema: the schema of the problem.
        others: schemas that the caller takes as well. The error about another schema names them.

    Raises:
        SnipError: "<where>: <JSON path>: <what is wrong>".
    """
    with collector_paused():
        return _parse(load_object(text, where), where, schema, others)


def _parse(body: dict[str, Any], where: str, schema: str, others: Sequence[str]) -> tuple[Budget, tuple[Item, ...]]:
    try:
        if field_of(body, "schema", "") != schema:
            raise SnipError(f"schema: must be {' or '.join(f'"{name}"' for name in (schema, *others))}")
        budget = parse_budget(object_of(body, "budget", ""))
        raw = field_of(body, "items", "")
        if not isinstance(raw, list):
            raise SnipError("items: must be an array of objects")
        return budget, tuple(_parse_item(item, f"items[{i}]") for i, item in enumerate(raw))
    except SnipError as error:
        raise SnipError(f"{where}: {error}") from None


def load_object(text: str | bytes, where: str) -> dict[str, Any]:
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


def parse_budget(raw: dict[str, Any]) -> Budget:
    """Return the budget of a problem."""
    known = (*KINDS, "stage_tolerance", "fixed_cost")
    for key in raw:
        if key not in known:
            raise SnipError(f"budget.{cut(key)}: unknown field (known: {', '.join(known)})")
    if not any(kind in raw for kind in KINDS):
        raise SnipError("budget.target: missing")
    wanted = {kind: parse_number(raw[kind], f"budget.{kind}") for kind in KINDS if kind in raw}
    tolerance = field_of(raw, "stage_tolerance", "budget.") if "target" in raw else raw.get("stage_tolerance")
    fixed = raw.get("fixed_cost", {})
    if not isinstance(fixed, dict):
        raise SnipError("budget.fixed_cost: must be an object of <stage>: cost")
    return Budget(
        stage_tolerance=None if tolerance is None else parse_number(tolerance, "budget.stage_tolerance"),
        fixed_cost=tuple((_stage(key), parse_number(cost, f"budget.fixed_cost.{key}")) for key, cost in fixed.items()),
        **wanted,
    )


def _stage(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 8):
        raise SnipError(f"budget.fixed_cost: {quoted(text)} is not a stage number")
    return int(text)


def _parse_item(raw: Any, path: str) -> Item:
    if not isinstance(raw, dict):
        raise SnipError(f"{path}: must be an object")
    prefix = path + "."
    choices = field_of(raw, "choices", prefix)
    id_, stage, cost, group, pin = parse_identity(raw, path)
    if not isinstance(choices, list):
        raise SnipError(f"{path}.choices: must be an array of objects")
    parsed = tuple([_parse_choice(c, f"{path}.choices[{j}]") for j, c in enumerate(choices)])
    return Item(id_, stage, cost, parsed, group, pin)


def parse_identity(raw: dict[str, Any], path: str) -> tuple[str, int, float, str | None, Format | None]:
    """Return the id, stage, cost, group and pin of an item."""
    prefix = path + "."
    id_, stage = field_of(raw, "id", prefix), field_of(raw, "stage", prefix)
    if not isinstance(id_, str):
        raise SnipError(f"{path}.id: must be a non-empty string")
    if isinstance(stage, bool) or not isinstance(stage, int):
        raise SnipError(f"{path}.stage: must be a stage number, got {quoted(stage)}")
    cost = parse_number(field_of(raw, "cost", prefix), f"{path}.cost")
    group, pin = raw.get("group"), raw.get("pin")
    if group is not None and not isinstance(group, str):
        raise SnipError(f"{path}.group: must be a non-empty string or absent")
    return id_, stage, cost, group, None if pin is None else parse_format(pin, f"{path}.pin")


def _parse_choice(raw: Any, path: str) -> Choice:
    if isinstance(raw, dict):
        prefix = path + "."
        raw = tuple(field_of(raw, key, prefix) for key in _CHOICE_FIELDS)
    elif not isinstance(raw, tuple):
        raise SnipError(f"{path}: must be an object")
    name, loss, saving = raw
    return Choice(
        parse_format(name, f"{path}.format"),
        loss if type(loss) is float else parse_number(loss, f"{path}.loss"),
        saving if type(saving) is float else parse_number(saving, f"{path}.saving"),
    )


def parse_format(name: Any, path: str) -> Format:
    """Return the format with this name."""
    fmt = _FORMATS.get(name) if isinstance(name, str) else None
    if fmt is None:
        raise SnipError(f"{path}: unknown format {quoted(name)} (known: {', '.join(_FORMATS)})")
    return fmt


def field_of(body: dict[str, Any], key: str, prefix: str) -> Any:
    """Return the value of a required key."""
    value = body.get(key, _MISSING)
    if value is _MISSING:
        raise SnipError(f"{prefix}{key}: missing")
    return value


def object_of(body: dict[str, Any], key: str, prefix: str) -> dict[str, Any]:
    """Return the object under a required key."""
    value = field_of(body, key, prefix)
    if not isinstance(value, dict):
        raise SnipError(f"{prefix}{key}: must be an object")
    return value


def parse_number(value: Any, path: str) -> float:
    """Return a number as float64."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SnipError(f"{path}: must be a number, got {quoted(value)}")
    try:
        return float(value)  # NaN and Infinity are refused with their range, by Problem
    except OverflowError:
        raise SnipError(f"{path}: must be a finite number") from None
