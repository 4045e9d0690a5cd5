"""The controller's decisions, on one real rank; the solver's answers and their delays are scripted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from snip_megatron.adoption import Decision, MapChannel, Verdict
from snip_megatron.config import SnipConfig
from snip_megatron.controller import Controller, Unmeasured, fp4_fraction
from snip_megatron.controller_state import ControllerState
from snip_megatron.layers.context import ALL_BF16, LinearHandle, StepContext
from snip_megatron.layers.registry import LinearRegistry, decoder_linear_names
from snip_megatron.precision import Format, LinearId, PrecisionMap
from snip_megatron.reporting.wandb_sink import WandbSink
from snip_megatron.statistics.table import (
    BOUNDARY_COLUMNS,
    FORMAT_COLUMNS,
    LINEAR_COLUMNS,
    RHO_GRID,
    LinearRow,
    StatisticsTable,
)
from snip_megatron.step_report import StepFigures, StepReport

NAMES = decoder_linear_names(1)
CPU = torch.device("cpu")
LINEAR = LinearId(0, "mlp.linear_fc1")
FLOPS = dict.fromkeys(NAMES, 2.0)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def table(step: int, value: float = 1.0) -> StatisticsTable:
    n = len(NAMES)
    return StatisticsTable(
        step=step,
        tokens=8,
        tokens_per_step=8,
        formats=("fp8", "fp4"),
        linears=tuple(LinearRow(name, 0, 4, 4) for name in NAMES),
        sinks=(),
        linear={c: np.full(n, value) for c in LINEAR_COLUMNS},
        by_format={c: np.ones((n, 2)) for c in FORMAT_COLUMNS},
        boundary={c: np.ones(3) for c in BOUNDARY_COLUMNS},
        drift2=np.ones((n, len(RHO_GRID))),
        sink_drift2=np.ones((0, len(RHO_GRID))),
        sink_w2=np.ones(0),
    )


@dataclass
class Measured:
    table: StatisticsTable
    seconds: dict[str, float] = field(default_factory=lambda: {"statistics": 0.1, "reduction": 0.2})
    tokens: int = 8
    passes: dict[str, int] = field(default_factory=lambda: {"statistics": 1})


@dataclass
class Script:
    """Rank 0's side: version -> the answers at its decisions, in turn."""

    answers: dict[int, list[Decision]] = field(default_factory=dict)
    first: Decision = field(default_factory=lambda: Decision(Verdict.DROPPED))
    schedule: dict[int, PrecisionMap] = field(default_factory=dict)
    events: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    submitted: list[tuple[int, int]] = field(default_factory=list)
    metrics: list[tuple[int, float | None, float | None, float]] = field(default_factory=list)
    silent: set[int] = field(default_factory=set)
    closed: bool = False

    def submit(self, step: int, table: StatisticsTable, version: int) -> None:
        assert table.step == step
        self.submitted.append((step, version))

    def pump(self, step: int) -> None: ...

    def answered(self, version: int) -> bool:
        return version not in self.silent

    def decision(self, step: int, version: int) -> Decision:
        return self.answers[version].pop(0)

    def initial_map(self, step: int) -> Decision:
        return self.first

    def replay_steps(self) -> list[int]:
        return sorted(self.schedule)

    def replayed_map(self, step: int) -> Decision:
        return Decision(Verdict.MAP, self.schedule[step])

    def event(self, step: int, kind: str, /, **fields: Any) -> None:
        self.events.append((step, kind, fields))

    def metric(self, figures: StepFigures, fp4_fraction: float) -> None:
        self.metrics.append((figures.step, figures.loss, figures.grad_norm, fp4_fraction))

    def adopted(self, step: int, precision_map: PrecisionMap) -> None: ...

    def close(self) -> None:
        self.closed = True

    def of(self, kind: str) -> list[int]:
        return [step for step, event, _ in self.events if event == kind]


def a_map(fmt: Format, version: int = 0) -> PrecisionMap:
    return PrecisionMap.uniform(NAMES, fmt, version=version, status="optimal")


def ready(version: int, fmt: Format = Format.FP4) -> Decision:
    return Decision(Verdict.MAP, a_map(fmt, version))


LATE, LOST = Decision(Verdict.NOT_READY), Decision(Verdict.DROPPED)


