"""The controller's state in a checkpoint. It is JSON, equal on all ranks, and keyed by global names."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from snip_megatron.config import SnipConfig
from snip_megatron.errors import SnipError, cut, is_finite
from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.phases import PrecisionPlan
from snip_megatron.precision.strict import check_schema, mapping, number, whole
from snip_megatron.runtime.guard import Alarm, GuardState
from snip_megatron.runtime.step_report import StepFigures
from snip_megatron.sensitivity.phased import PhasedRequest
from snip_megatron.statistics.table import StatisticsTable

STATE_SCHEMA = "snip.state/1"
_WHERE = "SNIP state in the checkpoint"


@dataclass(frozen=True)
class Goal:
    """What a run asks of its maps, however the arguments are spelled. A resumed run may have another one.

    Attributes:
        budget: kind and value of ``--snip-budget``.
        schedule: the text of the phases; ``static`` without phases.
    """

    budget: str
    schedule: str

    @classmethod
    def of(cls, config: SnipConfig) -> Goal:
        """Return the goal of a configuration."""
        phases = config.phases
        return cls(str(config.wanted), "static" if phases is None else phases.to_json())

    def difference(self, before: Goal) -> str:
        """Return the arguments of ``before`` that are others here; an empty text without any."""
        budget = f"--snip-budget {cut(before.budget)}" if before.budget != self.budget else ""
        schedule = "another --snip-schedule" if before.schedule != self.schedule else ""
        return " and ".join(filter(None, (budget, schedule)))


@dataclass
class BudgetSpent:
    """What the past steps of a run count towards its average over the run, equal on all ranks.

    Attributes:
        origin: the first step of the run under SNIP. Earlier steps, of a checkpoint without SNIP, do not count.
        steps: number of steps since then.
        shares: sum over these steps of the fp4 share of the map in force.
        times: sum over these steps of the predicted time of the decoder's linears, relative to bf16: 1 / speedup.
        last: the step before which the run ends; None if it was not known.
    """

    origin: int
    steps: int = 0
    shares: float = 0.0
    times: float = 0.0
    last: int | None = None

    def __post_init__(self) -> None:
        for name in ("shares", "times"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must be 0 or more")

    def add(self, share: float, precision_map: PrecisionMap, steps: int = 1) -> None:
        """Add steps that ran under one map, whose fp4 share is ``share``. Without a prediction its time is bf16's."""
        self.steps += steps
        self.shares += steps * share
        self.times += steps / (precision_map.speedup or 1.0)

    @property
    def next_step(self) -> int:
        """The step that follows the last one that counts, or an earlier one if training has left out steps."""
        return self.origin + self.steps

    def average(self, *, timed: bool) -> float:
        """Return the mean fp4 share; with ``timed`` the harmonic mean of the speedups. 0 without steps."""
        if not self.steps:
            return 0.0
        if not timed:
            return self.shares / self.steps
        return self.steps / self.times if self.times > 0.0 else 0.0


@dataclass
class Pending:
    """An update that was submitted and is not decided yet.

    Attributes:
        step: the step before which the statistics were measured.
        due: the step before which the decision is due.
        version: the version of the map that the update will give.
        table: the statistics.
        phases: the phases that the update plans; None if it solves a single map.
    """

    step: int
    due: int
    version: int
    table: StatisticsTable
    phases: PhasedRequest | None = None


@dataclass
class ControllerState:
    """The state of the controller.

    Attributes:
        precision_map: the map in force; None before the first one.
        version: the version of the latest submitted update.
        pending: the update that is not decided yet; None without one.
        grad_norm: the gradient norm of the last step before clipping.
        guard: the guard's state; None if the run had no guard.
        alarm: an alarm of the guard that the next step acts on.
        in_flight: the figures of the last step, whose collective was outstanding when the checkpoint was written.
        spent: what the run has spent so far; None before its first step.
        plan: the maps of the remaining phases; None for a map that stays until the next update.
        goal: the budget and the schedule of the run.
        sequences: sequences of a microbatch that the probes of the latest update took; None before the first one.
        postponed: the step before which an update starts that kernels were not ready for; None without one.
    """

    precision_map: PrecisionMap | None = None
    version: int = 0
    pending: Pending | None = None
    grad_norm: float | None = None
    guard: GuardState | None = None
    alarm: Alarm | None = None
    in_flight: StepFigures | None = None
    spent: BudgetSpent | None = None
    plan: PrecisionPlan | None = None
    goal: Goal | None = None
    sequences: int | None = None
    postponed: int | None = None

    def to_bytes(self) -> bytes:
        """Return the state as UTF-8 JSON."""
        # Without times, which would make the checkpoints of two equal runs differ.
        parts = (self.guard, self.alarm, self.in_flight and replace(self.in_flight, account={}), self.spent, self.goal)
        body = {
            "schema": STATE_SCHEMA,
            "map": None if self.precision_map is None else self.precision_map.to_json(),
            "plan": None if self.plan is None else self.plan.as_dict(),
            "pending": None if self.pending is None else _pending_as_dict(self.pending),
            **{name: getattr(self, name) for name in ("version", "grad_norm", "sequences", "postponed")},
            **{name: part and asdict(part) for name, part in zip(_PARTS, parts, strict=True)},
        }
        return json.dumps(body).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> ControllerState:
        """Parse and check the output of :meth:`to_bytes`. Raises SnipError if the content is invalid."""
        try:
            return cls(**_fields(json.loads(content)))
        except (ValueError, RecursionError) as error:
            raise SnipError(f"{_WHERE}: not JSON ({cut(error)})") from None
        except SnipError as error:
            raise SnipError(f"{_WHERE}: {error}") from None


