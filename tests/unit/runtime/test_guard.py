"""When a map is taken back, and what the next one must promise."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.exchange import StepFigures
from snip_megatron.runtime.guard import Alarm, Guard, GuardState, predicted_loss
from snip_megatron.runtime.state import ControllerState

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


def test_two_bad_batches_are_not() -> None:
    guard = Guard(SETTINGS)
    feed(guard, range(20))
    guard.adopted(20)
    assert feed(guard, range(20, 40), lambda step: 6.0 if step % 5 in (0, 1) else noisy(step), a_map()) is None
    assert guard.state.good == a_map()


def test_a_spike_before_the_adoption_is_not_its_fault() -> None:
    guard = Guard(SETTINGS)
    feed(guard, range(20))
    guard.adopted(26)  # the figures of steps 22 to 25 are still on their way
    assert feed(guard, range(20, 40), lambda step: 6.0 if 22 <= step < 26 else noisy(step), a_map()) is None


def test_a_loss_that_stays_higher_before_the_adoption_is_not_its_fault() -> None:
    """Another text, for example: the limit follows, so that the guard neither takes back every later map nor none."""
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


def test_with_few_losses_there_is_no_limit() -> None:
    guard = Guard(SETTINGS)
    feed(guard, range(5))
    guard.adopted(5)
    assert feed(guard, range(5, 20), lambda _: 100.0, a_map()) is None


def test_a_falling_loss_raises_no_alarm() -> None:
    """Losses before the adoption lie above those after it: the usual case."""
    guard = Guard(SETTINGS)
    feed(guard, range(100), lambda step: 10.0 / (1 + step))
    guard.adopted(100)
    assert feed(guard, range(100, 120), lambda step: 10.0 / (1 + step), a_map()) is None


# -- the bar ---------------------------------------------------------------------------------------------------
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


def test_a_map_under_a_time_budget_is_judged_by_its_loss() -> None:
    timed = replace(a_map(objective=7.0), budget="loss", loss=0.5, target=0.6)
    assert predicted_loss(timed) == 0.5
    assert predicted_loss(a_map(objective=7.0)) == 7.0


def stored(guard: Guard) -> GuardState:
    """What the checkpoint of a guard gives back."""
    found = ControllerState.from_bytes(ControllerState(guard=guard.state).to_bytes()).guard
    assert found is not None
    return found


# -- checkpoint ------------------------------------------------------------------------------------------------


def test_a_guard_that_a_resumed_run_switches_off_neither_takes_back_nor_refuses() -> None:
    guard = Guard(SETTINGS)
    guard.taken_back(a_map())
    feed(guard, range(20))
    guard.adopted(20)
    assert feed(guard, range(20, 22), lambda step: 6.0, a_map()) is None
    off = Guard(SnipConfig(guard_steps=0), stored(guard))
    assert feed(off, range(22, 30), lambda step: 6.0, a_map()) is None
    assert off.refuses(a_map()) is None
