"""Fields of a configuration as arguments of a command line.

The option ``x_y`` is the argument ``--snip-x-y``. A setting has none: ``--snip-settings NAME=VALUE`` sets it.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from snip_megatron.precision import Format
from snip_megatron.precision.errors import SnipError, cut, did_you_mean, located
from snip_megatron.precision.phases import AUTO, Schedule
from snip_megatron.precision.strict_json import check_schema, mapping, read_file, read_object
from snip_megatron.runtime.run_data import CONFIG, RUN_SCHEMA

LISTS = ("formats",)  # comma separated; the other tuples are arguments that may be repeated


def option(default: Any, text: str, *, names: Iterable[str] | None = None, **limits: Any) -> Any:
    """Return a dataclass field that is an option. A bool makes a flag, and a tuple a list.

    Args:
        default: The default.
        text: The help text.
        names: The valid values, if the help does not list them.
        limits: Arguments of :func:`setting`, ``metavar`` of ``add_argument``, and ``shown``, the default in the help.
    """
    argument = {name: limits.pop(name) for name in ("metavar", "shown") if name in limits}
    field = setting(default, text, **(limits if names is None else limits | {"choices": tuple(names)}))
    field.metadata = {**field.metadata, "argument": argument, "listed": names is None}
    return field


def setting(
    default: Any,
    text: str,
    *,
    choices: Iterable[str] | None = None,
    least: float | None = None,
    most: float | None = None,
    positive: bool = False,
) -> Any:
    """Return a dataclass field that is a setting.

    Its value is one of ``choices``, or a number in [``least``, ``most``] that is above 0 with ``positive``.
    """
    limits = {"help": text, "choices": choices, "least": least, "most": most, "positive": positive}
    return dataclasses.field(default=default, metadata=limits)


def is_option(field: dataclasses.Field[Any]) -> bool:
    return "argument" in field.metadata


def flag(field: dataclasses.Field[Any]) -> str:
    """Return the text that precedes a field's value on the command line."""
    if is_option(field):
        return f"--snip-{field.name.replace('_', '-')} "
    return f"--snip-settings {field.name}="


def check_option(field: dataclasses.Field[Any], value: Any) -> None:
    """Raise SnipError if ``value`` is not one of the field's choices, or out of its range. None is valid."""
    limits = field.metadata
    if value is None:
        return
    if limits["choices"] is not None and value not in limits["choices"]:
        raise SnipError(f"{flag(field)}{cut(value)}: unknown; choose one of {', '.join(limits['choices'])}")
    least, most = limits["least"], limits["most"]
    if limits["positive"] and not (math.isfinite(value) and value > 0):
        raise SnipError(f"{flag(field)}{value}: must be positive")
    if least is not None and not (math.isfinite(value) and value >= least):
        bound = f"at least {least}" if isinstance(value, int) else f"a finite number, {least} or more"
        raise SnipError(f"{flag(field)}{value}: must be {bound}")
    if most is not None and not value <= most:
        raise SnipError(f"{flag(field)}{value}: must be at most {most}")


def add_options(
    group: Any, configuration: Any, *, prefix: str = "--snip-", only: Sequence[str] | None = None, default: str = ""
) -> None:
    """Add one argument for each option of a dataclass, or for those of ``only``, to an argparse group.

    Names begin with ``prefix``. The help names ``default`` as the default, or the field's own if that is empty.
    """
    for f in dataclasses.fields(configuration):
        if not is_option(f) or (only is not None and f.name not in only):
            continue
        argument, choices = f.metadata["argument"], f.metadata["choices"] if f.metadata["listed"] else None
        name = f"{prefix}{f.name.replace('_', '-')}"
        dest = name.removeprefix("--").replace("-", "_")
        kwargs: dict[str, Any] = {"help": f.metadata["help"], "dest": dest, "default": None}
        if choices:
            kwargs["help"] += f" ({', '.join(choices)})"
        if isinstance(f.default, bool):
            kwargs |= {"action": "store_true", "default": False}
        elif isinstance(f.default, tuple) and f.name not in LISTS:
            kwargs |= {"action": "append", "metavar": argument.get("metavar", "GLOB=FORMAT")}
        else:
            kind = type(f.default) if isinstance(f.default, (int, float)) else str
            metavar = argument.get("metavar", "NAME" if f.metadata["choices"] else "N" if kind is int else "X")
            kwargs |= {"type": kind, "metavar": metavar}
        shown = default or argument.get("shown") or (",".join(f.default) if isinstance(f.default, tuple) else f.default)
        if shown not in (None, "") and not isinstance(shown, bool):
            kwargs["help"] += f"; default: {shown}"
        group.add_argument(name, **kwargs)


def add_settings(group: Any) -> None:
    """Add ``--snip-config`` and ``--snip-settings``, which set any field of the configuration."""
    text = "YAML or JSON file of options by the names of their fields, or a run directory or its config.json, whose"
    text += " options are taken; an argument on the command line wins"
    group.add_argument("--snip-config", metavar="FILE", help=text)
    text = "value of a setting that has no argument of its own (docs/arguments.md), or a JSON object of several"
    group.add_argument("--snip-settings", action="append", metavar="NAME=VALUE", help=f"{text}; repeatable")


