"""The file format ``snip.timings/1``: measured seconds of GEMMs and quantisations on one device.

``snip calibrate`` writes it. All times are seconds of one call on one GPU. A table may hold any set of shapes.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from snip_megatron.precision import Format, strict_json
from snip_megatron.precision.errors import SnipError, cut, located, quoted

TIMINGS_SCHEMA = "snip.timings/1"
MIN_SECONDS, MAX_SECONDS = 1e-12, 1e4
MAX_EDGE = 2**40
OPERANDS = ("input", "gradient")
_ONE_TIME = ("fused_input", "fused_gradient", "weights")
STOCK = "stock"
_KEYS = {
    "gemms": ("tokens", "n", "k"),
    "activations": ("tokens", "features"),
    "weights": ("n", "k"),
    "grouped": ("experts", "tokens", "n", "k"),
    "attention": ("sequence", "heads", "head_size"),
}
_ABOUT = ("date", "commit", "command", "versions", "rounds", "complete", "notes")

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class TimingTable:
    """The measurements of one device."""

    device: str
    backend: str  # the GEMM backend (``--snip-gemm``)
    formats: tuple[Format, ...]  # bf16 and the measured formats. Every row has all of them
    # (tokens, n, k) → format → seconds of fprop, dgrad and wgrad, with quantised operands
    gemms: Mapping[tuple[int, ...], Mapping[Format, Triple]]
    # (tokens, features) → operand → format → three times: seconds of quantising for the operand's first GEMM only, for
    # wgrad only, and for both in one call. The operand is ``input`` or ``gradient``, which is rounded stochastically in
    # 4 bits
    activations: Mapping[tuple[int, ...], Mapping[str, Mapping[Format, Triple]]]
    # (n, k) → format → seconds of quantising for fprop and dgrad in one call
    weights: Mapping[tuple[int, ...], Mapping[Format, float]]
    # (experts, tokens of all experts, n, k) → times of a linear of all experts: ``gemms``, ``input``, ``gradient`` and
    # ``weights`` → format → what the mappings of these names have of a linear; ``fused_input``, ``fused_gradient`` →
    # format → seconds that quantising for fprop adds to SwiGLU, for dgrad to its gradient; ``stock``, of a training's
    # own table, → bf16 → seconds of Megatron's own linear, forward and backward
    grouped: Mapping[tuple[int, ...], Mapping[str, Mapping[Format, Any]]] = field(default_factory=dict)
    # (sequence, heads, head size) → seconds of causal attention of one sequence, forward and backward
    attention: Mapping[tuple[int, ...], tuple[float, float]] = field(default_factory=dict)
    copy_rate: float | None = None  # bytes read and written a second by a device-to-device copy. None if not measured
    memory: float | None = None  # bytes of the GPU's memory. None if not known
    # date, commit, command, versions and other facts about the measurement
    about: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> TimingTable:
        """Read a file. Raises SnipError with the file, the JSON path and what is wrong."""
        return cls.from_json(strict_json.read_file(path), where=str(path))

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "timings") -> TimingTable:
        """Parse and validate a text. Raises SnipError("<where>: <JSON path>: <what is wrong>")."""
        with located(where):
            return _table(strict_json.read_object(text))

    def to_json(self) -> str:
        """Return the text of a file, with rows sorted by size."""
        lists = {
            name: [
                dict(zip(keys, size, strict=True)) | _written(_PARTS[name](row))
                for size, row in sorted(getattr(self, name).items())
            ]
            for name, keys in _KEYS.items()
        }
        body: dict[str, Any] = {
            "schema": TIMINGS_SCHEMA,
            "device": self.device,
            "backend": self.backend,
            **{key: self.about[key] for key in _ABOUT if key in self.about},
            "formats": [fmt.value for fmt in self.formats],
            "copy_rate": self.copy_rate,
            **({} if self.memory is None else {"memory": self.memory}),
        }
        parts = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in body.items()]
        for key, rows in lists.items():  # one row a line is readable and gives small diffs
            lines = ",".join("\n  " + json.dumps(row, allow_nan=False) for row in rows)
            parts.append(f"{json.dumps(key)}: [{lines}\n ]")
        return "{\n " + ",\n ".join(parts) + "\n}\n"


_PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "gemms": lambda row: {"seconds": row},
    "activations": lambda row: {operand: row[operand] for operand in OPERANDS},
    "weights": lambda row: {"seconds": row},
    "grouped": lambda row: {part: row[part] for part in ("gemms", *OPERANDS, *_ONE_TIME, STOCK) if part in row},
    "attention": lambda row: {"forward": row[0], "backward": row[1]},
}
"""List of a file → the fields of its rows beside their sizes."""


def _written(parts: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {fmt.value: seconds for fmt, seconds in part.items()} if isinstance(part, Mapping) else part
        for name, part in parts.items()
    }


# -- parsing -------------------------------------------------------------------------------------------------------
def _table(body: dict[str, Any]) -> TimingTable:
    strict_json.check_schema(body, TIMINGS_SCHEMA)
    names = strict_json.array(body.get("formats"), "formats")
    formats = tuple(Format(strict_json.one_of(name, f"formats[{i}]", Format)) for i, name in enumerate(names))
    if len(set(formats)) != len(formats) or Format.BF16 not in formats:
        raise SnipError("formats: must name bf16, and each format once")
    quantised = tuple(fmt for fmt in formats if fmt is not Format.BF16)
    gemms, stock = partial(_by_format, formats, _triple), partial(_by_format, (Format.BF16,), _seconds)
    triples, ones = partial(_by_format, quantised, _triple), partial(_by_format, quantised, _seconds)
    operands = dict.fromkeys(OPERANDS, triples)
    grouped: dict[str, Callable[[Any, str], Any]] = {"gemms": gemms, **operands, **dict.fromkeys(_ONE_TIME, ones)}
    grouped[STOCK] = stock
    attention = _rows(body, "attention", {"forward": _seconds, "backward": _seconds})
    numbers = {name: None if body.get(name) is None else _number(body[name], name, 1, most)
               for name, most in (("copy_rate", 1e20), ("memory", 1e15))}  # fmt: skip
    least = 1 if quantised else 0
    return TimingTable(
        device=_text(body, "device"),
        backend=_text(body, "backend"),
        formats=formats,
        gemms={size: row["seconds"] for size, row in _rows(body, "gemms", {"seconds": gemms}, least=1).items()},
        activations=_rows(body, "activations", operands, least=least),
        weights={size: row["seconds"] for size, row in _rows(body, "weights", {"seconds": ones}, least=least).items()},
        grouped=_rows(body, "grouped", grouped),
        attention={size: (row["forward"], row["backward"]) for size, row in attention.items()},
        **numbers,
        about={key: body[key] for key in _ABOUT if key in body},
    )


def _rows(
    body: dict[str, Any], name: str, readers: Mapping[str, Callable[[Any, str], Any]], *, least: int = 0
) -> dict[tuple[int, ...], dict[str, Any]]:
    """Return the rows of a list by their sizes. ``readers``: field of a row → what reads its value and path."""
    rows: dict[tuple[int, ...], dict[str, Any]] = {}
    for i, raw in enumerate(strict_json.array(body.get(name, []), name)):
        path = f"{name}[{i}]"
        row = strict_json.mapping(raw, path)
        size = tuple(strict_json.whole(row.get(key), f"{path}.{key}", 1, MAX_EDGE + 1) for key in _KEYS[name])
        if size in rows:
            raise SnipError(f"{path}: {' × '.join(map(str, size))} stands twice")
        fields = [part for part in readers if part != STOCK or part in row]
        rows[size] = {part: readers[part](row.get(part), f"{path}.{part}") for part in fields}
    if len(rows) < least:
        raise SnipError(f"{name}: must hold at least one row")
    return rows


def _by_format[Value](
    formats: tuple[Format, ...], read: Callable[[Any, str], Value], raw: Any, path: str
) -> dict[Format, Value]:
    fields = strict_json.mapping(raw, path)
    return {fmt: read(strict_json.field(fields, fmt.value, f"{path}."), f"{path}.{fmt.value}") for fmt in formats}


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise SnipError(f"{name}: must be a non-empty string")
    return value


def _number(raw: Any, path: str, least: float, most: float) -> float:
    if isinstance(raw, bool) or not isinstance(raw, (int, float)) or not least <= raw <= most:
        raise SnipError(f"{path}: must be a number from {least:g} to {most:g}, got {quoted(raw)}")
    return float(raw)


def _seconds(raw: Any, path: str) -> float:
    return _number(raw, path, MIN_SECONDS, MAX_SECONDS)


def _triple(raw: Any, path: str) -> Triple:
    if len(strict_json.array(raw, path)) != 3:
        raise SnipError(f"{path}: must be an array of three times in seconds")
    first, second, third = (_seconds(value, f"{path}[{i}]") for i, value in enumerate(raw))
    return first, second, third


TIMINGS = Path(__file__).with_name("tables")
"""Folder of the package's tables of measured times, one file ``<name>.json`` for each device."""