class Run:
    """A controller over one linear, and the steps of a training loop around it."""

    def __init__(self, script: Script, restored: ControllerState | None = None, **fields: Any) -> None:
        defaults = {"first_update": 2, "update_interval": 6, "lag": 2}
        config = SnipConfig(enabled=True, **{**defaults, **fields})
        self.script, self.registry = script, LinearRegistry(NAMES, StepContext())
        features = torch.arange(4)
        module = torch.nn.Linear(4, 4)
        self.handle = LinearHandle(LINEAR, "column", 4, 4, 0, 0, 1, features, features, self.registry.context, module)
        self.registry.add(self.handle)
        arrived = None if restored is None else restored.in_flight
        channel, report = MapChannel(NAMES, CPU), StepReport(CPU, arrived=arrived)
        self.controller = Controller(
            config, self.registry, channel, report, FLOPS, script, WandbSink(None), clip_grad=1.0, restored=restored
        )
        self.clips: list[float] = []
        self.looks: list[int] = []
        self.value = 1.0
        self.short: set[int] = set()
        self.formats: dict[int, Format] = {}

    def steps(
        self,
        start: int,
        end: int,
        grad_norm: float | None = 0.5,
        loss: Callable[[int], float] = lambda step: 10.0 - step,
        gradients: Callable[[int], list[float]] | None = None,
    ) -> None:
        for step in range(start, end):

            def probe(clip: float, step: int = step) -> Measured | Unmeasured:
                self.clips.append(clip)
                if step in self.short:
                    return Unmeasured("too little", {"free_bytes": 1.0})
                return Measured(table(step, self.value))

            self.controller.before_step(step, probe)
            self.formats[step] = self.handle.formats[0]

            def share(step: int = step) -> torch.Tensor:
                assert gradients is not None
                self.looks.append(step)
                return torch.tensor(gradients(step), dtype=torch.float64)

            self.controller.after_step(step, torch.tensor(loss(step)), grad_norm, gradients and share)


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


def test_a_lost_update_keeps_the_map() -> None:
    run = Run(Script({1: [LOST], 2: [ready(2)]}))
    run.steps(0, 11)
    assert run.script.of("adopt") == [10]
    assert run.formats[9] is Format.BF16


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_statistic_that_is_not_finite_drops_the_update(value: float) -> None:
    run = Run(Script())
    run.value = value
    run.steps(0, 7)
    assert run.script.of("dropped") == [2]
    assert run.script.submitted == []
    assert run.controller.state.pending is None
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


# -- guard -----------------------------------------------------------------------------------------------------
def spike(step: int) -> float:
    return 9.0 if step >= 22 else 3.0 + 0.01 * (step % 3)


def guarded(script: Script, restored: ControllerState | None = None) -> Run:
    return Run(script, restored, first_update=18, update_interval=6, guard_window=10, guard_steps=5)


def objective(decision: Decision, value: float) -> Decision:
    assert decision.precision_map is not None
    return Decision(decision.verdict, decision.precision_map.with_fields(objective=value))


def spiky_answers() -> dict[int, list[Decision]]:
    """The first map spikes; the second promises no less loss, the third does."""
    losses = {1: 1.0, 2: 0.95, 3: 0.5}
    return {version: [objective(ready(version), value)] for version, value in losses.items()}


def test_a_spike_takes_the_map_back_two_steps_later_and_raises_the_bar() -> None:
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
    taken = next(fields for _, kind, fields in run.script.events if kind == "guard")
    assert (taken["version"], taken["alarm_step"], taken["loss"]) == (1, 24, 9.0)


def test_a_gradient_norm_that_is_not_finite_takes_the_map_back_at_once() -> None:
    run = guarded(Script(spiky_answers()))
    run.steps(0, 21, loss=lambda _: 3.0)
    run.steps(21, 22, loss=lambda _: 3.0, grad_norm=float("inf"))
    run.steps(22, 24, loss=lambda _: 3.0)
    assert run.script.of("adopt") == [20, 23]


def test_what_passed_its_probation_is_what_a_later_map_goes_back_to() -> None:
    run = guarded(Script({1: [ready(1, Format.FP8)], 2: [ready(2)], 3: [ready(3, Format.FP8)]}))
    run.steps(0, 27, loss=lambda _: 3.0)
    run.steps(27, 28, loss=lambda _: 3.0, grad_norm=float("nan"))
    run.steps(28, 31, loss=lambda _: 3.0)
    assert [run.formats[s] for s in (25, 26, 28, 29)] == [Format.FP8, Format.FP4, Format.FP4, Format.FP8]


