"""Maps that change with time: the controller adopts a plan's phases, accounts for the steps, and resumes in between.

One real rank and real collectives of one; the solver's plans are scripted.
"""

from typing import Any

import pytest
from scripted_controller import FLOPS, LATE, Run, Script, planned, ready

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.phases import PrecisionPlan, Schedule, SchedulePhase
from snip_megatron.runtime.state import BudgetSpent, ControllerState, Timeline
from snip_megatron.sensitivity import SolveRequest
from snip_megatron.sensitivity.policies import late_plan

pytestmark = pytest.mark.usefixtures("one_rank")

BF16, FP8, FP4 = Format.BF16, Format.FP8, Format.FP4
HALVES = Schedule((SchedulePhase(0.0), SchedulePhase(0.5, Budget("fp4", 0.25), ("*:fprop",))))


def phased(last: int = 20, schedule: Schedule = HALVES, **fields: Any) -> Timeline:
    return Timeline(last, schedule, **fields)


def one_plan() -> Script:
    """Submitted before step 2, in force from 4 on: fp4 until half of 20 steps, then fp8."""
    return Script({1: [planned(1, 20, at_4=FP4, at_10=FP8)]})


def run_of(script: Script, restored: ControllerState | None = None, timeline: Timeline | None = None) -> Run:
    return Run(script, restored, timeline=timeline or phased(), update_interval=100)


def restored_from(run: Run) -> ControllerState:
    return ControllerState.from_bytes(run.controller.state_to_save())


def test_an_update_asks_for_the_phases_that_remain_with_what_will_be_spent() -> None:
    script = Script({1: [planned(1, 20, at_4=FP4, at_10=FP8)], 2: [planned(2, 20, at_10=FP4)]})
    script.answers[3] = [planned(3, 20, at_16=FP4)]
    run = Run(script, timeline=phased(standing=0.15), update_interval=6)
    run.steps(0, 20)
    first, second, _ = script.phases
    assert (first.begins, first.steps, first.budgets) == ((4, 10), (6, 10), (None, 0.25))
    assert first.change == (None, ("*:fprop",))
    assert (first.standing, first.carried) == ((0.0, 0.15), (0.3, 0.5))
    assert (first.spent_steps, first.spent) == (4, 0.0)  # two steps of the lag under bf16
    assert second is not None  # submitted before 8, in force from 10: four steps in fp4, two more of the lag
    assert (second.begins, second.steps) == ((10,), (10,))
    assert (second.spent_steps, second.spent) == (10, 0.6)
    assert script.of("skipped") == []
    assert run.formats[19] is FP4
    assert next(fields["phases"] for _, kind, fields in script.events if kind == "submit") == first.as_dict()


def test_an_update_whose_plan_would_come_after_the_end_is_left_out() -> None:
    script = Script()
    run_of(script, timeline=phased(last=4)).steps(0, 4)
    assert script.of("skipped") == [2]
    assert script.submitted == []


def test_a_late_plan_starts_in_the_phase_that_its_step_lies_in() -> None:
    script = Script({1: [LATE, LATE, LATE, LATE, planned(1, 20, at_4=FP4, at_10=FP8)]})
    run = run_of(script)
    run.steps(0, 20)
    assert script.of("adopt") == [12]
    assert (run.formats[11], run.formats[12]) == (BF16, FP8)


def test_a_phase_that_spikes_is_taken_back_and_ends_the_plan() -> None:
    script = Script({1: [planned(1, 60, at_20=FP8, at_40=FP4, at_56=FP8)]})
    fields = {"first_update": 18, "update_interval": 100, "guard_steps": 4}
    run = Run(script, timeline=phased(last=60), **fields)
    run.steps(0, 60, loss=lambda step: 9.0 if step >= 41 else 3.0 + 0.01 * (step % 3))
    assert script.of("adopt") == [20, 40, 45]
    (taken,) = [(step, fields) for step, kind, fields in script.events if kind == "guard"]
    assert taken[0] == 45  # three spikes in a row; their figures arrive a step late
    assert run.formats[44] is FP4
    assert run.formats[45] is FP8  # the first phase had passed its probation
    assert run.controller.state.plan is None
    assert script.of("phase") == [40]  # the third phase never begins


@pytest.mark.parametrize("at", [3, 7, 10])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(at: int) -> None:
    whole = run_of(one_plan())
    whole.steps(0, 20)
    part = run_of(one_plan())
    part.steps(0, at)
    resumed = run_of(one_plan(), restored_from(part))
    resumed.steps(at, 20)
    assert part.formats | resumed.formats == whole.formats
    assert restored_from(resumed) == restored_from(whole)
    phases = [step for step in whole.script.of("phase") if step >= at]
    assert resumed.script.of("phase") == phases
    assert resumed.script.phases == ([whole.script.phases[0]] if at <= 4 else [])  # what was on its way is asked again


