"""A controller whose solver's answers and their delays are scripted, and the steps of a training around it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from dense_names import dense_names
from handles import handle_of
from sensitivity.synthetic import make_table, with_columns

from snip_megatron.layers.context import StepContext
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.precision import Format, LinearId, LinearRow, PrecisionMap
from snip_megatron.precision.phases import PlanPhase, PrecisionPlan
from snip_megatron.reporting.sinks import Sinks
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.controller import Controller, Measure
from snip_megatron.runtime.exchange import StepFigures
from snip_megatron.runtime.host import ProbeResult
from snip_megatron.runtime.solving import Candidate
from snip_megatron.runtime.state import ControllerState, Timeline
from snip_megatron.sensitivity.request import PhasedRequest
from snip_megatron.sensitivity.table import LINEAR_COLUMNS, StatisticsTable
from snip_megatron.sensitivity.update_error import StepScale

NAMES = dense_names(1)
CPU = torch.device("cpu")
LINEAR = LinearId("decoder", 0, "mlp.linear_fc1")
FLOPS = dict.fromkeys(NAMES, 2.0)
Answer = tuple[Candidate, ...] | None
LATE: Answer = None


def table(step: int) -> StatisticsTable:
    rows = tuple(LinearRow(name, 0, 4, 4) for name in NAMES)
    columns = with_columns(make_table(layers=1), "linear", **dict.fromkeys(LINEAR_COLUMNS, 1.0))
    return replace(columns, step=step, linears=rows)


def measured(table: StatisticsTable) -> ProbeResult:
    seconds = {"statistics": 0.1, "reduction": 0.2}
    return ProbeResult(table, seconds, StepScale(1.0, 1.0, 8, 8), 1)


@dataclass
class Script:
    """Rank 0's side. ``answers``: version -> the answers at its decisions, in turn."""

    answers: dict[int, list[Answer]] = field(default_factory=dict)
    schedule: dict[int, PrecisionMap] = field(default_factory=dict)
    events: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    submitted: list[tuple[int, int]] = field(default_factory=list)
    phases: list[PhasedRequest | None] = field(default_factory=list)
    tables: list[StatisticsTable] = field(default_factory=list)

    def news(self) -> None: ...

    def blame_command(self, iteration: int) -> str:
        return f"torchrun job --snip-blame {iteration}"

    def submit(self, step: int, table: StatisticsTable, version: int, phases: PhasedRequest | None = None) -> float:
        assert table.step == step
        self.submitted.append((step, version))
        self.phases.append(phases)
        self.tables.append(table)
        return 0.0

    def receive_results(self, step: int) -> None: ...

    def decision(self, step: int, version: int) -> Answer:
        return self.answers[version].pop(0)

    def initial_map(self, step: int) -> PrecisionMap | None:
        past = [adopted for adopted in self.schedule if adopted <= step]
        return self.schedule[max(past)] if past else None

    @property
    def replay(self) -> dict[int, PrecisionMap]:
        return self.schedule

    def event(self, step: int, kind: str, /, **fields: Any) -> None:
        self.events.append((step, kind, fields))

    def metric(self, figures: StepFigures, fp4_fraction: float) -> None: ...

    def record_plan(self, step: int, plan: PrecisionPlan) -> None: ...

    def record_adoption(self, step: int, precision_map: PrecisionMap) -> None: ...

    def close(self) -> None: ...

    def of(self, kind: str) -> list[int]:
        return [step for step, event, _ in self.events if event == kind]


def a_map(fmt: Format, version: int = 0) -> PrecisionMap:
    return PrecisionMap.uniform(NAMES, fmt, version=version, status="optimal")


def ready(version: int, fmt: Format = Format.FP4) -> Answer:
    return (Candidate(a_map(fmt, version), "snip", 0.0),)


def planned(version: int, last: int, **begins: Format) -> Answer:
    """A plan whose phase in ``fmt`` begins at step N, given as ``at_N=fmt``."""
    phases = tuple(PlanPhase(int(name[3:]), a_map(fmt, version)) for name, fmt in begins.items())
    plan = PrecisionPlan(phases, last, version=version, status="optimal", target=0.5, achieved=0.5)
    return (Candidate(phases[0].precision_map, "snip", 0.0, plan=plan),)


class SlowKernels:
    """Kernels that this rank has compiled from its ``steps``-th look on."""

    def __init__(self, steps: int) -> None:
        self.remaining, self.waited = steps, 0

    def begin(self) -> bool:
        return self.remaining <= 0

    def finish(self, seconds: float = math.inf) -> bool:
        self.waited += seconds > 0
        self.remaining = 0 if seconds else self.remaining - 1
        return self.remaining <= 0

    def complete(self) -> Mapping[str, float]:
        return {"kernels": 3}

    def close(self) -> None: ...


class Run:
    """A controller over one linear, and the steps of a training loop around it."""

    def __init__(
        self,
        script: Script,
        restored: ControllerState | None = None,
        *,
        timeline: Timeline | None = None,
        kernels: SlowKernels | None = None,
        **fields: Any,
    ) -> None:
        defaults = {"first_update": 2, "update_interval": 6, "lag": 2}
        config = SnipConfig(enabled=True, **{**defaults, **fields})
        self.script, self.registry = script, LinearRegistry([LinearRow(name, 0, 1, 1) for name in NAMES], StepContext())
        self.handle = handle_of(LINEAR, context=self.registry.context)
        self.registry.add(self.handle)
        self.controller = Controller(
            config, self.registry, CPU, script, Sinks(), clip_grad=1.0,
            restored=restored, timeline=timeline, kernels=kernels,
        )  # fmt: skip
        self.clips: list[float] = []
        self.formats: dict[int, Format] = {}

    def steps(
        self,
        start: int,
        end: int,
        grad_norm: float | None = 0.5,
        loss: Callable[[int], float] = lambda step: 10.0 - step,
        measure: Measure | None = None,
    ) -> None:
        for step in range(start, end):

            def probe(clip: float, step: int = step) -> ProbeResult:
                self.clips.append(clip)
                return measured(table(step))

            self.controller.before_step(step, probe, measure)
            self.formats[step] = self.handle.formats[0]
            self.controller.after_step(step, torch.tensor(loss(step)), grad_norm)
