"""The file format ``snip.timings/1``: measured seconds of GEMMs and quantisations on one device.

``snip calibrate`` writes it. All times are seconds of one call on one GPU. A table may hold any set of shapes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snip_megatron.errors import SnipError, quoted
from snip_megatron.precision import Format
from snip_megatron.timing.collectives import COLLECTIVES, DTYPES, Exchange

TIMINGS_SCHEMA = "snip.timings/1"
MIN_SECONDS, MAX_SECONDS = 1e-12, 1e4
MAX_EDGE = 2**40
MAX_BYTES = 64 << 20
OPERANDS = ("input", "gradient")
_ABOUT = ("date", "commit", "command", "versions", "rounds", "complete", "notes")

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class TimingTable:
    """The measurements of one device.

    Attributes:
        device: the GPU's name in torch.
        backend: the GEMM backend (``--snip-gemm``).
        formats: bf16 and the measured formats. Every row has all of them.
        gemms: (tokens, n, k) → format → seconds of fprop, dgrad and wgrad, with quantised operands.
        activations: (tokens, features) → operand → format → three times: seconds of quantising for the operand's first
            GEMM only, for wgrad only, and for both in one call. The operand is ``input`` or ``gradient``, which is
            rounded stochastically in 4 bits.
        weights: (n, k) → format → seconds of quantising for fprop and dgrad in one call.
        attention: (sequence, heads, head size) → seconds of causal attention of one sequence, forward and backward.
        copy_rate: bytes read and written a second by a device-to-device copy; None if not measured.
        memory: bytes of the GPU's memory; None if not known.
        recapture: seconds of capturing CUDA graphs anew, for each captured layer and captured microbatch; None if not
            measured.
        collectives: seconds of a collective over GPUs of one node; empty if not measured.
        about: date, commit, command, versions and other facts about the measurement.
    """

    device: str
    backend: str
    formats: tuple[Format, ...]
    gemms: Mapping[tuple[int, ...], Mapping[Format, Triple]]
    activations: Mapping[tuple[int, ...], Mapping[str, Mapping[Format, Triple]]]
    weights: Mapping[tuple[int, ...], Mapping[Format, float]]
    attention: Mapping[tuple[int, ...], tuple[float, float]] = field(default_factory=dict)
    copy_rate: float | None = None
    memory: float | None = None
    recapture: float | None = None
    collectives: Mapping[Exchange, float] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def quantised(self) -> tuple[Format, ...]:
        """The measured formats without bf16."""
        return tuple(fmt for fmt in self.formats if fmt is not Format.BF16)

    @classmethod
    def load(cls, path: Path) -> TimingTable:
        """Read a file. Raises SnipError with the file, the JSON path and what is wrong."""
        try:
            if path.stat().st_size > MAX_BYTES:
                raise SnipError(f"{path}: not timings: larger than {MAX_BYTES >> 20} MiB")
            content = path.read_bytes()
        except OSError as error:
            raise SnipError(f"{path}: cannot be read: {error.strerror}") from None
        return cls.from_json(content, where=str(path))

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "timings") -> TimingTable:
        """Parse and validate a text. Raises SnipError("<where>: <JSON path>: <what is wrong>")."""
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SnipError(f"{where}: not JSON ({error})") from None
        try:
            return _table(_object(body, "timings"))
        except SnipError as error:
            raise SnipError(f"{where}: {error}") from None

    def to_json(self) -> str:
        """Return the text of a file, with rows sorted by size."""
        gemms: list[dict[str, Any]] = [
            {"tokens": m, "n": n, "k": k, "seconds": _by_name(row)} for (m, n, k), row in sorted(self.gemms.items())
        ]
        activations = [
            {"tokens": m, "features": f, **{operand: _by_name(row[operand]) for operand in OPERANDS}}
            for (m, f), row in sorted(self.activations.items())
        ]
        weights = [{"n": n, "k": k, "seconds": _by_name(row)} for (n, k), row in sorted(self.weights.items())]
        attention = [
            {"sequence": s, "heads": h, "head_size": d, "forward": forward, "backward": backward}
            for (s, h, d), (forward, backward) in sorted(self.attention.items())
        ]
        body: dict[str, Any] = {
            "schema": TIMINGS_SCHEMA,
            "device": self.device,
            "backend": self.backend,
            **{key: self.about[key] for key in _ABOUT if key in self.about},
            "formats": [fmt.value for fmt in self.formats],
            "copy_rate": self.copy_rate,
        }
        if self.memory is not None:
            body["memory"] = self.memory
        if self.recapture is not None:
            body["recapture"] = self.recapture
        lists: dict[str, list[dict[str, Any]]] = {
            "gemms": gemms,
            "activations": activations,
            "weights": weights,
            "attention": attention,
        }
        if self.collectives:
            lists["collectives"] = [key._asdict() | {"seconds": s} for key, s in sorted(self.collectives.items())]
        parts = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in body.items()]
        parts += [f"{json.dumps(key)}: {_lines(rows)}" for key, rows in lists.items()]
        return "{\n " + ",\n ".join(parts) + "\n}\n"


def _by_name(row: Mapping[Format, Any]) -> dict[str, Any]:
    return {fmt.value: value for fmt, value in row.items()}


def _lines(rows: list[dict[str, Any]]) -> str:
    """Return a JSON array with one row a line, which is readable and gives small diffs."""
    return "[" + ",".join("\n  " + json.dumps(row, allow_nan=False) for row in rows) + "\n ]"


# -- parsing -------------------------------------------------------------------------------------------------------
def _table(body: dict[str, Any]) -> TimingTable:
    if body.get("schema") != TIMINGS_SCHEMA:
        raise SnipError(f'schema: must be "{TIMINGS_SCHEMA}"')
    formats = _formats(body.get("formats"))
    quantised = tuple(fmt for fmt in formats if fmt is not Format.BF16)

    def gemm(row: dict[str, Any], path: str) -> dict[Format, Triple]:
        return _by_format(row.get("seconds"), formats, _triple, f"{path}.seconds")

    def activation(row: dict[str, Any], path: str) -> dict[str, dict[Format, Triple]]:
        return {name: _by_format(row.get(name), quantised, _triple, f"{path}.{name}") for name in OPERANDS}

    def weight(row: dict[str, Any], path: str) -> dict[Format, float]:
        return _by_format(row.get("seconds"), quantised, _seconds, f"{path}.seconds")

    def attention(row: dict[str, Any], path: str) -> tuple[float, float]:
        return _seconds(row.get("forward"), f"{path}.forward"), _seconds(row.get("backward"), f"{path}.backward")

    copy_rate, memory, recapture = body.get("copy_rate"), body.get("memory"), body.get("recapture")
    return TimingTable(
        device=_text(body.get("device"), "device"),
        backend=_text(body.get("backend"), "backend"),
        formats=formats,
        gemms=_rows(body, "gemms", ("tokens", "n", "k"), gemm, least=1),
        activations=_rows(body, "activations", ("tokens", "features"), activation, least=1 if quantised else 0),
        weights=_rows(body, "weights", ("n", "k"), weight, least=1 if quantised else 0),
        attention=_rows(body, "attention", ("sequence", "heads", "head_size"), attention, least=0),
        copy_rate=None if copy_rate is None else _number(copy_rate, "copy_rate", 1, 1e20),
        memory=None if memory is None else _number(memory, "memory", 1, 1e15),
        recapture=None if recapture is None else _seconds(recapture, "recapture"),
        collectives=_collectives(body.get("collectives", [])),
        about={key: body[key] for key in _ABOUT if key in body},
    )


def _collectives(raw: Any) -> dict[Exchange, float]:
    if not isinstance(raw, list):
        raise SnipError("collectives: must be an array of objects")
    rows: dict[Exchange, float] = {}
    for i, row in enumerate(raw):
        path = f"collectives[{i}]"
        fields = _object(row, path)
        for name, known in (("collective", COLLECTIVES), ("dtype", DTYPES)):
            if fields.get(name) not in known:
                raise SnipError(f"{path}.{name}: must be one of {', '.join(known)}, got {quoted(fields.get(name))}")
        ranks, sent = (_edge(fields.get(name), f"{path}.{name}") for name in ("ranks", "bytes"))
        key = Exchange(fields["collective"], fields["dtype"], ranks, sent)
        if key in rows:
            raise SnipError(f"{path}: {' '.join(map(str, key))} stands twice")
        rows[key] = _seconds(fields.get("seconds"), f"{path}.seconds")
    return rows


def _formats(raw: Any) -> tuple[Format, ...]:
    if not isinstance(raw, list) or any(not isinstance(name, str) for name in raw):
        raise SnipError("formats: must be an array of names of formats")
    unknown = [name for name in raw if name not in Format._value2member_map_]
    if unknown:
        raise SnipError(f"formats: unknown format {quoted(unknown[0])} (known: {', '.join(f.value for f in Format)})")
    if len(set(raw)) != len(raw) or Format.BF16.value not in raw:
        raise SnipError("formats: must name bf16, and each format once")
    return tuple(Format(name) for name in raw)


def _rows[Key: tuple[int, ...], Value](
    body: dict[str, Any], name: str, edges: tuple[str, ...], read: Callable[[dict[str, Any], str], Value], *, least: int
) -> dict[Any, Value]:
    raw = body.get(name, [])
    if not isinstance(raw, list):
        raise SnipError(f"{name}: must be an array of objects")
    if len(raw) < least:
        raise SnipError(f"{name}: must hold at least one row")
    rows: dict[Any, Value] = {}
    for i, row in enumerate(raw):
        path = f"{name}[{i}]"
        fields = _object(row, path)
        key = tuple(_edge(fields.get(edge), f"{path}.{edge}") for edge in edges)
        if key in rows:
            raise SnipError(f"{path}: {' × '.join(map(str, key))} stands twice")
        rows[key] = read(fields, path)
    return rows


def _by_format[Value](
    raw: Any, formats: tuple[Format, ...], read: Callable[[Any, str], Value], path: str
) -> dict[Format, Value]:
    fields = _object(raw, path)
    missing = [fmt.value for fmt in formats if fmt.value not in fields]
    if missing:
        raise SnipError(f"{path}.{missing[0]}: missing")
    return {fmt: read(fields[fmt.value], f"{path}.{fmt.value}") for fmt in formats}


def _object(raw: Any, path: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise SnipError(f"{path}: must be an object")
    return raw


def _text(raw: Any, path: str) -> str:
    if not isinstance(raw, str) or not raw:
        raise SnipError(f"{path}: must be a non-empty string")
    return raw


def _edge(raw: Any, path: str) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or not 1 <= raw <= MAX_EDGE:
        raise SnipError(f"{path}: must be a whole number of 1 or more, got {quoted(raw)}")
    return raw


def _seconds(raw: Any, path: str) -> float:
    return _number(raw, path, MIN_SECONDS, MAX_SECONDS)


def _number(raw: Any, path: str, least: float, most: float) -> float:
    if isinstance(raw, bool) or not isinstance(raw, (int, float)) or not least <= raw <= most:
        raise SnipError(f"{path}: must be a number from {least:g} to {most:g}, got {quoted(raw)}")
    return float(raw)


def _triple(raw: Any, path: str) -> Triple:
    if not isinstance(raw, list) or len(raw) != 3:
        raise SnipError(f"{path}: must be an array of three times in seconds")
    first, second, third = (_seconds(value, f"{path}[{i}]") for i, value in enumerate(raw))
    return first, second, third
