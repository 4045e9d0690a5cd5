"""Reading ``snip.problem/2``: every refusal names the file, the JSON path and what is wrong."""

from __future__ import annotations

from typing import Any

from snip_megatron.errors import SnipError
from snip_megatron.solver.collector import collector_paused
from snip_megatron.solver.items import Budget
from snip_megatron.solver.parse import (
    field_of,
    load_object,
    object_of,
    parse_budget,
    parse_format,
    parse_identity,
    parse_number,
)
from snip_megatron.solver.phased.parts import Phase, PhasedChoice, PhasedItem, Spent

Parts = tuple[Budget, tuple[Phase, ...], tuple[PhasedItem, ...], Spent | None]


def parse_phased(text: str | bytes, where: str, schema: str) -> Parts:
    """Parse the parts of a phased problem. Raises SnipError("<where>: <JSON path>: <what is wrong>")."""
    with collector_paused():
        body = load_object(text, where)
        try:
            if field_of(body, "schema", "") != schema:
                raise SnipError(f'schema: must be "{schema}"')
            budget = parse_budget(object_of(body, "budget", ""))
            phases = tuple(_phase(raw, f"phases[{p}]") for p, raw in enumerate(_array(body, "phases", "")))
            items = tuple(_item(raw, f"items[{i}]") for i, raw in enumerate(_array(body, "items", "")))
            return budget, phases, items, _spent(body)
        except SnipError as error:
            raise SnipError(f"{where}: {error}") from None


def _array(body: dict[str, Any], key: str, prefix: str) -> list[Any]:
    value = field_of(body, key, prefix)
    if not isinstance(value, list):
        raise SnipError(f"{prefix}{key}: must be an array")
    return value


def _phase(raw: Any, path: str) -> Phase:
    if not isinstance(raw, dict):
        raise SnipError(f"{path}: must be an object")
    target = raw.get("target")
    steps = _whole(field_of(raw, "steps", f"{path}."), f"{path}.steps")
    return Phase(steps, None if target is None else parse_number(target, f"{path}.target"))


def _spent(body: dict[str, Any]) -> Spent | None:
    if body.get("spent") is None:
        return None
    raw = object_of(body, "spent", "")
    steps = _whole(field_of(raw, "steps", "spent."), "spent.steps")
    return Spent(steps, parse_number(field_of(raw, "achieved", "spent."), "spent.achieved"))


def _item(raw: Any, path: str) -> PhasedItem:
    if not isinstance(raw, dict):
        raise SnipError(f"{path}: must be an object")
    id_, stage, cost, group, pin = parse_identity(raw, path)
    choices = _array(raw, "choices", f"{path}.")
    keeps = _array(raw, "keeps", f"{path}.") if raw.get("keeps") is not None else []
    return PhasedItem(
        id_,
        stage,
        cost,
        tuple([_choice(choice, f"{path}.choices[{j}]") for j, choice in enumerate(choices)]),
        group,
        pin,
        tuple([_whole(p, f"{path}.keeps[{j}]") for j, p in enumerate(keeps)]),
    )


def _choice(raw: Any, path: str) -> PhasedChoice:
    if isinstance(raw, tuple):  # a complete choice of snip.problem/1, see parse.py
        raise SnipError(f"{path}.losses: missing")
    if not isinstance(raw, dict):
        raise SnipError(f"{path}: must be an object")
    prefix = f"{path}."
    losses = _array(raw, "losses", prefix)
    return PhasedChoice(
        parse_format(field_of(raw, "format", prefix), f"{path}.format"),
        parse_number(field_of(raw, "saving", prefix), f"{path}.saving"),
        tuple([parse_number(loss, f"{path}.losses[{p}]") for p, loss in enumerate(losses)]),
    )


def _whole(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SnipError(f"{path}: must be a whole number")
    return value
