"""The phases of a run with plans: those that ran, the one in force, and those that its latest plan has for the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snip_megatron.errors import SnipError
from snip_megatron.precision import Gemm, PrecisionMap
from snip_megatron.precision.phases import PrecisionPlan
from snip_megatron.records.run_data import RunData, number


@dataclass(frozen=True)
class RunPhase:
    """Steps under one map of a plan.

    Attributes:
        begin, end: the first step, and the step after the last.
        precision_map: the map.
        share: its fp4 share of FLOPs; None if unknown.
        version: the version of the plan.
    """

    begin: int
    end: int
    precision_map: PrecisionMap
    share: float | None
    version: int

    @property
    def steps(self) -> int:
        """The number of steps."""
        return self.end - self.begin


def next_step(run: RunData) -> int:
    """Return the step that follows the last one on record."""
    return int(run.metrics[-1]["step"]) + 1 if run.metrics else 0


def phases_of(run: RunData) -> list[RunPhase]:
    """Return the phases in the order of time; empty for a run without plans.

    A plan holds until the next one, or until the guard takes its map back. Where a resumed run was given another end,
    the phases move.
    """
    found: list[RunPhase] = []
    segments = _segments(run)
    ends = [*(step for step, _ in segments[1:]), None]
    for (start, plan), end in zip(segments, ends, strict=False):
        if plan is None:
            continue
        for phase, steps in zip(plan.phases, plan.steps, strict=True):
            first, last = max(phase.begin, start), phase.begin + steps
            last = last if end is None else min(last, end)
            if last <= first:
                continue
            before = found[-1] if found else None
            if before is not None and before.end == first and before.precision_map is phase.precision_map:
                found[-1] = RunPhase(before.begin, last, before.precision_map, before.share, before.version)
                continue
            share = _share(run.events, plan, phase.precision_map)
            found.append(RunPhase(first, last, phase.precision_map, share, plan.version))
    return found


def remaining_phases(run: RunData) -> list[RunPhase]:
    """Return what is left of the phases after the last step on record; empty if no plan reaches beyond it."""
    now = next_step(run)
    return [
        RunPhase(max(phase.begin, now), phase.end, phase.precision_map, phase.share, phase.version)
        for phase in phases_of(run)
        if phase.end > now
    ]


def first_step(run: RunData) -> int:
    """Return the first step of the run under SNIP, from which the average over the run counts."""
    begins = [int(run.metrics[0]["step"])] if run.metrics else []
    return min([*begins, *(min(phase.begin for phase in plan.phases) for plan in run.plans.values())], default=0)


def _segments(run: RunData) -> list[tuple[int, PrecisionPlan | None]]:
    """Return (first step, plan in force from there on) in the order of time. None: no plan, because it was dropped."""
    changes: list[tuple[int, int, Mapping[str, Any] | PrecisionPlan]] = []
    for event in run.events:
        if event["event"] == "guard" and event.get("action") == "taken_back":
            changes.append((event["step"], 0, event))
        elif event["event"] == "plan_moved":
            changes.append((event["step"], 1, event))
    changes += [(step, 2, plan) for step, plan in run.plans.items()]
    found: list[tuple[int, PrecisionPlan | None]] = []
    for step, _, change in sorted(changes, key=lambda each: each[:2]):
        plan = found[-1][1] if found else None
        if isinstance(change, PrecisionPlan):
            plan = change
        elif plan is None:
            continue
        elif change["event"] == "guard":
            plan = None
        else:
            plan = _moved(plan, first_step(run), change, step)
        found.append((step, plan))
    return found


def _moved(plan: PrecisionPlan, origin: int, event: Mapping[str, Any], step: int) -> PrecisionPlan:
    last = number(event.get("last"))
    if last is None or last <= step:
        return plan
    try:
        return plan.moved(origin, int(last), step)
    except (SnipError, ZeroDivisionError):  # a record of another run, or of another version
        return plan


def _share(events: Sequence[Mapping[str, Any]], plan: PrecisionPlan, precision_map: PrecisionMap) -> float | None:
    """Return the share that the plan's event names, which counts all linears, else the map's own."""
    index = next(i for i, phase in enumerate(plan.phases) if phase.precision_map is precision_map)
    for event in reversed(events):
        if event["event"] not in ("plan", "phase") or event.get("version") != plan.version:
            continue
        named = event.get("phases")
        if isinstance(named, list) and len(named) == len(plan.phases) and isinstance(named[index], Mapping):
            share = number(named[index].get("fp4_fraction"))
            if share is not None:
                return share
    return precision_map.achieved if precision_map.budget is None else precision_map.fp4_share


def differences(before: PrecisionMap | None, after: PrecisionMap) -> dict[str, str]:
    """Return what ``after`` changes by kind of GEMM, such as ``{"fprop": "12 fp4 → fp8"}``.

    Kinds of GEMM without a change are left out. ``before`` is None where all GEMMs ran in bf16.
    """
    old = before if before is not None else PrecisionMap(choices={})
    names = {str(linear) for each in (old, after) for linear in each.linears()}
    found: dict[str, str] = {}
    for gemm in Gemm:
        pairs = Counter((old.format_of(name, gemm).value, after.format_of(name, gemm).value) for name in names)
        ranked = sorted(pairs.items(), key=lambda each: (-each[1], each[0]))
        changes = [f"{count} {a} → {b}" for (a, b), count in ranked if a != b]
        if changes:
            found[gemm.value] = ", ".join(changes)
    return found