@pytest.mark.parametrize("stop", [19, 21, 23, 24, 25, 26, 28])
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


# -- the share -------------------------------------------------------------------------------------------------
def test_fp4_fraction_weighs_by_flops_and_counts_all_formats_of_four_bits() -> None:
    flops = {"decoder.layers.0.mlp.linear_fc1": 3.0, "decoder.layers.0.mlp.linear_fc2": 1.0}
    fc1, fc2 = flops
    assert fp4_fraction(PrecisionMap(choices={f"{fc1}:fprop": Format.FP4}), flops) == 3 / 12
    mixed = {fc2: Format.NVFP4, f"{fc2}:dgrad": Format.FP8, f"{fc1}:wgrad": Format.MXFP4}
    assert fp4_fraction(PrecisionMap(choices=mixed), flops) == (2 * 1 + 3) / 12
    assert fp4_fraction(PrecisionMap(choices={}), {}) == 0.0


# -- the automatic trigger -------------------------------------------------------------------------------------
TRIGGER = {"first_update": 2, "update_interval": 1000, "lag": 2, "trigger": 0.2}


def changing(step: int) -> list[float]:
    """One of four linears' gradients grow after step 60."""
    return [1.0, 1.0, 1.0, 1.0 if step <= 60 else 16.0]


def test_an_update_starts_when_gradients_move_against_each_other() -> None:
    run = Run(Script({1: [ready(1)], 2: [ready(2, Format.FP8)]}), **TRIGGER)
    run.steps(0, 110, gradients=changing)
    assert run.looks == list(range(0, 110, 10))
    # Seen at step 70, known one step later, acted on at the next; then the new map is what is compared with.
    assert run.script.of("trigger") == [72]
    assert run.script.submitted == [(2, 1), (72, 2)]
    assert run.script.of("adopt") == [4, 74]
    (fields,) = [fields for _, kind, fields in run.script.events if kind == "trigger"]
    assert fields["since"] == 4
    assert fields["drift"] > fields["threshold"] == 0.2


@pytest.mark.parametrize("quiet", ["steady", "together", "below", "off"])
def test_no_update_starts_without_drift(quiet: str) -> None:
    gradients = {
        "steady": lambda step: [1.0, 2.0, 3.0, 4.0],
        "together": lambda step: [100.0 / (1 + step)] * 4,
        "below": lambda step: [1.0, 1.0, 1.0, 1.0 if step <= 60 else 1.3],
        "off": changing,
    }[quiet]
    run = Run(Script({1: [ready(1)]}), **TRIGGER | {"trigger": 0.0 if quiet == "off" else 0.2})
    run.steps(0, 110, gradients=gradients)
    assert run.script.of("trigger") == []
    assert bool(run.looks) == (quiet != "off")


def test_no_second_update_while_one_is_on_its_way() -> None:
    run = Run(Script({1: [ready(1)], 2: [LATE] * 20 + [ready(2)]}), **TRIGGER)
    run.steps(0, 110, gradients=lambda step: [1.0, 1.0, 1.0, 10.0 ** (step // 10)])
    assert len(run.script.of("trigger")) == 1
    assert len(run.script.submitted) == 2


@pytest.mark.parametrize("cut", [45, 61, 70, 71, 72, 73, 74, 75, 90])
def test_a_run_resumed_at_any_step_is_triggered_alike(cut: int) -> None:
    def script() -> Script:
        return Script({1: [ready(1)], 2: [ready(2, Format.FP8)]})

    whole = Run(script(), **TRIGGER)
    whole.steps(0, cut, gradients=changing)
    saved = whole.controller.state_to_save()
    before = len(whole.script.events)
    whole.steps(cut, 110, gradients=changing)
    resumed = Run(script(), restored=ControllerState.from_bytes(saved), **TRIGGER)
    resumed.steps(cut, 110, gradients=changing)

    def told(events: list[tuple[int, str, dict[str, Any]]]) -> list[tuple[int, str, Any]]:
        return [(s, kind, fields.get("drift")) for s, kind, fields in events if kind in ("trigger", "submit")]

    assert told(resumed.script.events) == told(whole.script.events[before:])
    assert resumed.controller.state_to_save() == whole.controller.state_to_save()
    assert [resumed.formats[s] for s in range(cut, 110)] == [whole.formats[s] for s in range(cut, 110)]
