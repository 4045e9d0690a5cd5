"""The checkpoint's state: figures on their way survive it."""

from typing import Any

import pytest
from scripted_controller import Run, Script, planned, ready

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.precision.phases import AUTO, Schedule, SchedulePhase
from snip_megatron.runtime.exchange import StepFigures
from snip_megatron.runtime.guard import Alarm, GuardState
from snip_megatron.runtime.state import BudgetSpent, ControllerState, Goal, Timeline

pytestmark = pytest.mark.usefixtures("one_rank")

FULL = ControllerState(
    grad_norm=1.5,
    guard=GuardState((3.0, 2.5), 18, strikes=1, bar=0.5, good=PrecisionMap({}, objective=0.5)),
    alarm=Alarm(7, "a spike", 6.0, 5.0),
    in_flight=StepFigures(6, 3.0, 0.5, broken=True, answered=True),
    spent=BudgetSpent(0, 7, 3.5, 6.0, 20),
    goal=Goal("fp4=0.5", "static"),
)


def test_every_part_is_the_same_afterwards() -> None:
    assert ControllerState.from_bytes(FULL.to_bytes()) == FULL


HALVES = Schedule((SchedulePhase(0.0), SchedulePhase(0.5)))


def saved(steps: int, *, timeline: Timeline | None = None, **fields: Any) -> ControllerState:
    """Return the checkpoint before ``steps``. Its update begins before step 2, and is due at 4."""
    answer = ready(1) if timeline is None else planned(1, 40, at_4=Format.FP4, at_20=Format.FP8)
    run = Run(Script({1: [answer]}), timeline=timeline, **{"update_interval": 10, **fields})
    run.steps(0, steps)
    return ControllerState.from_bytes(run.controller.state_to_save())


def resumed(state: ControllerState, step: int, *, timeline: Timeline | None = None, **fields: Any) -> Script:
    script = Script({1: [ready(1)]})
    Run(script, state, timeline=timeline, **{"update_interval": 10, **fields}).steps(step, step + 1)
    return script


PHASED: dict[str, Any] = {"timeline": Timeline(40, AUTO), "schedule": "auto"}


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        (PHASED, PHASED | {"budget": "fp4=0.5"}, "with --snip-budget fp4=0.75: its plan goes on until the next update"),
        (PHASED, {"timeline": Timeline(40)}, "with another --snip-schedule: its map goes on until the next update"),
        ({}, PHASED | {"budget": "fp4=0.5"}, "with --snip-budget fp4=0.75 and another --snip-schedule: its map goes"),
    ],
    ids=["budget", "no phases", "both"],
)
def test_what_the_checkpoint_had_asked_for_goes_on(
    before: dict[str, Any], after: dict[str, Any], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = saved(6, **before)
    resumed(state, 6, **after)
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert line in said


@pytest.mark.parametrize("fields", [{}, PHASED, {"budget": "fp4=0.750"}], ids=["map", "plan", "spelling"])
def test_a_resume_with_the_same_arguments_says_nothing(
    fields: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    state = saved(6, **(fields if "budget" not in fields else {}))
    resumed(state, 6, **fields)
    assert capsys.readouterr().out == ""


def test_an_undecided_update_is_planned_over_the_new_phases(capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint lies between the second update's probe before step 12 and its decision at 14."""
    state = saved(13, **PHASED)
    script = resumed(state, 13, timeline=Timeline(40, HALVES), schedule="static", budget="fp4=0.5")
    assert "its plan goes on until the next update" in capsys.readouterr().out
    (phases,) = script.phases
    assert phases is not None
    assert phases.begins == (14, 20)
    assert phases.spent_steps == 14
    assert phases.spent == pytest.approx(10 / 14)
