"""The plan of a run with phases: the map that is due, what has been spent, and the request of the next update.

All ranks have the same content, because it depends only on the step number, the configuration, the maps on which they
agreed, and the state of the checkpoint.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.phases import PlanPhase, PrecisionPlan, Schedule
from snip_megatron.runtime.state import BudgetSpent, ControllerState
from snip_megatron.sensitivity.request import PhasedRequest


def even_weights(origin: int, begins: Sequence[int], last: int) -> tuple[float, ...]:
    """Return each phase's share of the run, its weight under a constant learning rate if nothing is forgotten."""
    return tuple((end - begin) / (last - origin) for begin, end in itertools.pairwise([*begins, last]))


@dataclass(frozen=True)
class Timeline:
    """The timeline of a run, equal on all ranks.

    Attributes:
        last: The step before which training ends.
        schedule: The phases, which may have different maps. None if maps do not depend on time.
        fixed: Returns the plan of a policy without statistics from (first step of the run, ``last``, first step of the
            plan, sum of the fp4 shares of the steps before it). None for other policies.
        carried: Returns the weights of the carried losses from (first step of the run, first steps of its remaining
            phases, ``last``).
        standing: Weight of the standing loss in the last phase (``sensitivity.request``).
        timed: Whether the average over the run is one of predicted time instead of the fp4 share.
    """

    last: int
    schedule: Schedule | None = None
    fixed: Callable[[int, int, int, float], PrecisionPlan] | None = None
    carried: Callable[[int, Sequence[int], int], Sequence[float]] = even_weights
    standing: float = 1.0
    timed: bool = False