def test_a_warm_checkpoint_s_steps_do_not_count() -> None:
    script = Script({1: [planned(1, 1020, at_1004=FP4, at_1010=FP8)]})
    run = Run(script, timeline=phased(last=1020), first_update=1002, update_interval=100)
    run.steps(1000, 1012)
    assert script.phases[0].begins == (1004, 1010)
    assert run.controller.state.spent == BudgetSpent(1000, 12, shares=6.0, times=12.0, last=1020)


def test_a_pending_plan_for_another_end_is_moved_when_it_comes() -> None:
    part = run_of(one_plan())
    part.steps(0, 3)
    resumed = run_of(one_plan(), restored_from(part), phased(last=40))
    resumed.steps(3, 24)
    assert [resumed.formats[s] for s in (3, 4, 19, 20)] == [BF16, FP4, FP4, FP8]


def test_steps_that_megatron_leaves_out_end_neither_the_account_nor_the_plan() -> None:
    """Steps 5 and 6 do not run, and 12 does not after the resume (--iterations-to-skip)."""
    part = run_of(one_plan())
    part.steps(0, 5)
    part.steps(7, 12)
    resumed = run_of(Script(), restored_from(part))
    resumed.steps(13, 20)
    assert {resumed.formats[step] for step in range(13, 20)} == {FP8}
    assert resumed.controller.state.plan == part.controller.state.plan
    assert resumed.controller.state.spent == BudgetSpent(0, 17, shares=4.0, times=17.0, last=20)


def test_a_pending_plan_becomes_a_map_in_a_run_without_phases() -> None:
    """A plan would be followed to its end, over the maps of later updates."""
    part = run_of(one_plan())
    part.steps(0, 3)
    script = Script({1: [ready(1)]})
    resumed = run_of(script, restored_from(part), Timeline(20))
    resumed.steps(3, 12)
    assert script.phases == [None]
    assert (resumed.formats[4], resumed.formats[11]) == (FP4, FP4)
    assert resumed.controller.state.plan is None


def late(policy: str, target: float) -> Timeline:
    request = SolveRequest(policy=policy, budget=Budget("fp4", target))

    def fixed(origin: int, last: int, step: int, spent: float) -> PrecisionPlan:
        return late_plan(request, FLOPS, origin, last, step=step, spent=spent)

    return Timeline(20, fixed=fixed)


def test_a_late_policy_resumes_its_plan_and_moves_it_with_the_end() -> None:
    part = Run(Script(), timeline=late("late-all", 0.9), policy="late-all", budget="fp4=0.9")
    part.steps(0, 5)
    state = restored_from(part)
    resumed = Run(Script(), state, timeline=late("late-all", 0.9), policy="late-all", budget="fp4=0.9")
    resumed.steps(5, 20)
    assert resumed.script.of("plan") == []
    assert [resumed.formats[s] for s in (5, 17, 18)] == [FP4, FP4, FP8]
    longer = Timeline(40, fixed=late("late-all", 0.9).fixed)
    moved = Run(Script(), restored_from(part), timeline=longer, policy="late-all", budget="fp4=0.9")
    moved.steps(5, 40)
    assert [moved.formats[s] for s in (35, 36)] == [FP4, FP8]


def test_a_late_policy_after_another_plan_makes_its_own() -> None:
    """A checkpoint of a run under another budget or policy: its steps count, its plan does not."""
    part = Run(Script(), timeline=late("late-all", 0.6), policy="late-all", budget="fp4=0.6")
    part.steps(0, 14)
    assert [part.formats[s] for s in (11, 12)] == [FP4, FP8]
    resumed = Run(Script(), restored_from(part), timeline=late("late-all", 0.8), policy="late-all", budget="fp4=0.8")
    resumed.steps(14, 20)
    assert resumed.script.of("plan") == [14]
    assert [resumed.formats[s] for s in (14, 17, 18, 19)] == [FP4, FP4, FP8, FP8]  # 12 and 4 of 20 in fp4


def test_the_average_of_speedups_is_harmonic() -> None:
    spent = BudgetSpent(0)
    spent.add(1.0, PrecisionMap({}, speedup=2.0), 10)
    spent.add(0.0, PrecisionMap({}), 10)
    assert spent.average(timed=True) == pytest.approx(20 / 15)
    assert spent.average(timed=False) == 0.5
    assert BudgetSpent(5).average(timed=True) == BudgetSpent(5).average(timed=False) == 0.0
