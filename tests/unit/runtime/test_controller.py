"""The controller's decisions, on one real rank; the solver's answers and their delays are scripted."""

from dataclasses import replace

import pytest
import torch
from scripted_controller import LATE, NAMES, Run, Script, SlowKernels, a_map, measured, ready, table

from snip_megatron.precision import Format
from snip_megatron.runtime.exchange import UpdateDroppedError
from snip_megatron.runtime.host import ProbeResult
from snip_megatron.runtime.state import ControllerState

pytestmark = pytest.mark.usefixtures("one_rank")


def test_a_late_answer_is_postponed_by_whole_lags_on_every_rank() -> None:
    """An update that is due while one is pending is left out."""
    run = Run(Script({1: [LATE, LATE, LATE, LATE, ready(1)]}))
    run.steps(0, 13)
    assert run.script.of("postpone") == [4, 6, 8, 10]
    assert run.script.of("skipped") == [8]
    assert run.script.submitted == [(2, 1)]
    assert run.script.of("adopt") == [12]
    assert run.controller.state.pending is None


def test_the_first_update_waits_for_kernels_by_whole_lags_across_a_resume() -> None:
    run = Run(Script(), kernels=SlowKernels(4))
    run.steps(0, 3)
    assert [(step, fields["until"]) for step, kind, fields in run.script.events if kind == "postpone"] == [(2, 4)]
    restored = ControllerState.from_bytes(run.controller.state_to_save())
    resumed = Run(Script({1: [ready(1)]}), restored, kernels=SlowKernels(2), update_interval=50)
    resumed.steps(3, 9)
    assert resumed.script.of("postpone") == [4]
    assert resumed.script.of("compile") == [6]
    assert resumed.script.submitted == [(6, 1)]
    assert resumed.script.of("adopt") == [8]


def test_kernels_are_listed_for_the_map_of_the_checkpoint() -> None:
    """Its adoption comes before they are, and does not count as a wait for them."""
    kernels = SlowKernels(4)
    run = Run(Script(), ControllerState(precision_map=a_map(Format.FP8, 1)), kernels=kernels)
    run.steps(0, 3)
    assert (run.script.of("adopt"), run.script.of("postpone"), kernels.waited) == ([0], [2], 0)


def test_a_run_that_waits_for_maps_waits_for_kernels() -> None:
    run = Run(Script({1: [ready(1)]}), kernels=SlowKernels(100), wait=60.0)
    run.steps(0, 5)
    assert (run.script.of("compile"), run.script.submitted, run.script.of("adopt")) == ([2], [(2, 1)], [4])


def test_a_linear_that_no_gradient_reaches_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    statistics = table(2)
    statistics.linear["g2"][-1] = 0.0
    run = Run(Script())
    run.controller.before_step(2, lambda clip: measured(statistics))
    assert run.script.submitted == [(2, 1)]
    assert capsys.readouterr().out.startswith(f"snip: no gradient reaches {NAMES[-1]} (1 such linears): ")


@pytest.mark.parametrize(
    ("norm", "clip"), [(0.5, 1.0), (4.0, 0.25), (None, 1.0), (float("inf"), 1.0), (float("nan"), 1.0), (0.0, 1.0)]
)
def test_the_probe_gets_the_factor_of_clipping_of_the_last_step(norm: float | None, clip: float) -> None:
    run = Run(Script({1: [LATE]}))
    run.steps(0, 3, grad_norm=norm)
    assert run.clips == [pytest.approx(clip, rel=1e-5)]


def test_a_dropped_update_is_tried_again_after_a_lag_and_after_three_ever_later(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """This holds across a resume, and where another update would be due. A success ends it."""
    probes: list[int] = []
    restored = None
    broken = table(0)
    broken.linear["g2"][0] = float("inf")
    for start, end in ((0, 12), (12, 42)):
        run = Run(Script({1: [ready(1)], 2: [ready(2)]}), restored)
        for step in range(start, end):

            def probe(clip: float, step: int = step) -> ProbeResult:
                probes.append(step)
                if step == 2:
                    raise UpdateDroppedError("rank 1 on there, statistics: OutOfMemoryError: none left", sequences=2)
                return measured(replace(broken if step < 34 else table(step), step=step))

            run.controller.before_step(step, probe)
            run.controller.after_step(step, torch.tensor(1.0), 0.5)
            assert run.controller.state.sequences == (None if step < 2 else 2 if step < 34 else 1)
        restored = ControllerState.from_bytes(run.controller.state_to_save())
    assert probes == [2, 4, 6, 10, 18, 34, 38]  # 8, 14, 20, … are every sixth step after the first update
    assert run.script.submitted == [(34, 1), (38, 2)]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("snip: the update of step 2 is dropped: rank 1 on there, statistics: OutOfMemoryError: ")
    assert lines[0].endswith("; the next try is before step 4")
    assert sum("3 updates in a row were dropped" in line for line in lines) == 1


def test_the_time_between_tries_has_a_bound() -> None:
    run = Run(Script(), ControllerState(failures=60))

    def probe(clip: float) -> ProbeResult:
        raise UpdateDroppedError("no memory")

    run.controller.before_step(2, probe)
    assert run.controller.state.postponed == 2 + 16 * run.controller.config.update_interval


@pytest.mark.parametrize("restored", [None, ControllerState(precision_map=a_map(Format.NVFP4, 9))])
def test_a_replay_that_begins_later_has_the_map_that_was_in_force(restored: ControllerState | None) -> None:
    """It begins at a checkpoint without SNIP, or at one of another run."""
    run = Run(Script(schedule={3: a_map(Format.FP4), 7: a_map(Format.FP8)}), restored, replay="run")
    run.steps(5, 9)
    assert run.script.of("adopt") == [5, 7]
    assert [run.formats[s] for s in (5, 6, 7)] == [Format.FP4, Format.FP4, Format.FP8]


def test_a_loop_that_goes_on_after_its_end_counts_no_loss_twice() -> None:
    """The state of a run that was saved before its end has figures that have arrived since."""
    run = Run(Script(), first_update=100)
    run.steps(0, 5)
    run.controller.state_to_save()
    run.steps(5, 8)
    run.controller.close(together=True)
    again = Run(Script(), run.controller.state, first_update=100)
    again.steps(8, 10)
    losses = again.controller.state.guard.losses
    assert len(set(losses)) == len(losses) > 5
