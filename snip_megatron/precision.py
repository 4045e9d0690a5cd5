"""Names of formats, GEMMs and linears, and the precision map that all ranks share.

A choice is keyed ``<linear>:<fprop|dgrad|wgrad>`` (granularity ``gemm``) or ``<linear>`` (granularity ``layer``: one
format for the three GEMMs of the linear). Names of linears are global and free of parallelism:
``decoder.layers.<0-based global index>.<kind>``.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np

from snip_megatron.errors import SnipError

MAP_SCHEMA = "snip.map/1"
STATUSES = ("optimal", "feasible", "infeasible", "static")
_PREDICTED = ("loss", "speedup", "fp4_share", "step_speedup")
_FIGURES = ("objective", "bound", "target", "achieved", "solve_seconds", *_PREDICTED)


class Format(str, Enum):
    """Number formats of a GEMM's operands. The order of declaration is the int8 code on the wire: append only."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"
    FP8_TENSOR = "fp8_tensor"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"
    MXFP8 = "mxfp8"

    @property
    def code(self) -> int:
        """The int8 code of this format in a broadcast map."""
        return _FORMATS.index(self)


_FORMATS: tuple[Format, ...] = tuple(Format)


class Gemm(str, Enum):
    """The three GEMMs of a linear: Y = X·Wᵀ, dX = G·W, dW = Gᵀ·X."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


LINEAR_KINDS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
"""Of a dense decoder layer, in order."""
EXPERT_KINDS = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")
"""Of a layer whose MLP is a mixture of experts, in the place of the dense MLP's: one name for those of all experts."""
_KINDS = "|".join(re.escape(k) for k in (*LINEAR_KINDS, *EXPERT_KINDS))
_NAME = re.compile(rf"decoder\.layers\.(0|[1-9][0-9]{{0,5}})\.({_KINDS})\Z")


@dataclass(frozen=True, order=True)
class LinearId:
    """A linear of the decoder: ``layer`` is the global 0-based index, ``kind`` of LINEAR_KINDS or EXPERT_KINDS."""

    layer: int
    kind: str

    def __str__(self) -> str:
        return f"decoder.layers.{self.layer}.{self.kind}"

    @classmethod
    def parse(cls, name: str) -> LinearId:
        """Inverse of ``str``. Raises SnipError on anything that is not a decoder linear's name."""
        match = _NAME.match(name)
        if match is None:
            raise SnipError(
                f"{name!r} is not the name of a decoder linear (decoder.layers.<n>.<{'|'.join(LINEAR_KINDS)}>)"
            )
        return cls(int(match[1]), match[2])

    @property
    def sub_block(self) -> int:
        """Index of the residual sub-block: 2·layer for attention, 2·layer+1 for the MLP. Also the boundary below it."""
        return 2 * self.layer + (0 if self.kind.startswith("self_attention.") else 1)

    @property
    def is_first(self) -> bool:
        """Whether the linear reads the residual stream (qkv, fc1) rather than writes to it (proj, fc2)."""
        return self.kind.endswith(("linear_qkv", "linear_fc1"))

    @property
    def of_experts(self) -> bool:
        """Whether the name stands for a linear of each expert of a layer."""
        return self.kind in EXPERT_KINDS


def option_id(linear: str, gemm: Gemm | None) -> str:
    """The key of a choice: ``<linear>:<gemm>``, or ``<linear>`` when ``gemm`` is None (granularity ``layer``)."""
    return linear if gemm is None else f"{linear}:{gemm.value}"


def split_option_id(key: str) -> tuple[LinearId, Gemm | None]:
    """Inverse of :func:`option_id`. Raises SnipError."""
    name, colon, gemm = key.partition(":")
    linear = LinearId.parse(name)
    if not colon:
        return linear, None
    try:
        return linear, Gemm(gemm)
    except ValueError:
        raise SnipError(f"choice {key!r}: {gemm!r} is not one of fprop, dgrad, wgrad") from None