class ScheduleState:
    """The plan and what has been spent, stored in the state of the controller.

    Args:
        state: The state of the controller, which this object changes.
        timeline: The timeline of the run. None if its end is unknown.
        share: Returns the fp4 share of a map.
    """

    def __init__(
        self, state: ControllerState, timeline: Timeline | None, share: Callable[[PrecisionMap], float]
    ) -> None:
        self._state = state
        self._timeline = timeline
        self._share = share
        self._entered: int | None = None  # first step of the phase whose map is in force

    @property
    def has_phases(self) -> bool:
        """Whether an update solves a plan instead of a single map."""
        return self._timeline is not None and self._timeline.schedule is not None

    @property
    def spent(self) -> BudgetSpent:
        """What past steps have spent. :meth:`begin` sets it."""
        assert self._state.spent is not None
        return self._state.spent

    # -- start -------------------------------------------------------------------------------------------------
    def begin(self, step: int) -> dict[str, int] | None:
        """Prepare the first step of this process, and move the phases if a resumed run has another end.

        The count of steps starts anew if the checkpoint has none, or one beyond ``step``. It may be smaller than
        ``step``, because Megatron leaves out the steps of ``--iterations-to-skip``. Returns the fields of the event
        ``plan_moved``. None if the end is the same.
        """
        state, timeline = self._state, self._timeline
        if state.spent is None or state.spent.next_step > step:
            state.spent = BudgetSpent(step)
            state.plan = None
        before, state.spent.last = state.spent.last, None if timeline is None else timeline.last
        if state.plan is not None and self._is_of_another_policy(state.plan, step):
            state.plan = None
        if state.pending is not None and not self.has_phases:
            state.pending.phases = None  # the checkpoint is of a run with phases, and this one has none
        if timeline is None or (timeline.schedule is None and timeline.fixed is None):
            state.plan = None
            return None
        if before is None or before == timeline.last or step >= timeline.last:
            return None
        if state.plan is not None:
            state.plan = self._fixed_from(step) or state.plan.moved(self.spent.origin, timeline.last, step)
        return {"last_before": before, "last": timeline.last}

    def fixed_plan(self, step: int) -> PrecisionPlan | None:
        """Return the plan of a policy without statistics from ``step`` on.

        It is None if the run has another policy, or a plan. What has been spent before counts towards its average.
        """
        return None if self._state.plan is not None else self._fixed_from(step)

    def _fixed_from(self, step: int) -> PrecisionPlan | None:
        timeline = self._timeline
        if timeline is None or timeline.fixed is None or step >= timeline.last:
            return None
        return timeline.fixed(self.spent.origin, timeline.last, step, self.spent.shares)

    def _is_of_another_policy(self, plan: PrecisionPlan, step: int) -> bool:
        """Return whether a restored plan does not belong to this run's policy, whose plans have the same two maps."""
        expected = self._fixed_from(step)
        if expected is None:
            return False
        maps = {frozenset(phase.precision_map.choices.items()) for each in (expected, plan) for phase in each.phases}
        return (expected.target, expected.status) != (plan.target, plan.status) or len(maps) > 2

    # -- the plan ----------------------------------------------------------------------------------------------
    def set_plan(self, plan: PrecisionPlan, step: int) -> None:
        """Set the plan for the steps from ``step`` on. A plan for another end of the run is moved first."""
        timeline = self._timeline
        if timeline is not None and plan.last != timeline.last and step < timeline.last:
            plan = plan.moved(self.spent.origin, timeline.last, step)
        self._state.plan, self._entered = plan, None

    def enter_phase(self, step: int) -> PrecisionMap:
        """Enter the phase of ``step``, and return its map."""
        phase = self._phase(step)
        self._entered = phase.begin
        return phase.precision_map

    def begins_phase(self, step: int) -> bool:
        """Return whether a phase begins whose map is not in force yet."""
        return self._state.plan is not None and self._phase(step).begin != self._entered

    def has_other_map(self, step: int, restored: PrecisionMap | None, names: Sequence[str]) -> bool:
        """Return whether the plan has another map at ``step`` than the one that a checkpoint restored.

        If it has the same, its phase is entered.
        """
        plan = self._state.plan
        if plan is None:
            return False
        if restored is None or self._phase(step).begin == step or plan.at(step).digest(names) != restored.digest(names):
            return True
        self.enter_phase(step)
        return False

    def drop_plan(self) -> None:
        """Drop the plan, because its map was taken back. The next update makes another one."""
        self._state.plan = self._entered = None

    def _phase(self, step: int) -> PlanPhase:
        assert self._state.plan is not None
        return self._state.plan.phases[self._state.plan.index_at(step)]

    # -- what has been spent -----------------------------------------------------------------------------------
    def count_step(self, in_force: PrecisionMap, share: float) -> None:
        """Add a step that ran under the map ``in_force``, with the fp4 share ``share``, to what has been spent."""
        if self._state.spent is not None:
            self._state.spent.add(share, in_force)

    def average(self, plan: PrecisionPlan, step: int) -> float:
        """Return the average over the whole run if the steps from ``step`` on follow ``plan``."""
        timed = self._timeline is not None and self._timeline.timed
        return self._ahead(plan, None, step, plan.last).average(timed=timed)

    def _ahead(self, plan: PrecisionPlan | None, current: PrecisionMap | None, step: int, until: int) -> BudgetSpent:
        """Return what will have been spent at ``until`` if steps from ``step`` on follow the plan, or ``current``."""
        total = replace(self.spent)
        if plan is None:
            assert current is not None
            total.add(self._share(current), current, max(0, until - step))
            return total
        starts = [step, *(phase.begin for phase in plan.phases[1:]), until]
        for phase, begin, end in zip(plan.phases, starts, starts[1:], strict=False):
            steps = min(end, until) - max(begin, step)
            if steps > 0:
                total.add(self._share(phase.precision_map), phase.precision_map, steps)
        return total

    def request(self, step: int, due: int, current: PrecisionMap) -> PhasedRequest | None:
        """Return the phases that an update before ``step`` must plan.

        They are those that remain at ``due``, where its plan is adopted, with what will have been spent then. Until
        then maps follow the plan, or the map ``current`` stays. None if maps do not depend on time, or if no step
        remains at ``due``.
        """
        timeline = self._timeline
        if timeline is None or timeline.schedule is None:
            return None
        origin, last = self.spent.origin, timeline.last
        if due >= last:
            return None
        spent = self._ahead(self._state.plan, current, step, due)
        return PhasedRequest.of_schedule(
            timeline.schedule,
            (origin, last),
            due,
            carried=lambda begins: timeline.carried(origin, begins, last),
            standing=timeline.standing,
            spent_steps=spent.steps,
            spent=spent.average(timed=timeline.timed),
        )

    # -- events ------------------------------------------------------------------------------------------------
    def figures(self, step: int) -> dict[str, Any]:
        """Return the fields of events about the plan in force."""
        plan = self._state.plan
        assert plan is not None
        average = self.average(plan, step)
        return {
            "version": plan.version,
            "status": plan.status,
            "target": plan.target,
            "average": average if math.isfinite(average) else None,
            "phase": plan.index_at(step),
            "phases": [
                {"from_step": phase.begin, "steps": steps, "fp4_fraction": self._share(phase.precision_map)}
                for phase, steps in zip(plan.phases, plan.steps, strict=True)
            ],
        }
