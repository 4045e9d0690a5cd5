"""The phases of a run with plans: what ran, what is to come, what they change, and what has been spent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from snip_megatron.errors import SnipError
from snip_megatron.precision import Gemm, PrecisionMap
from snip_megatron.precision.phases import PrecisionPlan
from snip_megatron.records.run_data import RunData, number
from snip_megatron.reporting.figures import DASHED, FAULT, LINE, Figure

MAX_ROWS = 200
"""Number of phases in the table. Of a longer run, the last ones are shown."""


@dataclass(frozen=True)
class RunPhase:
    """The steps [begin, end) under one map of plan ``version``. ``share``: the map's fp4 share of FLOPs, if known."""

    begin: int
    end: int
    precision_map: PrecisionMap
    share: float | None
    version: int

    @property
    def steps(self) -> int:
        """The number of steps."""
        return self.end - self.begin


@dataclass(frozen=True)
class PhaseView:
    """The phases of a run.

    Attributes:
        rows: the last MAX_ROWS phases in the order of time; of each its state (``over``, ``in force`` or ``to come``)
            and what it changes.
        timed: whether the budget is one of predicted times instead of the fp4 share.
        budget: the run's budget as text.
        target: the wanted average over the run; None for a bound of the loss.
        expected: this average if the latest plan is followed; None if it was dropped.
    """

    rows: Sequence[tuple[RunPhase, str, Mapping[str, str]]]
    timed: bool
    budget: str
    target: float | None
    expected: str | None


def phases_of(run: RunData) -> list[RunPhase]:
    """Return the phases in the order of time; empty for a run without plans.

    A plan holds until the next one, or until the guard takes its map back. Where a resumed run was given another end,
    the phases move.
    """
    found: list[RunPhase] = []
    segments = _segments(run)
    ends = [*(step for step, _ in segments[1:]), None]
    for (start, plan), end in zip(segments, ends, strict=False):
        for phase, steps in [] if plan is None else zip(plan.phases, plan.steps, strict=True):
            first, last = max(phase.begin, start), phase.begin + steps
            last = last if end is None else min(last, end)
            if last <= first or plan is None:
                continue
            before = found[-1] if found else None
            if before is not None and before.end == first and before.precision_map is phase.precision_map:
                found[-1] = replace(before, end=last)
            else:
                share = _share(run.events, plan, phase.precision_map)
                found.append(RunPhase(first, last, phase.precision_map, share, plan.version))
    return found


def remaining_phases(run: RunData) -> list[RunPhase]:
    """Return what is left of the phases after the last step on record; empty if no plan reaches beyond it."""
    now = _next_step(run)
    return [replace(phase, begin=max(phase.begin, now)) for phase in phases_of(run) if phase.end > now]


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
        if changes := [f"{count} {a} → {b}" for (a, b), count in ranked if a != b]:
            found[gemm.value] = ", ".join(changes)
    return found


def phase_view(run: RunData) -> PhaseView | None:
    """Build the view; None for a run without plans."""
    phases = phases_of(run)
    if not phases:
        return None
    budget = run.budget
    timed = budget is not None and budget.kind != "fp4"
    now = _next_step(run)
    earlier = [a.precision_map for a in run.adoptions if a.step < phases[0].begin]
    before = [earlier[-1] if earlier else None, *(phase.precision_map for phase in phases)]
    rows = [
        (
            phase,
            "over" if phase.end <= now else "in force" if phase.begin < now else "to come",
            differences(old, phase.precision_map),
        )
        for old, phase in zip(before, phases, strict=False)
    ]
    return PhaseView(
        rows=rows[-MAX_ROWS:],
        timed=timed,
        budget=str(run.config.get("budget", "")),
        target=None if budget is None or budget.kind == "loss" else budget.value,
        expected=_expected(run, timed),
    )