_RELATIVES = {"h100": "h100", "h200": "h200", "gh200": "h200"}
"""First word of a GPU's name → the package's table of the nearest card: of NVL, PCIe and Grace Hopper variants too."""


class NoTableError(SnipError):
    """The package has no table of times of this device."""


def load_table(name_or_path: str | Path, device_name: str | None = None) -> TimingTable:
    """Load a table of times: that of the package of a name such as ``h200``, or of a GPU such as ``NVIDIA H100 NVL`` or
    ``h100-nvl``; or the ``snip.timings/1`` file of a path, which ``snip calibrate`` writes.

    A GPU without a table takes that of its nearest relative, with a warning. A table of another device than
    ``device_name``, a GPU's name in torch, is refused, unless they are relatives. Raises NoTableError if the package
    has no table of this GPU, SnipError if there is no such file or a bad one.
    """
    name, device = str(name_or_path), device_name
    packaged = {path.stem: path for path in sorted(TIMINGS.glob("*.json"))}
    if name in packaged:
        path = packaged[name]
    elif _nearest(name) is not None and not os.path.lexists(name):
        path, device = packaged_table(name), device_name or name
    else:
        path = Path(name)
        if not os.path.lexists(path):
            raise SnipError(f"{cut(name)}: neither a file of timings nor one of {', '.join(['flops', *packaged])}")
    table = TimingTable.load(path)
    if device is not None and device != table.device:
        if _nearest(device) is None or _nearest(device) != _nearest(table.device):
            raise SnipError(
                f"the timings of {name} were measured on {table.device}, this is {device}:"
                " measure it with snip calibrate --out FILE.json and name that file, or use flops"
            )
        _warn(device, table.device)
    return table


def packaged_table(device_name: str) -> Path:
    """Return the file of the package's table of a GPU or of its nearest relative. Raises NoTableError."""
    path = TIMINGS / f"{_nearest(device_name)}.json"
    if not path.exists():
        raise NoTableError(
            f"there is no table of timings of {device_name}: measure one with snip calibrate --out FILE.json"
            " and name that file, or use flops"
        )
    return path


def _nearest(device_name: str) -> str | None:
    """Return the name of the table of the GPU's nearest relative, which need not exist, or None."""
    words = re.fullmatch(r"(?:nvidia )?(\w+)(?:[ -][\w -]*)?", device_name.lower())
    return None if words is None else _RELATIVES.get(words[1])


@functools.cache
def _warn(device_name: str, measured: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(
            f"snip: warning: the times are those of {measured}, the nearest relative of {device_name}; snip calibrate"
            " measures this card",
            file=sys.stderr,
            flush=True,
        )
