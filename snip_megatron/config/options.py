"""Options: fields of a configuration that are command line arguments too. Field ``x_y`` is ``--snip-x-y``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from typing import Any

from snip_megatron.errors import SnipError, cut

LISTS = ("formats", "protect")  # comma separated; the other tuples are arguments that may be repeated


def option(default: Any, text: str, *, least: int | None = None, positive: bool = False, **argument: Any) -> Any:
    """Make a dataclass field that is an option.

    Args:
        default: the default value. A bool makes a flag, a tuple a list.
        text: the help.
        least: the smallest valid number; None for any.
        positive: whether only numbers above 0 are valid.
        argument: keyword arguments of ``add_argument``. ``choices`` are checked by :func:`check_option` instead of
            argparse, so that an error is one line.
    """
    metadata = {"help": text, "least": least, "positive": positive, "argument": argument}
    return dataclasses.field(default=default, metadata=metadata)


def options_of(configuration: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields of a dataclass that are options."""
    return [f for f in dataclasses.fields(configuration) if "help" in f.metadata]


def flag(name: str) -> str:
    """Return the argument of a field."""
    return f"--snip-{name.replace('_', '-')}"


# -- values ------------------------------------------------------------------------------------------------------------
def check_option(field: dataclasses.Field[Any], value: Any) -> None:
    """Raise SnipError if ``value`` is none of the option's choices, or out of its range. None is valid."""
    if value is None:
        return
    choices = field.metadata["argument"].get("choices")
    if choices is not None:
        check_choice(field.name, value, choices)
    why = _range_fault(value, field.metadata["least"], field.metadata["positive"])
    if why is not None:
        raise SnipError(f"{flag(field.name)} {value}: must be {why}")


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raise SnipError if the option ``name`` has a value that is none of ``choices``."""
    if value not in choices:
        raise SnipError(f"{flag(name)} {cut(value)}: unknown; choose one of {', '.join(choices)}")


def _range_fault(value: Any, least: int | None, positive: bool) -> str | None:
    if positive and not (math.isfinite(value) and value > 0):
        return "positive"
    if least is not None and not (math.isfinite(value) and value >= least):
        return f"at least {least}" if isinstance(value, int) else f"a finite number, {least} or more"
    return None


# -- the command line --------------------------------------------------------------------------------------------------
def add_options(group: Any, configuration: Any) -> None:
    """Add one argument for each option of a dataclass to an argparse group."""
    for f in options_of(configuration):
        kwargs: dict[str, Any] = {"help": f.metadata["help"], "dest": f"snip_{f.name}", "default": None}
        argument = f.metadata["argument"]
        choices = argument.get("choices")
        if choices:
            kwargs["help"] += f" ({', '.join(choices)})"
        if isinstance(f.default, bool):
            kwargs |= {"action": "store_true", "default": False}
        elif isinstance(f.default, tuple) and f.name not in LISTS:
            kwargs |= {"action": "append", "metavar": argument.get("metavar", "GLOB=FORMAT")}
        else:
            metavar = argument.get("metavar", "NAME" if choices else "X")
            kwargs |= {"type": argument.get("type", str), "metavar": metavar}
            if f.default is not None:
                kwargs["help"] += f"; default: {','.join(f.default) if isinstance(f.default, tuple) else f.default}"
        group.add_argument(flag(f.name), **kwargs)


def given_options(args: argparse.Namespace, configuration: Any) -> dict[str, Any]:
    """Return the values of the options that the arguments of :func:`add_options` set, by field."""
    values: dict[str, Any] = {}
    for f in options_of(configuration):
        value = getattr(args, f"snip_{f.name}", None)
        if value is not None and value is not False:
            values[f.name] = _tuple(f.name, value) if isinstance(f.default, tuple) else value
    return values


def settings(text: str | None, configuration: Any) -> dict[str, Any]:
    """Parse ``--snip-settings``: values of any fields of a dataclass, as a JSON object. Experiment files use it."""
    if text is None:
        return {}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SnipError(f"--snip-settings {cut(text)}: not JSON ({error})") from None
    fields = {f.name: f for f in dataclasses.fields(configuration)}
    if not isinstance(values, dict) or not values.keys() <= fields.keys():
        raise SnipError(f"--snip-settings {cut(text)}: expected an object of fields of the configuration")
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    for name, value in (values | lists).items():
        default = fields[name].default
        wanted = type(default) if isinstance(default, (bool, int, float, str, tuple)) else None
        if wanted is not None and type(value) is not wanted and not (wanted is float and type(value) is int):
            raise SnipError(f"--snip-settings: {name}: expected {wanted.__name__}, not {cut(json.dumps(value))}")
    return values | lists


def _tuple(name: str, value: Any) -> tuple[str, ...]:
    return tuple(part for part in value.split(",") if part) if name in LISTS else tuple(value)
