"""The state of the controller in a checkpoint, and in it the plan of a run whose maps depend on time.

The state is JSON, equal on all ranks, and keyed by global names. It depends only on the step number, the configuration,
the maps on which ranks agreed, and the checkpoint.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.errors import located
from snip_megatron.precision.phases import PlanPhase, PrecisionPlan, Schedule
from snip_megatron.precision.strict_json import JsonFields, check_schema, read_object
from snip_megatron.runtime.exchange import StepFigures
from snip_megatron.runtime.guard import Alarm, GuardState
from snip_megatron.runtime.solving import Candidate
from snip_megatron.sensitivity.request import PhasedRequest
from snip_megatron.sensitivity.table import StatisticsTable

STATE_SCHEMA = "snip.state/2"


@dataclass
class BudgetSpent(JsonFields):
    """What the past steps of a run contribute to its average over the run, equal on all ranks."""

    origin: int  # first step of the run under SNIP. Earlier steps, of a checkpoint without SNIP, do not count
    steps: int = 0  # number of steps that count
    shares: float = 0.0  # sum over these steps of the fp4 share of the map in force
    # sum over these steps of the predicted time of the decoder's linears relative to bf16 (1 / speedup)
    times: float = 0.0
    last: int | None = None  # the step before which the run ends. None if it was not known

    def add(self, share: float, precision_map: PrecisionMap, steps: int = 1) -> None:
        """Add steps that ran under one map with the fp4 share ``share``. Without a prediction its time is bf16's."""
        self.steps += steps
        self.shares += steps * share
        self.times += steps / (precision_map.speedup or 1.0)

    def average(self, *, timed: bool) -> float:
        """Return the mean fp4 share, or with ``timed`` the harmonic mean of the speedups. 0 without steps."""
        if not self.steps:
            return 0.0
        if not timed:
            return self.shares / self.steps
        return self.steps / self.times if self.times > 0.0 else 0.0


@dataclass
class Pending(JsonFields):
    """An update that was submitted and is not decided yet."""

    step: int  # the step before which it was measured
    due: int  # the step before which it is decided
    version: int  # version of its map
    table: StatisticsTable
    phases: PhasedRequest | None = None  # the phases that it plans. None if it solves a single map
    # the best candidate of its first solution, which broke the bound of the loss as measured. None before
    rejected: Candidate | None = None


