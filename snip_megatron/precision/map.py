"""The precision map that all ranks share."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from snip_megatron.precision.errors import SnipError, located, quoted
from snip_megatron.precision.formats import FOUR_BIT, Format, Formats, Gemm, misplaced
from snip_megatron.precision.linears import LinearId, option_id, split_option_id
from snip_megatron.precision.strict_json import check_schema, finite, mapping, one_of, read_file, read_object, whole

MAP_SCHEMA = "snip.map/1"
GRANULARITIES = ("gemm", "layer")
STATUSES = ("optimal", "feasible", "infeasible", "static")
# Fields of a map by time or loss that hold a prediction; they are written where ``budget`` is set.
_PREDICTED = ("loss", "speedup", "fp4_share", "step_speedup")
_FIGURES = ("objective", "bound", "target", "achieved", "solve_seconds", *_PREDICTED)


@dataclass(frozen=True)
class PrecisionMap:
    """The format of every GEMM of every linear. Immutable.

    Linears that ``choices`` does not name run in bf16. Two maps choose the same formats if and only if their
    :meth:`digest` over the same linears is equal.

    Attributes:
        choices: option id → format.
        status: one of STATUSES: what the solver proved, or ``static`` for a map that was not solved.
        objective, bound, target: Σ loss of the choices, the solver's lower bound of it, and the value of the budget.
        achieved, achieved_per_stage: Σ saving / Σ cost of the choices, also for each pipeline stage. This is the share
            of FLOPs in fp4, or the share of the bf16 time that the map saves where ``budget`` is set.
        budget: ``speedup`` or ``loss`` if ``target`` is such a figure and costs are times. None for a share of FLOPs.
        loss, speedup: predicted loss of the choices, and predicted speedup of the decoder's linears. None unless
            ``budget`` is set. A map of a plan has a loss in any case: that of the map if it stayed for the whole run.
        fp4_share: share of FLOPs in fp4. None where ``achieved`` is that share.
        step_speedup: predicted speedup of the whole training step.
    """

    choices: Mapping[str, Format]
    version: int = 0
    status: str = "static"
    objective: float | None = None
    bound: float | None = None
    target: float | None = None
    achieved: float | None = None
    achieved_per_stage: Mapping[str, float] = field(default_factory=dict)
    solve_seconds: float | None = None
    budget: str | None = None
    loss: float | None = None
    speedup: float | None = None
    fp4_share: float | None = None
    step_speedup: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", MappingProxyType(dict(self.choices)))
        object.__setattr__(self, "achieved_per_stage", MappingProxyType(dict(self.achieved_per_stage)))

    def __reduce__(self) -> tuple[Any, ...]:
        values = [getattr(self, f.name) for f in fields(self)]  # a mapping proxy cannot be pickled, a dict can
        return PrecisionMap, tuple(dict(v) if isinstance(v, MappingProxyType) else v for v in values)

    def prediction(self) -> dict[str, Any]:
        """Return what events report of a map with a budget of time or loss. Empty for a budget by share of FLOPs."""
        if self.budget is None or self.target is None:
            return {}
        figures = {"budget": f"{self.budget}={self.target:g}", "speedup": self.speedup, "loss": self.loss}
        more = {"fp4_share": self.fp4_share, "step_speedup": self.step_speedup}
        return figures | {name: value for name, value in more.items() if value is not None}

    # -- lookup ------------------------------------------------------------------------------------------------
    def format_of(self, linear: str, gemm: Gemm) -> Format:
        """Return the format of one GEMM.

        A choice for the GEMM takes precedence over a choice for the whole linear. Without either the format is bf16.
        """
        specific = self.choices.get(option_id(linear, gemm))
        return specific if specific is not None else self.choices.get(linear, Format.BF16)

    def formats_of(self, linear: str) -> Formats:
        """Return the formats of fprop, dgrad and wgrad; see :meth:`format_of`."""
        fprop, dgrad, wgrad = (self.format_of(linear, gemm) for gemm in Gemm)
        return fprop, dgrad, wgrad

    def linears(self) -> list[LinearId]:
        """Return the linears that the map names, sorted."""
        return sorted({split_option_id(key)[0] for key in self.choices})

    def counts(self, linears: Iterable[str]) -> Counter[str]:
        """Return the number of GEMMs of ``linears`` by format, the most frequent first."""
        counts = Counter(fmt.value for name in linears for fmt in self.formats_of(name))
        return Counter(dict(counts.most_common()))

    def __str__(self) -> str:
        """Return a table of the map: GEMMs by kind of linear, summed over layers."""
        kinds: dict[str, list[Formats]] = defaultdict(list)
        for linear in self.linears():
            kinds[linear.path].append(self.formats_of(str(linear)))
        rows = [("linear, over layers", *(gemm.value for gemm in Gemm))]
        for path, formats in sorted(kinds.items()):
            by_gemm = (Counter(fmt.value for fmt in column).most_common() for column in zip(*formats, strict=True))
            rows.append((path, *(", ".join(f"{count} {fmt}" for fmt, count in counts) for counts in by_gemm)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        head = f"map {self.version}, {self.status}"
        head += "" if self.achieved is None else f", saves {self.achieved:.1%} of what its budget counts"
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join([head, *lines] if self.choices else [f"{head}: all GEMMs in bf16"])

    @classmethod
    def uniform(cls, linears: Iterable[str], fmt: Format, **fields: Any) -> PrecisionMap:
        """Return a map with one format for every GEMM of ``linears``."""
        return cls(choices={option_id(name, gemm): fmt for name in linears for gemm in Gemm}, **fields)

    def to_codes(self, linears: Sequence[str]) -> np.ndarray:
        """Return the codes of the formats: int8 [len(linears), 3], in the order fprop, dgrad, wgrad."""
        return np.array([[fmt.code for fmt in self.formats_of(name)] for name in linears], dtype=np.int8).reshape(-1, 3)

    def digest(self, linears: Sequence[str]) -> str:
        """Return the SHA-256 over names and codes, which all ranks compare when they adopt a map."""
        h = hashlib.sha256()
        for name in linears:
            h.update(name.encode() + b"\0")
        h.update(self.to_codes(linears).tobytes())
        return h.hexdigest()

    # -- JSON --------------------------------------------------------------------------------------------------
    def to_json(self) -> str:
        """Return the text of a ``snip.map/1`` file (docs/file-formats.md)."""
        return json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """Return the object of a ``snip.map/1`` file."""
        body: dict[str, Any] = {
            "schema": MAP_SCHEMA,
            "version": self.version,
            "choices": {key: fmt.value for key, fmt in self.choices.items()},
            "status": self.status,
            **{name: getattr(self, name) for name in ("objective", "bound", "target", "achieved")},
            "achieved_per_stage": dict(self.achieved_per_stage),
            "solve_seconds": self.solve_seconds,
        }
        if self.budget is not None:
            body |= {name: getattr(self, name) for name in ("budget", *_PREDICTED)}
        elif self.loss is not None:
            body["loss"] = self.loss
        return body

    @classmethod
    def load(cls, path: Path | str, argument: str = "") -> PrecisionMap:
        """Read a ``snip.map/1`` file. Raises SnipError naming ``argument`` and the file."""
        where = f"{argument} {path}".strip()
        return cls.from_json(read_file(path, where), where=where)

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "map") -> PrecisionMap:
        """Parse and validate the text of a ``snip.map/1`` file. Raises SnipError naming ``where`` and the field."""
        with located(where):
            return cls.from_dict(read_object(text))

    @classmethod
    def from_dict(cls, body: Any) -> PrecisionMap:
        """Read and validate the output of :meth:`as_dict`. Raises SnipError naming the field that is invalid."""
        check_schema(body, MAP_SCHEMA)
        choices = mapping(body.get("choices"), "choices", " of <linear>[:<gemm>] -> format")
        per_stage = mapping(body.get("achieved_per_stage") or {}, "achieved_per_stage")
        budget = body.get("budget")
        return cls(
            choices={key: _choice(key, value) for key, value in choices.items()},
            version=whole(body.get("version", 0), "version", below=2**31),
            status=one_of(body.get("status", "static"), "status", STATUSES),
            budget=None if budget is None else one_of(budget, "budget", ("speedup", "loss")),
            achieved_per_stage={str(k): finite(v, f"achieved_per_stage[{quoted(k)}]") for k, v in per_stage.items()},
            **{name: None if body.get(name) is None else finite(body[name], name) for name in _FIGURES},
        )


def format_shares(
    precision_map: PrecisionMap, flops: Mapping[str, float], unquantised: float = 0.0
) -> dict[Format, float]:
    """Return the share of FLOPs of each format that runs, those of the fewest bits first.

    ``flops`` is name of a linear → FLOPs of one of its three GEMMs, which are equal, ``unquantised`` the FLOPs of the
    decoder linears that are no candidates, all GEMMs together.
    """
    shares = dict.fromkeys(sorted(Format, key=lambda fmt: fmt.bits), 0.0)
    for name, each in flops.items():
        for gemm in Gemm:
            shares[precision_map.format_of(name, gemm)] += each
    shares[Format.BF16] += unquantised
    total = 3.0 * sum(flops.values()) + unquantised
    return {fmt: part / total for fmt, part in shares.items() if part}


def fp4_fraction(precision_map: PrecisionMap, flops: Mapping[str, float], unquantised: float = 0.0) -> float:
    """Return the share of FLOPs that run in four-bit formats. Arguments as of :func:`format_shares`."""
    shares = format_shares(precision_map, flops, unquantised)
    return sum((share for fmt, share in shares.items() if fmt in FOUR_BIT), 0.0)


def _choice(key: str, value: Any) -> Format:
    """Return the format of one entry of ``choices``. Raises SnipError if the key or the value is not valid."""
    with located("choices"):
        _, gemm = split_option_id(key)
    if not isinstance(value, str) or value not in Format._value2member_map_:
        names = ", ".join(f.value for f in Format)
        raise SnipError(f"choices[{quoted(key)}]: unknown format {quoted(value)} (known: {names})")
    if (why := misplaced(Format(value), gemm)) is not None:
        raise SnipError(f"choices[{quoted(key)}]: {why}")
    return Format(value)