def given_options(
    args: argparse.Namespace, configuration: Any, prefix: str = "snip_", only: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the fields that the user has set by arguments of :func:`add_options` and :func:`add_settings`.

    An argument takes precedence over a setting, and both over the file of ``--snip-config``. The names of these
    arguments in ``args`` begin with ``prefix``. ``only`` is that of :func:`add_options`.
    """
    file = getattr(args, "snip_config", None)
    values = {} if file is None else _read_options(Path(file), configuration)
    for text in getattr(args, "snip_settings", None) or ():
        values |= _settings(text, configuration)
    for f in dataclasses.fields(configuration):
        value = getattr(args, f"{prefix}{f.name}", None)
        if is_option(f) and (only is None or f.name in only) and value is not None and value is not False:
            words = filter(None, value.split(",")) if f.name in LISTS else value
            values[f.name] = tuple(words) if isinstance(f.default, tuple) else value
    return values


def _read_options(path: Path, configuration: Any) -> dict[str, Any]:
    """Return the options of a ``--snip-config`` file: a flat object of them, or a run's ``config.json``."""
    if path.is_dir():
        path /= CONFIG
    where = f"--snip-config {path}"
    content = read_file(path, where)
    with located(where):
        body = read_object(content) if path.suffix == ".json" else _yaml_object(content)
        if "schema" in body:
            check_schema(body, RUN_SCHEMA)
            stored = dict(mapping(body.get("config"), "config"))
            # The length of a run decides its first update, if the user left it open.
            if mapping(body.get("facts", {}), "facts").get("first_update") != stored.get("first_update"):
                stored.pop("first_update", None)
            names = [f.name for f in dataclasses.fields(configuration)[1:]]  # a run also stores sizes of its model
            body = {name: stored[name] for name in names if stored.get(name) is not None}
        return _checked_values(body, configuration, "")


def _yaml_object(content: bytes) -> dict[str, Any]:
    try:
        body = yaml.safe_load(content)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SnipError(f"not YAML: {error}") from None
    if not isinstance(body, dict) or not all(isinstance(name, str) for name in body):
        raise SnipError("not an object of options by name")
    return body


def _settings(text: str, configuration: Any) -> dict[str, Any]:
    """Parse a value of ``--snip-settings``, which may set any field of the configuration."""
    name, equals, value = text.partition("=")
    values = _json(text) if text.startswith("{") else {name: _json(value)} if equals else None
    if not isinstance(values, dict):
        raise SnipError(f"--snip-settings {cut(text)}: expected NAME=VALUE, or a JSON object")
    return _checked_values(values, configuration, "--snip-settings ")


def _checked_values(values: Mapping[str, Any], configuration: Any, where: str) -> dict[str, Any]:
    """Return values of fields as their types. ``where`` begins the SnipError about an unknown name or another type."""
    fields = {f.name: f for f in dataclasses.fields(configuration)[1:]}
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, str) and name in LISTS:
            value = value.split(",")
        checked[name] = value = tuple(value) if isinstance(value, list) else value
        if name not in fields:
            raise SnipError(f"{where}{cut(name)}: unknown{did_you_mean(name, fields)}")
        default = fields[name].default
        kind = type(default) if isinstance(default, (bool, int, float, tuple)) else str
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise SnipError(f"{where}{name}: expected {kind.__name__}, not {cut(value)}")
        if isinstance(value, tuple) and not all(isinstance(item, str) for item in value):
            raise SnipError(f"{where}{name}: expected texts, not {cut(value)}")
    return checked


def _json(text: str) -> Any:
    """Return the value of a JSON text, and any other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


# -- values that are more than a number or a name ----------------------------------------------------------------
def load_schedule(schedule: str, budget: str) -> Schedule | None:
    """Return the phases of ``--snip-schedule``. None if it is ``static``.

    ``schedule`` is ``static``, ``auto``, the name of a ``snip.schedule/1`` file, or the text of one. Raises SnipError
    if the file cannot be read, or a phase has a budget of another kind than ``budget``.
    """
    if schedule in ("static", "auto"):
        return AUTO if schedule == "auto" else None
    path, content = f"--snip-schedule {cut(schedule)}", schedule.encode()
    if not schedule.startswith("{"):
        path = f"--snip-schedule {schedule}"
        try:
            content = Path(schedule).read_bytes()
        except OSError as error:
            reason = f"{error.strerror}); give static, auto or a snip.schedule/1 file"
            raise SnipError(f"{path}: cannot be read ({reason}") from None
    phases = Schedule.from_json(content, where=path)
    for i, phase in enumerate(phases.phases):
        if phase.budget is not None and phase.budget.kind != budget:
            raise SnipError(
                f"{path}: phases[{i}].budget: {phase.budget} cannot be combined with --snip-budget {budget}=: a"
                " phase's budget is of the same kind, fp4= or speedup="
            )
    return phases


def parse_pins(pins: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Parse the values of ``--snip-pin`` to (glob, format) pairs. Raises SnipError if one is not GLOB=FORMAT."""
    pairs = []
    for text in pins:
        glob, equals, fmt = text.rpartition("=")
        if not equals or not glob or fmt not in Format._value2member_map_:
            names = ", ".join(f.value for f in Format)
            raise SnipError(f"--snip-pin {cut(text)}: expected GLOB=FORMAT with FORMAT one of {names}")
        pairs.append((glob, fmt))
    return tuple(pairs)


def parse_tolerance(text: str) -> float | None:
    """Parse the value of ``--snip-stage-tolerance``, a share. None if it is ``none``. Raises SnipError."""
    if text.lower() == "none":
        return None
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise SnipError(f"--snip-stage-tolerance {cut(text)}: the share must be a number between 0 and 1")
    return share
