"""The phases of a run with plans: what ran, what is to come, what they change, and what has been spent."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from snip_megatron.precision import Gemm, PrecisionMap
from snip_megatron.precision.phases import PrecisionPlan
from snip_megatron.runtime.run_data import RunData, number, version_of

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
        return self.end - self.begin


@dataclass(frozen=True)
class PhaseView:
    """The phases of a run.

    ``rows`` are the last MAX_ROWS phases in the order of time; of each its state (``over``, ``in force`` or ``to
    come``) and what it changes. ``timed`` says whether the ``budget`` is one of predicted times instead of the fp4
    share. ``target`` is the wanted average over the run, None for a bound of the loss; ``expected`` what the latest
    plan reaches, None if it was dropped.
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
    for (start, phases), end in zip(segments, ends, strict=False):
        for phase in phases:
            first, last = max(phase.begin, start), phase.end if end is None else min(phase.end, end)
            before = found[-1] if found else None
            if last <= first:
                continue
            if before is not None and before.end == first and before.precision_map is phase.precision_map:
                found[-1] = replace(before, end=last)
            else:
                found.append(replace(phase, begin=first, end=last))
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


# -- parts ---------------------------------------------------------------------------------------------------------
def _next_step(run: RunData) -> int:
    return int(run.metrics[-1]["step"]) + 1 if run.metrics else 0


def _segments(run: RunData) -> list[tuple[int, list[RunPhase]]]:
    """Return (step, the phases planned from there on) in the order of time; no phases where a plan was dropped."""
    plans = {plan.version: plan for plan in run.plans.values()}
    found: list[tuple[int, list[RunPhase]]] = []
    for event in run.events:
        plan = plans.get(version_of(event) or 0)
        if event["event"] == "guard" and event.get("action") == "taken_back":
            found.append((event["step"], []))
        elif event["event"] == "plan" and plan is not None:
            found.append((event["step"], _planned(event, plan)))
    return found


def _planned(event: Mapping[str, Any], plan: PrecisionPlan) -> list[RunPhase]:
    """Return the phases of a plan's event, with the plan's last maps: where it was moved, the first may be left out."""
    named = event.get("phases")
    bodies = [body for body in named if isinstance(body, Mapping)] if isinstance(named, list) else []
    found = []
    for body, phase in zip(reversed(bodies), reversed(plan.phases), strict=False):
        begin, steps = number(body.get("from_step")), number(body.get("steps"))
        if begin is not None and steps is not None:
            share = number(body.get("fp4_fraction"))
            found.append(RunPhase(int(begin), int(begin + steps), phase.precision_map, share, plan.version))
    return found[::-1]


def _expected(run: RunData, timed: bool) -> str | None:
    """Return the average over the run that the latest plan reaches, as text; None if the plan was dropped."""
    achieved = [plan.achieved for plan in run.plans.values()][-1]
    if achieved is None or not _segments(run)[-1][1]:
        return None
    return f"{achieved:.3f} ×" if timed else f"{achieved:.2%}"
