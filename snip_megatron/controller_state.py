"""What a checkpoint holds of the controller: equal on all ranks, keyed by global names, JSON without pickles."""

from __future__ import annotations

import base64
import binascii
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from snip_megatron.errors import SnipError
from snip_megatron.guard import Alarm, Guard, GuardSettings
from snip_megatron.precision import PrecisionMap
from snip_megatron.statistics.measured import Measured
from snip_megatron.statistics.table import StatisticsTable
from snip_megatron.step_report import StepFigures
from snip_megatron.trigger import Trigger, squares

STATE_SCHEMA = "snip.state/1"
_WHERE = "SNIP state in the checkpoint"


@dataclass
class Pending:
    """An update on its way: measured before ``step``, decided before ``due``; ``table`` is what was measured."""

    step: int
    due: int
    version: int
    table: StatisticsTable


@dataclass
class ControllerState:
    """The controller's memory.

    Attributes:
        precision_map: the map in force; None before the first one.
        version: of the latest map asked for.
        pending: the update on its way.
        grad_norm: of the last step, before clipping.
        guard: the guard's memory (:meth:`Guard.as_dict`); None in a checkpoint from before there was one.
        alarm: a verdict of the guard that the next step acts on.
        trigger: the automatic trigger's memory (:meth:`Trigger.as_dict`); None without one.
        in_flight: figures of a step that had not arrived when the checkpoint was written.
        measured: of options forced alone, by all updates so far; decides which the next update renews.
    """

    precision_map: PrecisionMap | None = None
    version: int = 0
    pending: Pending | None = field(default=None)
    grad_norm: float | None = None
    guard: dict[str, Any] | None = None
    alarm: Alarm | None = None
    trigger: dict[str, Any] | None = None
    in_flight: StepFigures | None = None
    measured: Measured | None = None

    def to_bytes(self) -> bytes:
        """UTF-8 JSON."""
        pending = None
        if self.pending is not None:
            pending = {
                "step": self.pending.step,
                "due": self.pending.due,
                "version": self.pending.version,
                "table": base64.b64encode(self.pending.table.to_bytes()).decode(),
            }
        body = {
            "schema": STATE_SCHEMA,
            "map": None if self.precision_map is None else self.precision_map.to_json(),
            "version": self.version,
            "pending": pending,
            "grad_norm": self.grad_norm,
            "guard": self.guard,
            "alarm": None if self.alarm is None else asdict(self.alarm),
            "trigger": self.trigger,
            "in_flight": None if self.in_flight is None else asdict(self.in_flight),
            "measured": None if self.measured is None else base64.b64encode(self.measured.to_bytes()).decode(),
        }
        return json.dumps(body).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> ControllerState:
        """Inverse of :meth:`to_bytes`. Raises SnipError on anything else: a checkpoint is data from outside."""
        try:
            body = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise SnipError(f"{_WHERE}: not JSON ({error})") from None
        if not isinstance(body, dict) or body.get("schema") != STATE_SCHEMA:
            raise SnipError(f'{_WHERE}: "schema" must be "{STATE_SCHEMA}"')
        text, norm = body.get("map"), body.get("grad_norm")
        if text is not None and not isinstance(text, str):
            raise SnipError(f"{_WHERE}: map: must be a text")
        if norm is not None and (isinstance(norm, bool) or not isinstance(norm, (int, float))):
            raise SnipError(f"{_WHERE}: grad_norm: must be a number")
        return cls(
            precision_map=None if text is None else PrecisionMap.from_json(text, where=_WHERE),
            version=_count(body, "version"),
            pending=_pending(body.get("pending")),
            grad_norm=norm,
            guard=_guard(body.get("guard")),
            alarm=None if body.get("alarm") is None else Alarm.from_dict(body["alarm"], _WHERE),
            trigger=_trigger(body.get("trigger")),
            in_flight=_figures(body.get("in_flight")),
            measured=_measured(body.get("measured")),
        )


def _guard(body: Any) -> dict[str, Any] | None:
    if body is None:
        return None
    if not isinstance(body, dict):
        raise SnipError(f"{_WHERE}: guard: must be an object")
    Guard(GuardSettings()).restore(body, _WHERE)  # says what is wrong with it
    return body


def _trigger(body: Any) -> dict[str, Any] | None:
    if body is not None:
        Trigger(1.0).restore(body, _WHERE)  # says what is wrong with it
    return body  # type: ignore[no-any-return]


def _figures(body: Any) -> StepFigures | None:
    if body is None:
        return None
    if not isinstance(body, dict) or not isinstance(body.get("broken"), bool):
        raise SnipError(f"{_WHERE}: in_flight: must hold step, loss, grad_norm and broken")
    for name in ("loss", "grad_norm"):
        value = body.get(name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if value is not None and not number:
            raise SnipError(f"{_WHERE}: in_flight.{name}: must be a finite number")
    gradients = body.get("gradients")
    if gradients is not None:
        gradients = tuple(squares(gradients, f"{_WHERE}: in_flight.gradients"))
    return StepFigures(_count(body, "step"), body.get("loss"), body.get("grad_norm"), body["broken"], gradients)


def _pending(body: Any) -> Pending | None:
    if body is None:
        return None
    if not isinstance(body, dict) or not isinstance(body.get("table"), str):
        raise SnipError(f"{_WHERE}: pending: must hold step, due, version and table")
    table = StatisticsTable.from_bytes(_bytes(body["table"], "pending.table"), where=_WHERE)
    return Pending(_count(body, "step"), _count(body, "due"), _count(body, "version"), table)


def _measured(text: Any) -> Measured | None:
    if text is None:
        return None
    if not isinstance(text, str):
        raise SnipError(f"{_WHERE}: measured: must be a text")
    try:
        return Measured.from_bytes(_bytes(text, "measured"))
    except ValueError as error:
        raise SnipError(f"{_WHERE}: measured: {error}") from None


def _bytes(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SnipError(f"{_WHERE}: {name}: {error}") from None


def _count(body: dict[str, Any], name: str) -> int:
    value = body.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise SnipError(f"{_WHERE}: {name}: must be an integer in [0, 2^31)")
    return value