@dataclass
class ControllerState(JsonFields):
    """The state of the controller. A field is None if there is nothing to store."""

    precision_map: PrecisionMap | None = None  # the map in force
    version: int = 0  # version of the latest submitted update
    pending: Pending | None = None  # the update that is submitted and undecided
    # gradient norm of the last step before clipping. None if it is unknown or not finite
    grad_norm: float | None = None
    guard: GuardState | None = None
    alarm: Alarm | None = None  # an alarm of the guard on which the next step acts
    # figures of the last step, whose collective was outstanding when the checkpoint was written
    in_flight: StepFigures | None = None
    spent: BudgetSpent | None = None  # what past steps contribute to the average over the run
    plan: PrecisionPlan | None = None  # the maps of the remaining phases. None if the map stays until the next update
    sequences: int | None = None  # sequences of a microbatch that the probes of the latest update took
    postponed: int | None = None  # the step before which an update starts that had to wait for kernels or was dropped
    failures: int = 0  # number of updates in a row that were dropped
    # factor of the predicted losses, as measured rises require. See :meth:`Comparison.corrected`
    correction: float = 1.0

    def to_bytes(self) -> bytes:
        """Return the state as UTF-8 JSON."""
        # Without times, by which the checkpoints of two equal runs would differ.
        state = replace(self, in_flight=self.in_flight and replace(self.in_flight, account={}))
        return json.dumps({"schema": STATE_SCHEMA, **state.as_dict()}, allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> ControllerState:
        """Parse and check the output of :meth:`to_bytes`. Raises SnipError if the content is invalid."""
        with located("SNIP state in the checkpoint"):
            body = read_object(content)
            check_schema(body, STATE_SCHEMA)
            for name in ("schema", "goal", "answered", "ready"):  # all but the schema are of earlier commits
                for part in (body, body.get("in_flight")):
                    if isinstance(part, dict):
                        part.pop(name, None)
            return cls.from_dict(body, "state")


# -- maps that depend on time ----------------------------------------------------------------------------------------
def even_weights(origin: int, begins: Sequence[int], last: int) -> tuple[float, ...]:
    """Return each phase's share of the run, its weight under a constant learning rate if nothing is forgotten."""
    return tuple((end - begin) / (last - origin) for begin, end in itertools.pairwise([*begins, last]))


@dataclass(frozen=True)
class Timeline:
    """The timeline of a run, equal on all ranks."""

    last: int  # the step before which training ends
    schedule: Schedule | None = None  # the phases, which may have different maps. None if maps do not depend on time
    # returns the plan of a policy without statistics from (first step of the run, ``last``, first step of the plan, sum
    # of the fp4 shares of the steps before it). None for other policies
    fixed: Callable[[int, int, int, float], PrecisionPlan] | None = None
    # returns the weights of the carried losses from (first step of the run, first steps of its remaining phases,
    # ``last``)
    carried: Callable[[int, Sequence[int], int], Sequence[float]] = even_weights
    standing: float = 1.0  # weight of the standing loss in the last phase (``sensitivity.request``)
    timed: bool = False  # whether the average over the run is one of predicted time instead of the fp4 share


@dataclass(eq=False)
class ScheduleState:
    """The plan and what has been spent, stored in the state of the controller."""

    state: ControllerState  # the state of the controller, which this object changes
    timeline: Timeline | None  # None if the end of the run is unknown
    share: Callable[[PrecisionMap], float]  # returns the fp4 share of a map
    _entered: int | None = None  # first step of the phase whose map is in force

    @property
    def spent(self) -> BudgetSpent:
        """What past steps have spent. :meth:`begin` sets it."""
        assert self.state.spent is not None
        return self.state.spent

    def begin(self, step: int) -> dict[str, int] | None:
        """Prepare the first step of this process, and move the phases if a resumed run has another end.

        The count of steps starts anew if the checkpoint has none, or one beyond ``step``. It may be smaller than
        ``step``, because Megatron leaves out the steps of ``--iterations-to-skip``. Returns the fields of the event
        ``plan_moved``. None if the end is the same.
        """
        state, timeline = self.state, self.timeline
        if state.spent is None or state.spent.origin + state.spent.steps > step:
            state.spent = BudgetSpent(step)
            state.plan = None
        before, state.spent.last = state.spent.last, None if timeline is None else timeline.last
        if state.plan is not None and self._is_of_another_policy(state.plan, step):
            state.plan = None
        if state.pending is not None and (timeline is None or timeline.schedule is None):
            state.pending.phases = None  # the checkpoint is of a run with phases, and this one has none
        if timeline is None or (timeline.schedule is None and timeline.fixed is None):
            state.plan = None
            return None
        if before is None or before == timeline.last or step >= timeline.last:
            return None
        if state.plan is not None:
            state.plan = self.fixed_plan(step) or state.plan.moved(self.spent.origin, timeline.last, step)
        return {"last_before": before, "last": timeline.last}

    def fixed_plan(self, step: int) -> PrecisionPlan | None:
        """Return the plan of a policy without statistics from ``step`` on. None if the run has another policy.

        What has been spent before counts towards its average.
        """
        timeline = self.timeline
        if timeline is None or timeline.fixed is None or step >= timeline.last:
            return None
        return timeline.fixed(self.spent.origin, timeline.last, step, self.spent.shares)

    def _is_of_another_policy(self, plan: PrecisionPlan, step: int) -> bool:
        """Return whether a restored plan does not belong to this run's policy, whose plans have the same two maps."""
        expected = self.fixed_plan(step)
        if expected is None:
            return False
        maps = {frozenset(phase.precision_map.choices.items()) for each in (expected, plan) for phase in each.phases}
        return (expected.target, expected.status) != (plan.target, plan.status) or len(maps) > 2

    def set_plan(self, plan: PrecisionPlan, step: int) -> None:
        """Set the plan for the steps from ``step`` on. A plan for another end of the run is moved first."""
        timeline = self.timeline
        if timeline is not None and plan.last != timeline.last and step < timeline.last:
            plan = plan.moved(self.spent.origin, timeline.last, step)
        self.state.plan, self._entered = plan, None

    def enter_phase(self, step: int) -> PrecisionMap:
        """Enter the phase of ``step``, and return its map."""
        phase = self._phase(step)
        self._entered = phase.begin
        return phase.precision_map

    def begins_phase(self, step: int) -> bool:
        """Return whether a phase begins whose map is not in force yet."""
        return self.state.plan is not None and self._phase(step).begin != self._entered

    def has_other_map(self, step: int, restored: PrecisionMap | None, names: Sequence[str]) -> bool:
        """Return whether the plan has another map at ``step`` than the one that a checkpoint restored.

        If it has the same, its phase is entered.
        """
        plan = self.state.plan
        if plan is None:
            return False
        if restored is None or self._phase(step).begin == step or plan.at(step).digest(names) != restored.digest(names):
            return True
        self.enter_phase(step)
        return False

    def _phase(self, step: int) -> PlanPhase:
        assert self.state.plan is not None
        return self.state.plan.phases[self.state.plan.index_at(step)]

    def _ahead(self, plan: PrecisionPlan | None, current: PrecisionMap | None, step: int, until: int) -> BudgetSpent:
        """Return what will have been spent at ``until`` if steps from ``step`` on follow the plan, or ``current``."""
        total = replace(self.spent)
        if plan is None:
            assert current is not None
            total.add(self.share(current), current, max(0, until - step))
            return total
        starts = [step, *(phase.begin for phase in plan.phases[1:]), until]
        for phase, begin, end in zip(plan.phases, starts, starts[1:], strict=False):
            steps = min(end, until) - max(begin, step)
            if steps > 0:
                total.add(self.share(phase.precision_map), phase.precision_map, steps)
        return total

    def request(self, step: int, due: int, current: PrecisionMap) -> PhasedRequest | None:
        """Return the phases that an update before ``step`` must plan.

        They are those that remain at ``due``, where its plan is adopted, with what will have been spent then. Until
        then maps follow the plan, or the map ``current`` stays. None if maps do not depend on time, or if no step
        remains at ``due``.
        """
        timeline = self.timeline
        if timeline is None or timeline.schedule is None:
            return None
        origin, last = self.spent.origin, timeline.last
        if due >= last:
            return None
        spent = self._ahead(self.state.plan, current, step, due)
        return PhasedRequest.of_schedule(
            timeline.schedule,
            (origin, last),
            due,
            carried=lambda begins: timeline.carried(origin, begins, last),
            standing=timeline.standing,
            spent_steps=spent.steps,
            spent=spent.average(timed=timeline.timed),
        )

    def figures(self, step: int) -> dict[str, Any]:
        """Return the fields of events about the plan in force, with the average that it gives over the whole run."""
        plan = self.state.plan
        assert plan is not None
        timed = self.timeline is not None and self.timeline.timed
        average = self._ahead(plan, None, step, plan.last).average(timed=timed)
        return {
            "version": plan.version,
            "status": plan.status,
            "target": plan.target,
            "average": average if math.isfinite(average) else None,
            "phase": plan.index_at(step),
            "phases": [
                {"from_step": phase.begin, "steps": steps, "fp4_fraction": self.share(phase.precision_map)}
                for phase, steps in zip(plan.phases, plan.steps, strict=True)
            ],
        }
