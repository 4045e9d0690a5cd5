"""The controller takes maps back after spikes; one real rank, scripted answers."""

from dataclasses import replace

import pytest
from scripted_controller import Run, Script, ready

from snip_megatron.precision import Format
from snip_megatron.runtime.exchange import Decision
from snip_megatron.runtime.state import ControllerState

pytestmark = pytest.mark.usefixtures("one_rank")


def spike(step: int) -> float:
    return 9.0 if step >= 22 else 3.0 + 0.01 * (step % 3)


def guarded(script: Script, restored: ControllerState | None = None) -> Run:
    return Run(script, restored, first_update=18, update_interval=6, guard_steps=5)


def objective(decision: Decision, value: float) -> Decision:
    assert decision.precision_map is not None
    return Decision(replace(decision.precision_map, objective=value))


def spiky_answers() -> dict[int, list[Decision]]:
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
    first, second = capsys.readouterr().out.splitlines()
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
    """Whenever the checkpoint was written, also while figures or a verdict were on their way."""
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