@dataclass(frozen=True)
class PrecisionMap:
    """Which format each GEMM of each linear runs in. Immutable; equality of ``digest()`` is equality of formats.

    Linears that ``choices`` does not name run in bf16.

    Attributes:
        target, achieved, achieved_per_stage: what was asked, and Σ saving / Σ cost: the share of FLOPs in fp4.
        budget: ``speedup`` or ``loss`` where ``target`` is such a figure and costs are times; None: a share. Then
            ``achieved`` is the share of the bf16 time that is saved, and loss, speedup: predicted of the choices.
        step_speedup: predicted of the whole training step, where ``speedup`` is of the decoder's linears.
        fp4_share: share of FLOPs in fp4, where ``achieved`` is not that.
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
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # a mapping proxy does not pickle, a dict does
        return _restore, ({k: dict(v) if isinstance(v, MappingProxyType) else v for k, v in values.items()},)

    def prediction(self) -> dict[str, Any]:
        """What events say of a map that was asked for by time or loss; nothing for one asked by a share of FLOPs."""
        if self.budget is None or self.target is None:
            return {}
        asked = {"budget": f"{self.budget}={self.target:g}", "speedup": self.speedup, "loss": self.loss}
        more = {"fp4_share": self.fp4_share, "step_speedup": self.step_speedup}
        return asked | {name: value for name, value in more.items() if value is not None}

    # -- lookup ------------------------------------------------------------------------------------------------
    def format_of(self, linear: str, gemm: Gemm) -> Format:
        """Format of one GEMM; a per-GEMM choice wins over one for the whole linear, absence means bf16."""
        specific = self.choices.get(option_id(linear, gemm))
        return specific if specific is not None else self.choices.get(linear, Format.BF16)

    def linears(self) -> list[LinearId]:
        """The linears that the map names, in order."""
        return sorted({split_option_id(key)[0] for key in self.choices})

    @classmethod
    def uniform(cls, linears: Iterable[str], fmt: Format, **fields: Any) -> PrecisionMap:
        """A map with one format for every GEMM of ``linears``."""
        return cls(choices={option_id(name, gemm): fmt for name in linears for gemm in Gemm}, **fields)

    # -- int8 codec --------------------------------------------------------------------------------------------
    def to_codes(self, linears: Sequence[str]) -> np.ndarray:
        """int8 [len(linears), 3] codes in the order fprop, dgrad, wgrad: what a broadcast carries."""
        return np.array([[self.format_of(n, g).code for g in Gemm] for n in linears], dtype=np.int8).reshape(-1, 3)

    @classmethod
    def from_codes(cls, linears: Sequence[str], codes: np.ndarray, **fields: Any) -> PrecisionMap:
        """Inverse of :meth:`to_codes`. Raises SnipError on a wrong shape or an unknown code."""
        codes = np.asarray(codes)
        if codes.shape != (len(linears), 3):
            raise SnipError(f"map codes have shape {codes.shape}, expected {(len(linears), 3)}")
        if codes.size and not (int(codes.min()) >= 0 and int(codes.max()) < len(_FORMATS)):
            raise SnipError(f"map codes hold an unknown format code (known: 0..{len(_FORMATS) - 1})")
        choices = {
            option_id(name, gemm): _FORMATS[int(codes[i, j])]
            for i, name in enumerate(linears)
            for j, gemm in enumerate(Gemm)
        }
        return cls(choices=choices, **fields)

    def digest(self, linears: Sequence[str]) -> str:
        """SHA-256 over the names and codes: what all ranks compare at adoption."""
        h = hashlib.sha256()
        for name in linears:
            h.update(name.encode() + b"\0")
        h.update(self.to_codes(linears).tobytes())
        return h.hexdigest()

    def with_fields(self, **fields: Any) -> PrecisionMap:
        """A copy with other metadata (``version``, ``status``, …)."""
        return replace(self, **fields)

    # -- JSON --------------------------------------------------------------------------------------------------
    def to_json(self) -> str:
        """The text of a ``snip.map/1`` file (DESIGN, contracts)."""
        body = {
            "schema": MAP_SCHEMA,
            "version": self.version,
            "choices": {key: fmt.value for key, fmt in self.choices.items()},
            "status": self.status,
            "objective": self.objective,
            "bound": self.bound,
            "target": self.target,
            "achieved": self.achieved,
            "achieved_per_stage": dict(self.achieved_per_stage),
            "solve_seconds": self.solve_seconds,
        }
        if self.budget is not None:
            body |= {name: getattr(self, name) for name in ("budget", *_PREDICTED)}
        return json.dumps(body, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = "map") -> PrecisionMap:
        """Parse and validate a ``snip.map/1`` text; ``where`` names the file in errors. Raises SnipError."""
        try:
            body = json.loads(text, object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError) as error:
            raise SnipError(f"{where}: not JSON ({error})") from None
        except SnipError as error:
            raise SnipError(f"{where}: {error}") from None
        if not isinstance(body, dict) or body.get("schema") != MAP_SCHEMA:
            raise SnipError(f'{where}: "schema" must be "{MAP_SCHEMA}"')
        raw = body.get("choices")
        if not isinstance(raw, dict):
            raise SnipError(f"{where}: choices: must be an object of <linear>[:<gemm>] -> format")
        choices: dict[str, Format] = {}
        for key, value in raw.items():
            try:
                split_option_id(key)
            except SnipError as error:
                raise SnipError(f"{where}: choices: {error}") from None
            if not isinstance(value, str) or value not in Format._value2member_map_:
                known = ", ".join(f.value for f in Format)
                raise SnipError(f"{where}: choices[{key!r}]: unknown format {value!r} (known: {known})")
            choices[key] = Format(value)
        status = body.get("status", "static")
        if status not in STATUSES:
            raise SnipError(f"{where}: status: {status!r} is not one of {', '.join(STATUSES)}")
        per_stage = body.get("achieved_per_stage") or {}
        if not isinstance(per_stage, dict):
            raise SnipError(f"{where}: achieved_per_stage: must be an object")
        budget = body.get("budget")
        if budget not in (None, "speedup", "loss"):
            raise SnipError(f"{where}: budget: {budget!r:.40} is not one of speedup, loss")
        version = body.get("version", 0)
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 2**31:
            raise SnipError(f"{where}: version: must be an integer in [0, 2^31)")
        return cls(
            choices=choices,
            version=version,
            status=status,
            budget=budget,
            achieved_per_stage={str(k): _number(v, where, f"achieved_per_stage[{k!r}]") for k, v in per_stage.items()},
            **{name: None if body.get(name) is None else _number(body[name], where, name) for name in _FIGURES},
        )


def fp4_fraction(precision_map: PrecisionMap, flops: Mapping[str, float], unquantised: float = 0.0) -> float:
    """FLOPs of four-bit GEMMs over all; ``flops``: linear's name → FLOPs of one GEMM (its three are equal).

    ``unquantised``: FLOPs of the decoder's linears that are no candidates, all GEMMs together.
    """
    four_bit = {Format.FP4, Format.NVFP4, Format.MXFP4}
    total = 3.0 * sum(flops.values()) + unquantised
    low = sum(flops[name] for name in flops for gemm in Gemm if precision_map.format_of(name, gemm) in four_bit)
    return low / total if total else 0.0


def _number(value: Any, where: str, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SnipError(f"{where}: {path}: must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise SnipError(f"{where}: {path}: must be a finite number")
    return number


def _restore(values: dict[str, Any]) -> PrecisionMap:
    return PrecisionMap(**values)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object as a dict; of two values for one choice neither is taken."""
    body = dict(pairs)
    if len(body) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise SnipError(f"the key {twice!r} stands twice in one object")
    return body
