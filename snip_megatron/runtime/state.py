"""The controller's state in a checkpoint. It is JSON, equal on all ranks, and keyed by global names."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from snip_megatron.config import GuardSettings
from snip_megatron.errors import SnipError, cut, is_finite
from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.phases import PrecisionPlan
from snip_megatron.runtime.budget_spent import BudgetSpent
from snip_megatron.runtime.checks import count, squares
from snip_megatron.runtime.goal import Goal
from snip_megatron.runtime.guard import Alarm, Guard
from snip_megatron.runtime.step_report import StepFigures
from snip_megatron.runtime.trigger import Trigger
from snip_megatron.sensitivity.phased import PhasedRequest
from snip_megatron.statistics.table import StatisticsTable

STATE_SCHEMA = "snip.state/1"
_WHERE = "SNIP state in the checkpoint"


@dataclass
class Pending:
    """An update that was submitted and is not decided yet.

    Attributes:
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
        guard: the guard's state (:meth:`Guard.as_dict`); None in checkpoints of versions without a guard.
        alarm: an alarm of the guard that the next step acts on.
        trigger: the trigger's state (:meth:`Trigger.as_dict`); None without one.
        in_flight: the figures of the last step, whose collective was outstanding when the checkpoint was written.
            options the next update measures.
        spent: what the run has spent so far; None in checkpoints of versions without one.
        plan: the maps of the remaining phases; None for a map that stays until the next update.
        goal: the budget and the schedule of the run; None in checkpoints of versions that did not keep them.
    """

    precision_map: PrecisionMap | None = None
    version: int = 0
    pending: Pending | None = field(default=None)
    grad_norm: float | None = None
    guard: dict[str, Any] | None = None
    alarm: Alarm | None = None
    trigger: dict[str, Any] | None = None
    in_flight: StepFigures | None = None
    spent: BudgetSpent | None = None
    plan: PrecisionPlan | None = None
    goal: Goal | None = None

    def to_bytes(self) -> bytes:
        """Return the state as UTF-8 JSON."""
        pending = None
        if self.pending is not None:
            pending = {
                "step": self.pending.step,
                "due": self.pending.due,
                "version": self.pending.version,
                "table": base64.b64encode(self.pending.table.to_bytes()).decode(),
                "phases": None if self.pending.phases is None else self.pending.phases.as_dict(),
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
            # Without times, which would make the checkpoints of two equal runs differ.
            "in_flight": None if self.in_flight is None else asdict(replace(self.in_flight, account={})),
            "ledger": None if self.spent is None else self.spent.as_dict(),
            "plan": None if self.plan is None else self.plan.as_dict(),
            "goal": None if self.goal is None else self.goal.as_dict(),
        }
        return json.dumps(body).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> ControllerState:
        """Parse and check the output of :meth:`to_bytes`. Raises SnipError if the content is invalid."""
        try:
            body = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise SnipError(f"{_WHERE}: not JSON ({cut(error)})") from None
        if not isinstance(body, dict) or body.get("schema") != STATE_SCHEMA:
            raise SnipError(f'{_WHERE}: "schema" must be "{STATE_SCHEMA}"')
        text, norm = body.get("map"), body.get("grad_norm")
        if text is not None and not isinstance(text, str):
            raise SnipError(f"{_WHERE}: map: must be a text")
        if norm is not None and not is_finite(norm) and not isinstance(norm, float):
            raise SnipError(f"{_WHERE}: grad_norm: must be a number")
        return cls(
            precision_map=None if text is None else PrecisionMap.from_json(text, where=_WHERE),
            version=count(body.get("version"), f"{_WHERE}: version"),
            pending=_pending(body.get("pending")),
            grad_norm=norm,
            guard=_guard(body.get("guard")),
            alarm=None if body.get("alarm") is None else Alarm.from_dict(body["alarm"], _WHERE),
            trigger=_trigger(body.get("trigger")),
            in_flight=_figures(body.get("in_flight")),
            spent=None if body.get("ledger") is None else BudgetSpent.from_dict(body["ledger"], _WHERE),
            plan=_plan(body.get("plan")),
            goal=None if body.get("goal") is None else Goal.from_dict(body["goal"], _WHERE),
        )


def _plan(body: Any) -> PrecisionPlan | None:
    if body is None:
        return None
    try:
        return PrecisionPlan.from_dict(body)
    except SnipError as error:
        raise SnipError(f"{_WHERE}: plan: {error}") from None


def _guard(body: Any) -> dict[str, Any] | None:
    if body is None:
        return None
    if not isinstance(body, dict):
        raise SnipError(f"{_WHERE}: guard: must be an object")
    Guard(GuardSettings()).restore(body, _WHERE)  # raises SnipError if it is invalid
    return body


def _trigger(body: Any) -> dict[str, Any] | None:
    if body is not None:
        Trigger(1.0).restore(body, _WHERE)  # raises SnipError if it is invalid
    return body  # type: ignore[no-any-return]


def _figures(body: Any) -> StepFigures | None:
    if body is None:
        return None
    answered = body.get("answered", False) if isinstance(body, dict) else None  # older releases wrote none
    if not isinstance(body, dict) or not isinstance(body.get("broken"), bool) or not isinstance(answered, bool):
        raise SnipError(f"{_WHERE}: in_flight: must hold step, loss, grad_norm, broken and answered")
    for name in ("loss", "grad_norm"):
        if body.get(name) is not None and not is_finite(body[name]):
            raise SnipError(f"{_WHERE}: in_flight.{name}: must be a finite number")
    gradients = body.get("gradients")
    if gradients is not None:
        gradients = tuple(squares(gradients, f"{_WHERE}: in_flight.gradients"))
    loss, norm = body.get("loss"), body.get("grad_norm")
    return StepFigures(count(body.get("step"), f"{_WHERE}: step"), loss, norm, body["broken"], gradients, answered)


def _pending(body: Any) -> Pending | None:
    if body is None:
        return None
    if not isinstance(body, dict) or not isinstance(body.get("table"), str):
        raise SnipError(f"{_WHERE}: pending: must hold step, due, version and table")
    table = StatisticsTable.from_bytes(_bytes(body["table"], "pending.table"), where=_WHERE)
    step, due, version = (count(body.get(name), f"{_WHERE}: {name}") for name in ("step", "due", "version"))
    phases = body.get("phases")  # older releases wrote none
    planned = None if phases is None else PhasedRequest.from_dict(phases, f"{_WHERE}: pending.phases")
    return Pending(step, due, version, table, planned)


def _bytes(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SnipError(f"{_WHERE}: {name}: {error}") from None
