"""When a map is taken back, and what the next one must promise."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_controller import Answer, Run, Script, ready

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.exchange import StepFigures
from snip_megatron.runtime.guard import Alarm, Guard
from snip_megatron.runtime.state import ControllerState

pytestmark = pytest.mark.usefixtures("one_rank")

NAMES = ["decoder.layers.0.mlp.linear_fc1"]
SETTINGS = SnipConfig(guard_steps=20, guard_sigma=5.0)


def a_map(version: int = 1, objective: float | None = 1.0) -> PrecisionMap:
    return replace(PrecisionMap.uniform(NAMES, Format.FP4, version=version, status="optimal"), objective=objective)


def noisy(step: int) -> float:
    return 3.0 + 0.05 * ((step * 7919) % 11 - 5) / 5


def feed(guard: Guard, steps: range, loss=noisy, in_force: PrecisionMap | None = None) -> Alarm | None:
    for step in steps:
        alarm = guard.observe(StepFigures(step, loss(step), 1.0), in_force)
        if alarm is not None:
            return alarm
    return None


def test_three_losses_in_a_row_above_the_limit_are_a_verdict() -> None:
    guard = Guard(SETTINGS)
    feed(guard, range(20))
    guard.adopted(20)
    alarm = feed(guard, range(20, 40), lambda step: 6.0 if step >= 25 else noisy(step), a_map())
    assert (alarm.step, alarm.loss) == (27, 6.0)
    assert 3.05 < alarm.limit < 3.5


@pytest.mark.parametrize(
    ("before", "adopted", "loss"),
    [
        (20, 20, lambda step: 6.0 if step >= 20 and step % 5 in (0, 1) else noisy(step)),
        (20, 26, lambda step: 6.0 if 22 <= step < 26 else noisy(step)),  # figures of steps before the adoption
        (5, 5, lambda step: noisy(step) if step < 5 else 100.0),
        (20, 20, lambda step: 10.0 / (1 + step)),
    ],
    ids=["two bad batches", "a spike before the adoption", "too few losses for a limit", "a falling loss"],
)
def test_what_raises_no_alarm(before: int, adopted: int, loss: Callable[[int], float]) -> None:
    guard = Guard(SETTINGS)
    feed(guard, range(before), loss)
    guard.adopted(adopted)
    assert feed(guard, range(before, adopted + 20), loss, a_map()) is None
    assert guard.state.good == (None if before < 20 and guard.state.strikes else a_map())


def test_a_loss_that_stays_higher_before_the_adoption_is_not_its_fault() -> None:
    """The text may change, for example. The limit follows, so that the guard still takes back bad maps alone."""
    guard = Guard(SETTINGS)
    feed(guard, range(20))
    feed(guard, range(20, 100), lambda step: 1.0 + noisy(step))
    guard.adopted(100)
    assert feed(guard, range(100, 120), lambda step: 1.0 + noisy(step), a_map()) is None
    guard.adopted(200)
    feed(guard, range(120, 200), lambda step: 1.0 + noisy(step))
    assert feed(guard, range(200, 220), lambda step: 2.0 + noisy(step), a_map()) is not None


def test_one_figure_that_is_not_finite_is_enough() -> None:
    guard = Guard(SETTINGS)
    guard.adopted(3)
    assert guard.observe(StepFigures(2, None, None, broken=True), a_map()) is None  # a step of the map before
    alarm = guard.observe(StepFigures(3, None, None, broken=True), a_map())
    assert "not finite" in alarm.reason


def test_the_next_map_must_promise_a_smaller_loss() -> None:
    guard = Guard(SETTINGS)
    assert guard.refuses(a_map(objective=5.0)) is None
    guard.taken_back(a_map(objective=1.0))
    assert guard.refuses(a_map(objective=0.95)) is not None
    assert guard.refuses(a_map(objective=0.89)) is None


def test_the_bar_is_lifted_after_three_maps_or_by_a_good_one() -> None:
    guard = Guard(SETTINGS)
    guard.taken_back(a_map(objective=1.0))
    reasons = [guard.refuses(a_map(objective=1.0)) for _ in range(4)]
    assert [reason is not None for reason in reasons] == [True, True, True, False]
    assert "lifted" in (reasons[2] or "")
    guard.taken_back(a_map(objective=1.0))
    guard.adopted(0)
    feed(guard, range(20), in_force=a_map())
    assert guard.refuses(a_map(objective=1.0)) is None


@given(st.floats(-1e3, 1e3, allow_nan=False))
def test_the_bar_is_never_above_the_map_that_failed(objective: float) -> None:
    guard = Guard(SETTINGS)
    guard.taken_back(a_map(objective=objective))
    assert guard.refuses(a_map(objective=objective + 1e-6 + abs(objective) * 1e-6)) is not None


def test_a_guard_that_a_resumed_run_switches_off_neither_takes_back_nor_refuses() -> None:
    guard = Guard(SETTINGS)
    guard.taken_back(a_map())
    feed(guard, range(20))
    guard.adopted(20)
    assert feed(guard, range(20, 22), lambda step: 6.0, a_map()) is None
    stored = ControllerState.from_bytes(ControllerState(guard=guard.state).to_bytes()).guard
    off = Guard(SnipConfig(guard_steps=0), stored)
    assert feed(off, range(22, 30), lambda step: 6.0, a_map()) is None
    assert off.refuses(a_map()) is None


def spike(step: int) -> float:
    return 9.0 if step >= 22 else 3.0 + 0.01 * (step % 3)


def guarded(script: Script, restored: ControllerState | None = None) -> Run:
    return Run(script, restored, first_update=18, update_interval=6, guard_steps=5)


def objective(answer: Answer, value: float) -> Answer:
    assert answer is not None
    (candidate,) = answer
    return (replace(candidate, precision_map=replace(candidate.precision_map, objective=value)),)


def spiky_answers() -> dict[int, list[Answer]]:
    """The first map spikes; the second promises no less loss, the third does."""
    losses = {1: 1.0, 2: 0.95, 3: 0.5}
    return {version: [objective(ready(version), value)] for version, value in losses.items()}


def test_a_spike_takes_the_map_back_two_steps_later_and_raises_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    run = guarded(Script(spiky_answers()))
    run.steps(0, 30, loss=lambda step: spike(step) if step < 26 else 3.0)
    run.steps(30, 34, loss=lambda _: 3.0)
    # Spikes at 22, 23 and 24; the figures of 24 arrive after 25.
    assert run.script.of("adopt") == [20, 26, 32]
    assert [run.formats[s] for s in (19, 20, 25, 26, 31, 32)] == [
        Format.BF16, Format.FP4, Format.FP4, Format.BF16, Format.BF16, Format.FP4,
    ]  # fmt: skip
    guards = [(step, fields["action"]) for step, kind, fields in run.script.events if kind == "guard"]
    assert guards == [(26, "taken_back"), (26, "refused")]
    taken, refused = (fields for _, kind, fields in run.script.events if kind == "guard")
    assert ("wait_s" in taken, "wait_s" in refused) == (False, True)  # the adoption of the good map has the first one's
    assert (taken["version"], taken["alarm_step"], taken["loss"]) == (1, 24, 9.0)
    alarm, first, second = capsys.readouterr().out.splitlines()
    advice = "to find out what is to blame, run torchrun job --snip-blame 25"
    assert alarm == f"snip: step 24: 3 losses in a row above 3.058: {advice}"
    assert first == "snip: step 26: the guard has taken back map 1: 3 losses in a row above 3.058"
    assert second.startswith("snip: step 26: the guard has refused map 2: its predicted loss 0.95 is above 0.9, ")


def test_what_passed_its_probation_is_what_a_later_map_goes_back_to() -> None:
    run = guarded(Script({1: [ready(1, Format.FP8)], 2: [ready(2)], 3: [ready(3, Format.FP8)]}))
    run.steps(0, 27, loss=lambda _: 3.0)
    run.steps(27, 28, loss=lambda _: 3.0, grad_norm=float("nan"))
    run.steps(28, 31, loss=lambda _: 3.0)
    assert [run.formats[s] for s in (25, 26, 28, 29)] == [Format.FP8, Format.FP4, Format.FP4, Format.FP8]


@pytest.mark.parametrize("stop", [21, 24, 25, 28])
def test_a_resumed_run_takes_the_map_back_at_the_same_step(stop: int) -> None:
    """The checkpoint may be written at any time, also while figures or a verdict are on their way."""
    first = guarded(Script(spiky_answers()))
    first.steps(0, stop, loss=spike)
    state = ControllerState.from_bytes(first.controller.state_to_save())
    answers = {version: answer for version, answer in spiky_answers().items() if version > 1 or stop <= 20}
    second = guarded(Script(answers), state)
    second.steps(stop, 30, loss=spike)
    whole = guarded(Script(spiky_answers()))
    whole.steps(0, 30, loss=spike)
    assert {step: fmt for step, fmt in whole.formats.items() if step >= stop} == second.formats
    assert [e for e in whole.script.of("guard") if e >= stop] == second.script.of("guard")
