"""The state of the controller in a checkpoint. It is JSON, equal on all ranks, and keyed by global names."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.errors import cut, located
from snip_megatron.precision.phases import PrecisionPlan
from snip_megatron.precision.strict_json import JsonFields, check_schema, read_object
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.exchange import StepFigures
from snip_megatron.runtime.guard import Alarm, GuardState
from snip_megatron.sensitivity.request import PhasedRequest
from snip_megatron.sensitivity.table import StatisticsTable

STATE_SCHEMA = "snip.state/2"


@dataclass(frozen=True)
class Goal(JsonFields):
    """The goal of a run's maps. A resumed run may have another one.

    ``budget`` is the text of ``--snip-budget``. ``schedule`` is the text of the phases, ``static`` if there are none.
    """

    budget: str
    schedule: str

    @classmethod
    def of(cls, config: SnipConfig) -> Goal:
        return cls(str(config.budget), "static" if config.phases is None else config.phases.to_json())

    def difference(self, before: Goal) -> str:
        """Return the arguments of ``before`` that differ here. Empty if none does."""
        budget = f"--snip-budget {cut(before.budget)}" if before.budget != self.budget else ""
        schedule = "another --snip-schedule" if before.schedule != self.schedule else ""
        return " and ".join(filter(None, (budget, schedule)))


@dataclass
class BudgetSpent(JsonFields):
    """What the past steps of a run contribute to its average over the run, equal on all ranks.

    Attributes:
        origin: First step of the run under SNIP. Earlier steps, of a checkpoint without SNIP, do not count.
        steps: Number of steps that count.
        shares: Sum over these steps of the fp4 share of the map in force.
        times: Sum over these steps of the predicted time of the decoder's linears relative to bf16 (1 / speedup).
        last: The step before which the run ends. None if it was not known.
    """

    origin: int
    steps: int = 0
    shares: float = 0.0
    times: float = 0.0
    last: int | None = None

    def __post_init__(self) -> None:
        for name in ("origin", "steps", "shares", "times"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must be 0 or more")

    def add(self, share: float, precision_map: PrecisionMap, steps: int = 1) -> None:
        """Add steps that ran under one map with the fp4 share ``share``. Without a prediction its time is bf16's."""
        self.steps += steps
        self.shares += steps * share
        self.times += steps / (precision_map.speedup or 1.0)

    @property
    def next_step(self) -> int:
        """The step after the last one that counts, or an earlier one if training has left out steps."""
        return self.origin + self.steps

    def average(self, *, timed: bool) -> float:
        """Return the mean fp4 share, or with ``timed`` the harmonic mean of the speedups. 0 without steps."""
        if not self.steps:
            return 0.0
        if not timed:
            return self.shares / self.steps
        return self.steps / self.times if self.times > 0.0 else 0.0


@dataclass
class Pending(JsonFields):
    """An update that was submitted and is not decided yet.

    Attributes:
        step: The step before which it was measured.
        due: The step before which it is decided.
        version: Version of its map.
        table: Its statistics.
        phases: The phases that it plans. None if it solves a single map.
    """

    step: int
    due: int
    version: int
    table: StatisticsTable
    phases: PhasedRequest | None = None


@dataclass
class ControllerState(JsonFields):
    """The state of the controller. A field is None if there is nothing to store.

    Attributes:
        precision_map: The map in force.
        version: Version of the latest submitted update.
        pending: The update that is submitted and undecided.
        grad_norm: Gradient norm of the last step before clipping. None if it is unknown or not finite.
        guard: The state of the guard.
        alarm: An alarm of the guard on which the next step acts.
        in_flight: Figures of the last step, whose collective was outstanding when the checkpoint was written.
        spent: What past steps contribute to the average over the run.
        plan: The maps of the remaining phases. None if the map stays until the next update.
        goal: The goal of the run's maps.
        sequences: Sequences of a microbatch that the probes of the latest update took.
        postponed: The step before which an update starts that had to wait for kernels or was dropped.
        failures: Number of updates in a row that were dropped.
    """

    precision_map: PrecisionMap | None = None
    version: int = 0
    pending: Pending | None = None
    grad_norm: float | None = None
    guard: GuardState | None = None
    alarm: Alarm | None = None
    in_flight: StepFigures | None = None
    spent: BudgetSpent | None = None
    plan: PrecisionPlan | None = None
    goal: Goal | None = None
    sequences: int | None = None
    postponed: int | None = None
    failures: int = 0

    def to_bytes(self) -> bytes:
        """Return the state as UTF-8 JSON."""
        # Without times, by which the checkpoints of two equal runs would differ.
        state = replace(self, in_flight=self.in_flight and replace(self.in_flight, account={}))
        return json.dumps({"schema": STATE_SCHEMA, **state.as_dict()}, allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> ControllerState:
        """Parse and check the output of :meth:`to_bytes`. Raises SnipError if the content is invalid."""
        with located("SNIP state in the checkpoint"):
            body = read_object(content)
            check_schema(body, STATE_SCHEMA)
            return cls.from_dict({name: value for name, value in body.items() if name != "schema"}, "state")