_PARTS: dict[str, type] = {
    "guard": GuardState, "alarm": Alarm, "in_flight": StepFigures, "ledger": BudgetSpent, "goal": Goal,
}  # fmt: skip
"""Parts of the state that :func:`parse` reads."""


def _fields(body: Any) -> dict[str, Any]:
    """Return the fields of a state."""
    check_schema(body, STATE_SCHEMA)

    def part(name: str, read: Callable[[Any, str], Any]) -> Any:
        return None if body.get(name) is None else read(body[name], name)

    found = {name: part(name, lambda value, name: parse(_PARTS[name], value, name)) for name in _PARTS}
    if found["guard"] is not None and found["guard"].good is not None:
        PrecisionMap.from_json(found["guard"].good, where="guard.good")
    return {
        "precision_map": part("map", _map),
        "version": whole(body.get("version"), "version"),
        "pending": part("pending", _pending),
        "grad_norm": part("grad_norm", number),
        "spent": found.pop("ledger"),
        "plan": part("plan", lambda plan, name: PrecisionPlan.from_dict(plan)),
        "sequences": part("sequences", whole),
        "postponed": part("postponed", whole),
        **found,
    }


def _map(text: Any, where: str) -> PrecisionMap:
    if not isinstance(text, str):
        raise SnipError(f"{where}: must be a text")
    return PrecisionMap.from_json(text, where=where)


def _pending_as_dict(pending: Pending) -> dict[str, Any]:
    return {
        **{name: getattr(pending, name) for name in ("step", "due", "version")},
        "table": base64.b64encode(pending.table.to_bytes()).decode(),
        "phases": None if pending.phases is None else pending.phases.as_dict(),
    }


def _pending(value: Any, where: str) -> Pending:
    body = mapping(value, where)
    try:
        content = base64.b64decode(body.get("table") or "", validate=True)
    except (TypeError, binascii.Error, ValueError) as error:
        raise SnipError(f"{where}.table: {error}") from None
    table, phases = StatisticsTable.from_bytes(content, where=f"{where}.table"), body.get("phases")
    planned = None if phases is None else PhasedRequest.from_dict(phases, f"{where}.phases")
    step, due, version = (whole(body.get(name), f"{where}.{name}") for name in ("step", "due", "version"))
    return Pending(step, due, version, table, planned)


# -- dataclasses ---------------------------------------------------------------------------------------------------
def parse[T](kind: type[T], body: Any, where: str) -> T:
    """Return a dataclass whose fields are integers in [0, 2^31), finite numbers, texts, bools, or several numbers.

    A field that is missing, or of another type, has its default.

    Raises:
        SnipError: the body is something else, or ``__post_init__`` raised ValueError. ``where`` begins the message.
    """
    found = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        hint, value = str(field.type), mapping(body, where).get(field.name)  # a text: its module postpones annotations
        says, fits = _KINDS.get(hint.removesuffix(_OR_NONE), ("", None))
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if fits is None or (optional and field.name not in body):
            continue
        if not (fits(value) or (value is None and hint.endswith(_OR_NONE))):
            raise SnipError(f"{where}.{field.name}: must be {says}")
        found[field.name] = tuple(value) if isinstance(value, list) else value
    try:
        return kind(**found)
    except ValueError as error:
        raise SnipError(f"{where}.{error}") from None


_OR_NONE = " | None"
_KINDS: dict[str, tuple[str, Callable[[Any], bool] | None]] = {
    "int": ("an integer in [0, 2^31)", lambda value: type(value) is int and 0 <= value < 2**31),
    "float": ("a finite number", is_finite),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "str": ("a text", lambda value: isinstance(value, str)),
    "tuple[float, ...]": (
        "a list of finite numbers", lambda value: isinstance(value, list) and all(map(is_finite, value)),
    ),
}  # fmt: skip
