"""The controller's state in a checkpoint. It is JSON, equal on all ranks, and keyed by global names."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from snip_megatron.errors import SnipError, cut, is_finite
from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.phases import PrecisionPlan
from snip_megatron.runtime.budget_spent import BudgetSpent
from snip_megatron.runtime.checks import parse
from snip_megatron.runtime.goal import Goal
from snip_megatron.runtime.guard import Alarm, GuardState
from snip_megatron.runtime.step_report import StepFigures
from snip_megatron.sensitivity.phased import PhasedRequest
from snip_megatron.statistics.table import StatisticsTable

STATE_SCHEMA = "snip.state/1"
_WHERE = "SNIP state in the checkpoint"


@dataclass
class _Version:
    version: int


@dataclass
class _Counts(_Version):
    sequences: int | None = None
    postponed: int | None = None


@dataclass
class _Steps(_Version):
    step: int
    due: int


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
        guard: the guard's state; None in checkpoints of versions without a guard.
        alarm: an alarm of the guard that the next step acts on.
        in_flight: the figures of the last step, whose collective was outstanding when the checkpoint was written.
        spent: what the run has spent so far; None in checkpoints of versions without one.
        plan: the maps of the remaining phases; None for a map that stays until the next update.
        goal: the budget and the schedule of the run; None in checkpoints of versions that did not keep them.
        sequences: sequences of a microbatch that the probes of the latest update took; None before the first one.
        postponed: the step before which an update starts that kernels were not ready for; None without one.
    """

    precision_map: PrecisionMap | None = None
    version: int = 0
    pending: Pending | None = field(default=None)
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
            "guard": _plain(self.guard),
            "alarm": _plain(self.alarm),
            # Without times, which would make the checkpoints of two equal runs differ.
            "in_flight": None if self.in_flight is None else _plain(replace(self.in_flight, account={})),
            "ledger": _plain(self.spent),
            "plan": None if self.plan is None else self.plan.as_dict(),
            "goal": _plain(self.goal),
            "sequences": self.sequences,
            "postponed": self.postponed,
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
            pending=_pending(body.get("pending")),
            grad_norm=norm,
            guard=_guard(body.get("guard")),
            alarm=_part(Alarm, body, "alarm"),
            in_flight=_part(StepFigures, body, "in_flight"),
            spent=_part(BudgetSpent, body, "ledger"),
            plan=_plan(body.get("plan")),
            goal=_part(Goal, body, "goal"),
            **asdict(parse(_Counts, body, _WHERE)),
        )


def _plan(body: Any) -> PrecisionPlan | None:
    if body is None:
        return None
    try:
        return PrecisionPlan.from_dict(body)
    except SnipError as error:
        raise SnipError(f"{_WHERE}: plan: {error}") from None


def _part[T](kind: type[T], body: dict[str, Any], name: str) -> T | None:
    """Return the part ``name`` of the state; None if it has none, as states of older releases may."""
    return None if body.get(name) is None else parse(kind, body[name], f"{_WHERE}: {name}")


def _plain(part: Any) -> dict[str, Any] | None:
    return None if part is None else asdict(part)


def _guard(body: Any) -> GuardState | None:
    if body is None:
        return None
    state = parse(GuardState, body, f"{_WHERE}: guard")
    if "spikes" not in body and state.probation is None:  # earlier releases had one count for both
        state.strikes, state.spikes = 0, state.strikes
    if state.good is not None:
        PrecisionMap.from_json(state.good, where=f"{_WHERE}: guard.good")
    return state


def _pending(body: Any) -> Pending | None:
    if body is None:
        return None
    if not isinstance(body, dict) or not isinstance(body.get("table"), str):
        raise SnipError(f"{_WHERE}: pending: must hold step, due, version and table")
    table = StatisticsTable.from_bytes(_bytes(body["table"], "pending.table"), where=_WHERE)
    steps = parse(_Steps, body, f"{_WHERE}: pending")
    phases = body.get("phases")  # older releases wrote none
    planned = None if phases is None else PhasedRequest.from_dict(phases, f"{_WHERE}: pending.phases")
    return Pending(steps.step, steps.due, steps.version, table, planned)


def _bytes(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SnipError(f"{_WHERE}: {name}: {error}") from None
