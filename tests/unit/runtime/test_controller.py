"""The controller's decisions, on one real rank; the solver's answers and their delays are scripted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest
import scripted_controller
from scripted_controller import LATE, LOST, NAMES, Run, Script, a_map, ready, table

from snip_megatron.layers.context import ALL_BF16
from snip_megatron.precision import Format, Gemm, PrecisionMap
from snip_megatron.reporting.sinks import WriterSink
from snip_megatron.runtime import controller
from snip_megatron.runtime.adoption import Decision, MapChannel, Verdict
from snip_megatron.runtime.controller import fp4_fraction
from snip_megatron.runtime.state import ControllerState
from snip_megatron.sensitivity.phased import PhasedRequest
from snip_megatron.statistics.table import StatisticsTable

pytestmark = pytest.mark.usefixtures("one_rank")


def test_an_update_that_cannot_be_measured_is_left_out() -> None:
    run = Run(Script({1: [ready(1)]}))
    run.short = {2}
    run.steps(0, 12)
    assert run.script.of("dropped") == [2]
    assert run.script.of("probe") == [8]
    assert run.script.submitted == [(8, 1)]
    assert run.script.of("adopt") == [10]
    (fields,) = [fields for _, kind, fields in run.script.events if kind == "dropped"]
    assert (fields["reason"], fields["free_bytes"]) == ("too little", 1.0)
    assert run.formats[7] is Format.BF16


def test_the_events_of_an_update_add_up_to_the_time_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on where a probe and the hand-over to the solver take time; the probe's passes tell 0.3 of 10."""
    now = [0.0]

    class Slow(Script):
        def submit(self, step: int, table: StatisticsTable, version: int, phases: PhasedRequest | None = None) -> None:
            now[0] += 2.0
            super().submit(step, table, version, phases)

        def adopted(self, step: int, precision_map: PrecisionMap) -> None:
            now[0] += 3.0

    def slow_table(step: int, value: float) -> StatisticsTable:
        now[0] += 10.0
        return table(step, value)

    monkeypatch.setattr(controller.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(scripted_controller, "table", slow_table)
    run = Run(Slow({1: [ready(1)]}))
    run.steps(0, 5)
    waits = {kind: fields["wait_s"] for _, kind, fields in run.script.events if fields.get("wait_s")}
    assert waits == pytest.approx({"probe": 0.1, "collect": 0.2, "submit": 11.7, "adopt": 3.0})
    assert sum(waits.values()) == pytest.approx(now[0])


def test_what_is_compiled_before_the_first_step_is_an_event() -> None:
    formats = []

    def prepare() -> dict[str, float]:
        formats.append(run.registry.current.format_of(NAMES[0], Gemm.FPROP))
        return {"kernels": 7, "compiled": 3}

    first = Decision(Verdict.MAP, a_map(Format.FP8))
    run = Run(Script({1: [ready(1)]}, first=first), prepare=prepare)
    run.steps(0, 3)
    ((step, _, fields),) = [event for event in run.script.events if event[1] == "compile"]
    assert (step, fields["kernels"], fields["compiled"]) == (0, 7, 3)
    assert fields["wait_s"] >= 0.0
    assert formats == [Format.FP8]  # the map to begin with is in force, and it is done once
    nothing = Run(Script())
    nothing.steps(0, 1)
    assert nothing.script.of("compile") == []


def test_an_update_is_adopted_after_its_lag() -> None:
    run = Run(Script({1: [ready(1)], 2: [ready(2, Format.FP8)]}))
    run.steps(0, 12)
    assert run.script.submitted == [(2, 1), (8, 2)]
    assert run.script.of("adopt") == [4, 10]
    assert [run.formats[s] for s in (3, 4, 9, 10)] == [Format.BF16, Format.FP4, Format.FP4, Format.FP8]
    assert run.script.of("probe") == [2, 8]
    assert run.script.of("collect") == [2, 8]
    _, _, first = next(e for e in run.script.events if e[1] == "adopt")
    assert (first["version"], first["changed"], first["fp4_fraction"], first["status"]) == (1, 12, 1.0, "optimal")


def test_captures_of_cuda_graphs_are_events_that_held_the_run_up() -> None:
    run = Run(Script({}))
    run.controller.captured(5, "capture", 0.75, {})
    run.controller.captured(6, "recapture", 0.5, {"layers": 3})
    assert run.script.events == [
        (5, "capture", {"seconds": 0.75, "wait_s": 0.75}),
        (6, "recapture", {"seconds": 0.5, "layers": 3, "wait_s": 0.5}),
    ]


def test_the_loss_on_the_test_set_is_no_validation() -> None:
    """After the last step Megatron validates, and then evaluates the test set in the same way."""
    run = Run(Script(), first_update=100)
    run.steps(0, 3)
    run.controller.validated({"map": 2.0, "bf16": 1.0})
    run.steps(3, 5)
    run.controller.validated({"map": 1.5})
    run.controller.validated({"map": 9.0})
    named = [(step, kind, fields["loss"]) for step, kind, fields in run.script.events]
    assert named == [(3, "validation", 2.0), (3, "validation", 1.0), (5, "validation", 1.5), (5, "test", 9.0)]


def test_a_late_answer_is_postponed_by_whole_lags_on_every_rank() -> None:
    run = Run(Script({1: [LATE, ready(1)]}))
    run.steps(0, 8)
    assert run.script.of("postpone") == [4]
    assert run.script.of("adopt") == [6]
    assert run.controller.state.pending is None


def test_an_update_that_is_due_while_one_is_pending_is_left_out() -> None:
    run = Run(Script({1: [LATE, LATE, LATE, LATE, ready(1)]}))
    run.steps(0, 13)
    assert run.script.of("skipped") == [8]
    assert run.script.submitted == [(2, 1)]
    assert run.script.of("adopt") == [12]


def test_an_update_of_a_step_that_megatron_leaves_out_starts_before_the_next_one() -> None:
    run = Run(Script({1: [ready(1)], 2: [ready(2)]}))
    run.steps(0, 2)
    run.steps(4, 9)  # --iterations-to-skip: before step 2 an update is due
    assert run.script.submitted == [(4, 1), (8, 2)]
    assert run.script.of("adopt") == [6]


def test_a_lost_update_keeps_the_map() -> None:
    run = Run(Script({1: [LOST], 2: [ready(2)]}))
    run.steps(0, 11)
    assert run.script.of("adopt") == [10]
    assert run.formats[9] is Format.BF16
    (kept,) = [fields for _, kind, fields in run.script.events if kind == "kept"]
    assert kept["version"] == 1
    assert kept["wait_s"] >= 0.0  # the wait for the solver is told


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_statistic_that_is_not_finite_drops_the_update(value: float, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(Script())
    run.value = value
    run.steps(0, 7)
    assert capsys.readouterr().out.startswith("snip: the update of step 2 is dropped: not finite: ")
    assert run.script.of("dropped") == [2]
    assert run.script.submitted == []
    assert run.controller.state.pending is None
    assert run.handle.formats == ALL_BF16


def test_a_probe_whose_tokens_are_all_masked_drops_the_update() -> None:
    """All scores would be zero, and the solver would take any map that meets the budget."""
    run = Run(Script())
    run.value = 0.0
    run.steps(0, 7)
    assert run.script.of("dropped") == [2]
    assert run.script.submitted == []
    assert run.handle.formats == ALL_BF16


@pytest.mark.parametrize(("wait", "collectives"), [(0.0, 2), (30.0, 4)])
def test_a_postponed_decision_asks_again_only_when_there_is_an_answer(
    wait: float, collectives: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures of the steps tell all ranks that nothing has come; with --snip-wait rank 0 may wait for it."""
    asked: list[int] = []
    genuine = MapChannel.agree
    monkeypatch.setattr(MapChannel, "agree", lambda channel, own: asked.append(1) or genuine(channel, own))
    run = Run(Script({1: [LATE] * (collectives - 1) + [ready(1)]}, silent={1}), update_interval=50, wait=wait)
    run.steps(0, 9)
    assert run.script.of("postpone") == [4, 6, 8]
    run.script.silent.clear()
    run.script.answers[1] = [ready(1)]
    run.steps(9, 14)
    assert run.script.of("adopt") == [12 if not wait else 10]
    assert len(asked) - 1 == collectives  # the first one is the start's


def test_a_checkpoint_leaves_no_step_unrecorded() -> None:
    """A process killed after its save: what resumes from step 3 will not do step 2 again."""
    run = Run(Script(), first_update=100)
    run.steps(0, 3)
    run.controller.state_to_save()
    assert [m[0] for m in run.script.metrics] == [0, 1, 2]
    run.steps(3, 5)
    assert [m[0] for m in run.script.metrics] == [0, 1, 2, 3]


def test_metrics_come_a_step_late_with_the_share_of_their_step() -> None:
    run = Run(Script({1: [ready(1)]}))
    run.steps(0, 6)
    assert [m[0] for m in run.script.metrics] == [0, 1, 2, 3, 4]
    run.controller.close(together=True)
    assert run.script.metrics[3:] == [(3, 7.0, 0.5, 0.0), (4, 6.0, 0.5, 1.0), (5, 5.0, 0.5, 1.0)]
    assert run.script.closed


def test_after_an_error_nobody_waits_for_the_others() -> None:
    run = Run(Script())
    run.steps(0, 2)
    run.controller.close(together=False)
    assert [m[0] for m in run.script.metrics] == [0]
    assert run.script.closed


@pytest.mark.parametrize(
    ("norm", "clip"), [(0.5, 1.0), (4.0, 0.25), (None, 1.0), (float("inf"), 1.0), (float("nan"), 1.0), (0.0, 1.0)]
)
def test_the_probe_is_told_what_clipping_did_to_the_last_step(norm: float | None, clip: float) -> None:
    run = Run(Script({1: [LATE]}))
    run.steps(0, 3, grad_norm=norm)
    assert run.clips == [pytest.approx(clip, rel=1e-5)]


# -- maps to begin with ----------------------------------------------------------------------------------------
def test_a_fixed_map_holds_from_the_first_step() -> None:
    run = Run(Script(first=Decision(Verdict.MAP, a_map(Format.FP8))), policy="uniform-fp8")
    run.steps(5, 30)
    assert run.script.of("adopt") == [5]
    assert set(run.formats.values()) == {Format.FP8}
    assert run.clips == []


def test_a_replay_adopts_at_the_recorded_steps() -> None:
    run = Run(Script(schedule={3: a_map(Format.FP4), 7: a_map(Format.FP8)}), replay="run")
    run.steps(0, 9)
    assert run.script.of("adopt") == [3, 7]
    assert [run.formats[s] for s in (2, 3, 6, 7)] == [Format.BF16, Format.FP4, Format.FP4, Format.FP8]


@pytest.mark.parametrize("restored", [None, ControllerState(precision_map=a_map(Format.NVFP4, 9))])
def test_a_replay_that_begins_later_has_the_map_that_was_in_force(restored: ControllerState | None) -> None:
    """From a checkpoint without SNIP, or of another run."""
    run = Run(Script(schedule={3: a_map(Format.FP4), 7: a_map(Format.FP8)}), restored, replay="run")
    run.steps(5, 9)
    assert run.script.of("adopt") == [5, 7]
    assert [run.formats[s] for s in (5, 6, 7)] == [Format.FP4, Format.FP4, Format.FP8]


def test_a_resumed_run_goes_on_where_it_stopped() -> None:
    """Saved between submission and decision: the same decision at the same step, without another probe."""
    whole = Run(Script({1: [ready(1)], 2: [ready(2, Format.FP8)]}))
    whole.steps(0, 9)
    state = ControllerState.from_bytes(whole.controller.state.to_bytes())
    resumed = Run(Script({2: [ready(2, Format.FP8)]}), restored=state)
    resumed.steps(9, 12)
    assert resumed.script.submitted == [(8, 2)]  # the solver is asked anew, with the same table
    assert resumed.script.of("adopt") == [9, 10]  # the map in force, then the decision
    assert [resumed.formats[s] for s in (9, 10)] == [Format.FP4, Format.FP8]
    assert resumed.clips == []


# -- the share -------------------------------------------------------------------------------------------------
def test_fp4_fraction_weighs_by_flops_and_counts_all_formats_of_four_bits() -> None:
    flops = {"decoder.layers.0.mlp.linear_fc1": 3.0, "decoder.layers.0.mlp.linear_fc2": 1.0}
    fc1, fc2 = flops
    assert fp4_fraction(PrecisionMap(choices={f"{fc1}:fprop": Format.FP4}), flops) == 3 / 12
    mixed = {fc2: Format.NVFP4, f"{fc2}:dgrad": Format.FP8, f"{fc1}:wgrad": Format.MXFP4}
    assert fp4_fraction(PrecisionMap(choices=mixed), flops) == (2 * 1 + 3) / 12
    assert fp4_fraction(PrecisionMap(choices={}), {}) == 0.0


def test_loggers_of_the_last_rank_get_rank_zeros_figures_at_the_step_they_are_of() -> None:
    class Kept(WriterSink):
        rows: ClassVar[dict[int, dict[str, float]]] = {}

        def _write(self, iteration: int, figures: Mapping[str, float]) -> None:
            self.rows[iteration] = dict(figures)

        def _write_map(self, iteration: int, precision_map: PrecisionMap, linears: Sequence[str]) -> None: ...

    news = iter([None, {"step_s": 0.5, "speedup": 1.25, "saved_h": 3.0}, None])
    Run(Script(), sink=Kept(object()), news=lambda: next(news)).steps(0, 3)
    assert Kept.rows == {
        1: {"snip/fp4_fraction": 0.0},
        2: {"snip/fp4_fraction": 0.0, "snip/step_s": 0.5, "snip/speedup": 1.25, "snip/saved_h": 3.0},
    }
