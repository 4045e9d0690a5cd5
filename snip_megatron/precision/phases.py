"""Precision over time: the schedule says where the phases of a run begin, the plan holds one precision map per phase.

A run lasts from its *origin*, the first step under SNIP, to the step at which training ends. A phase begins at a
fraction of the run, so that the same schedule fits runs of any length.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError, located
from snip_megatron.precision.map import STATUSES, PrecisionMap
from snip_megatron.precision.strict_json import check_keys, check_schema, finite, is_finite, one_of, read_object, whole

SCHEDULE_SCHEMA = "snip.schedule/1"
PLAN_SCHEMA = "snip.phases/1"

_FIGURES = ("objective", "bound", "target", "achieved")
MOST_PHASES = 64
"""Largest number of phases of a schedule, and of a problem of the solver."""
FLOORS = ("fp4", "speedup")
"""The kinds of budget that a single phase may have."""


@dataclass(frozen=True)
class SchedulePhase:
    """One phase of a schedule.

    Attributes:
        begin: the fraction of the run at which the phase begins, in [0, 1).
        budget: what the phase itself must reach, such as ``fp4=0.7`` or ``speedup=1.2``, in addition to the run's
            average. None if the average alone counts.
        change: globs over ``<linear>`` and ``<linear>:<gemm>``: the options whose format may differ from the preceding
            phase. None if all of them may.
    """

    begin: float
    budget: Budget | None = None
    change: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not (is_finite(self.begin) and 0.0 <= self.begin < 1.0):
            raise SnipError("from: must be a fraction of the run, 0 or more and below 1")
        if self.budget is not None and self.budget.kind not in FLOORS:
            raise SnipError(f"budget: {self.budget}: expected fp4=SHARE or speedup=FACTOR")
        globs = () if self.change is None else self.change
        if not (isinstance(globs, tuple) and all(isinstance(glob, str) and glob for glob in globs)):
            raise SnipError("change: must be a list of globs such as *:fprop")


@dataclass(frozen=True)
class Schedule:
    """The phases of a run, in the order of time. The first begins at 0. Raises SnipError if they are not in order."""

    phases: tuple[SchedulePhase, ...]

    def __post_init__(self) -> None:
        if not self.phases or self.phases[0].begin != 0:
            raise SnipError("phases: the first one must begin at 0")
        if len(self.phases) > MOST_PHASES:
            raise SnipError(f"phases: at most {MOST_PHASES} are supported, got {len(self.phases)}")
        for i, (before, after) in enumerate(zip(self.phases, self.phases[1:], strict=False), start=1):
            if after.begin <= before.begin:
                raise SnipError(
                    f"phases[{i}].from: {after.begin:g} must be above {before.begin:g}, where the last began"
                )

    def first_steps(self, origin: int, last: int) -> tuple[int, ...]:
        """Return the first step of every phase of a run over [origin, last). Raises ValueError if that holds no steps.

        In a run with few steps two phases may begin at the same step. The earlier one is then empty.
        """
        if not 0 <= origin < last:
            raise ValueError(f"a run from step {origin} to {last} has no steps")
        return tuple(origin + math.floor(phase.begin * (last - origin) + 0.5) for phase in self.phases)

    def remaining(self, origin: int, last: int, step: int) -> list[tuple[int, int, int]]:
        """Return (index of the phase, first step, number of steps) of every phase from ``step`` on. Empty if ``step``
        is not before ``last``. The first phase is cut to its remaining steps, and empty phases are dropped.
        """
        first = [max(s, step) for s in self.first_steps(origin, last)]
        end_steps = [*first[1:], max(last, step)]
        return [(i, a, b - a) for i, (a, b) in enumerate(zip(first, end_steps, strict=True)) if b > a]

    def to_json(self) -> str:
        """Return the text of a ``snip.schedule/1`` file."""
        every = [{"from": p.begin, "budget": p.budget and str(p.budget), "change": p.change} for p in self.phases]
        phases = [{name: value for name, value in body.items() if value is not None} for body in every]
        return json.dumps({"schema": SCHEDULE_SCHEMA, "phases": phases}) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "schedule") -> Schedule:
        """Parse the text of a ``snip.schedule/1`` file. Raises SnipError naming ``where`` and the invalid field."""
        with located(where):
            body = read_object(text)
            phases = tuple(_schedule_phase(i, phase) for i, phase in enumerate(_entries(body, SCHEDULE_SCHEMA)))
            check_keys(body, ("schema", "phases"))
            return cls(phases)


AUTO = Schedule(tuple(SchedulePhase(begin) for begin in (0.0, 0.5, 0.75, 0.9)))
"""The phases of ``--snip-schedule auto``."""


@dataclass(frozen=True)
class PlanPhase:
    """One phase of a plan: the map in force from step ``begin`` on."""

    begin: int
    precision_map: PrecisionMap


@dataclass(frozen=True)
class PrecisionPlan:
    """The precision maps of a run's remaining phases. Raises SnipError if the phases are not in order.

    Attributes:
        phases: the phases in the order of time. None of them is empty.
        last: the step before which the last phase ends.
        version: the number of the update that made the plan.
        status, objective, bound, target: as those of a map, over all phases and the whole run.
        achieved: the average over the whole run, including the steps before the first phase.
    """

    phases: tuple[PlanPhase, ...]
    last: int
    version: int = 0
    status: str = "static"
    objective: float | None = None
    bound: float | None = None
    target: float | None = None
    achieved: float | None = None

    def __post_init__(self) -> None:
        if not self.phases:
            raise SnipError("phases: must hold one phase or more")
        steps = [*(phase.begin for phase in self.phases), self.last]
        if steps[0] < 0 or any(after <= before for before, after in itertools.pairwise(steps)):
            raise SnipError("phases: must begin at ascending steps, and none may be empty")

    @property
    def steps(self) -> tuple[int, ...]:
        """The number of steps of every phase."""
        end_steps = [*(phase.begin for phase in self.phases[1:]), self.last]
        return tuple(end - phase.begin for phase, end in zip(self.phases, end_steps, strict=True))

    def index_at(self, step: int) -> int:
        """Return the index of the phase that ``step`` lies in.

        A step before the first phase counts to the first, a step after the end to the last.
        """
        return max(0, bisect.bisect_right([phase.begin for phase in self.phases], step) - 1)

    def at(self, step: int) -> PrecisionMap:
        """Return the map in force at ``step``; see :meth:`index_at`."""
        return self.phases[self.index_at(step)].precision_map

    def moved(self, origin: int, last: int, step: int) -> PrecisionPlan:
        """Return the plan for a run from ``origin`` that ends before step ``last`` instead, which is after ``step``.

        Every phase begins at the same fraction of the run. Those that would end before ``step`` are dropped.
        """
        stretch = (last - origin) / (self.last - origin)
        begins = [origin + math.floor((phase.begin - origin) * stretch + 0.5) for phase in self.phases]
        end_steps = [*begins[1:], last]
        phases = tuple(
            PlanPhase(begin, phase.precision_map)
            for begin, end, phase in zip(begins, end_steps, self.phases, strict=True)
            if end > max(begin, step)
        )
        return replace(self, phases=phases, last=last)

    # -- JSON --------------------------------------------------------------------------------------------------
    def as_dict(self) -> dict[str, Any]:
        """Return the object of a ``snip.phases/1`` file."""
        return {
            "schema": PLAN_SCHEMA,
            "version": self.version,
            "status": self.status,
            **{name: getattr(self, name) for name in _FIGURES},
            "phases": [
                {"from_step": phase.begin, "steps": steps, "map": phase.precision_map.as_dict()}
                for phase, steps in zip(self.phases, self.steps, strict=True)
            ],
        }

    def to_json(self) -> str:
        """Return the text of a ``snip.phases/1`` file."""
        return json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "plan") -> PrecisionPlan:
        """Parse and validate the text of a ``snip.phases/1`` file. Raises SnipError naming ``where`` and the field."""
        with located(where):
            return cls.from_dict(read_object(text))

    @classmethod
    def from_dict(cls, body: Any) -> PrecisionPlan:
        """Read and validate the output of :meth:`as_dict`. Raises SnipError naming the field that is invalid."""
        phases, last = [], None
        for i, entry in enumerate(_entries(body, PLAN_SCHEMA)):
            begin = whole(entry.get("from_step"), f"phases[{i}].from_step")
            if last is not None and begin != last:
                raise SnipError(f"phases[{i}].from_step: must be {last}, where the preceding phase ends")
            last = begin + whole(entry.get("steps"), f"phases[{i}].steps", 1)
            with located(f"phases[{i}].map"):
                phases.append(PlanPhase(begin, PrecisionMap.from_dict(entry.get("map"))))
        status = one_of(body.get("status", "static"), "status", STATUSES)
        figures = {name: None if body.get(name) is None else finite(body[name], name) for name in _FIGURES}
        return cls(tuple(phases), last or 0, whole(body.get("version", 0), "version"), status, **figures)


def _entries(body: Any, schema: str) -> list[Mapping[str, Any]]:
    """Return the objects under ``phases``. Raises SnipError if ``body`` is of another schema, or has no such list."""
    check_schema(body, schema)
    phases = body.get("phases")
    if not isinstance(phases, list) or not all(isinstance(phase, dict) for phase in phases):
        raise SnipError("phases: must be a list of objects")
    return phases


def _schedule_phase(i: int, body: Mapping[str, Any]) -> SchedulePhase:
    check_keys(body, ("from", "budget", "change"), f"phases[{i}]: ")
    begin, budget, change = (body.get(name) for name in ("from", "budget", "change"))
    try:
        return SchedulePhase(
            float(begin) if is_finite(begin) else math.nan,
            None if budget is None else Budget.parse(budget, "budget:"),
            tuple(change) if isinstance(change, list) else change,
        )
    except SnipError as error:
        raise SnipError(f"phases[{i}].{error}") from None