def phase_figure(view: PhaseView) -> dict[str, Any]:
    """Draw what each phase contributes, and the budget."""
    title = "predicted speedup of the linears" if view.timed else "fp4 share of FLOPs"
    figure, form = Figure(title, share=not view.timed, zero=True), "%{y:.3f}" if view.timed else "%{y:.2%}"
    for name, ran, dash in (("phases that ran", True, "solid"), ("phases to come", False, "dot")):
        rows = [phase for phase, when, _ in view.rows if (when != "to come") == ran]
        if rows:
            figure.line(name, *_outline(rows, view.timed), LINE, form, width=2, dash=dash)
    if view.target is not None:
        ends = [view.rows[0][0].begin, view.rows[-1][0].end]
        figure.line("budget of the run", ends, [view.target] * 2, FAULT, form, **DASHED)
    return figure.as_dict()


# -- parts ---------------------------------------------------------------------------------------------------------
def _next_step(run: RunData) -> int:
    """Return the step that follows the last one on record."""
    return int(run.metrics[-1]["step"]) + 1 if run.metrics else 0


def _first_step(run: RunData) -> int:
    """Return the first step of the run under SNIP, from which the average over the run counts."""
    begins = [int(run.metrics[0]["step"])] if run.metrics else []
    return min([*begins, *(min(phase.begin for phase in plan.phases) for plan in run.plans.values())], default=0)


def _segments(run: RunData) -> list[tuple[int, PrecisionPlan | None]]:
    """Return (first step, plan in force from there on) in the order of time. None: no plan, because it was dropped."""
    changes: list[tuple[int, int, Mapping[str, Any] | PrecisionPlan]] = [
        (event["step"], int(event["event"] == "plan_moved"), event)
        for event in run.events
        if event["event"] == "plan_moved" or (event["event"] == "guard" and event.get("action") == "taken_back")
    ]
    changes += [(step, 2, plan) for step, plan in run.plans.items()]
    found: list[tuple[int, PrecisionPlan | None]] = []
    for step, _, change in sorted(changes, key=lambda each: each[:2]):
        plan = found[-1][1] if found else None
        if isinstance(change, PrecisionPlan):
            found.append((step, change))
        elif plan is not None:
            found.append((step, None if change["event"] == "guard" else _moved(plan, _first_step(run), change, step)))
    return found


def _moved(plan: PrecisionPlan, origin: int, event: Mapping[str, Any], step: int) -> PrecisionPlan:
    last = number(event.get("last"))
    try:
        return plan if last is None or last <= step else plan.moved(origin, int(last), step)
    except (SnipError, ZeroDivisionError):  # a record of another run, or of another version
        return plan


def _share(events: Sequence[Mapping[str, Any]], plan: PrecisionPlan, precision_map: PrecisionMap) -> float | None:
    """Return the share that the plan's event names, which counts all linears, else the map's own."""
    index = next(i for i, phase in enumerate(plan.phases) if phase.precision_map is precision_map)
    for event in reversed(events):
        named = event.get("phases") if event["event"] in ("plan", "phase") else None
        if event.get("version") == plan.version and isinstance(named, list) and len(named) == len(plan.phases):
            share = number(named[index].get("fp4_fraction")) if isinstance(named[index], Mapping) else None
            if share is not None:
                return share
    return precision_map.achieved if precision_map.budget is None else precision_map.fp4_share


def _expected(run: RunData, timed: bool) -> str | None:
    """Return the average over the run that the latest plan reaches, as text; None if the plan was dropped."""
    plan = _segments(run)[-1][1]
    achieved = None if plan is None else plan.achieved
    if achieved is None:
        return None
    return f"{achieved:.3f} ×" if timed else f"{achieved:.2%}"


def _outline(phases: Sequence[RunPhase], timed: bool) -> tuple[list[int | None], list[float | None]]:
    """Return the line of horizontal pieces; it breaks where no plan was in force."""
    x: list[int | None] = []
    y: list[float | None] = []
    for phase in phases:
        if x and x[-1] != phase.begin:
            x.append(None)
            y.append(None)
        x += [phase.begin, phase.end]
        y += [phase.precision_map.speedup if timed else phase.share] * 2
    return x, y
