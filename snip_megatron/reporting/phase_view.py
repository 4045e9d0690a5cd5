"""The phases of a run with plans as a table and a figure: what ran, what is to come, and what has been spent."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snip_megatron.errors import SnipError
from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.budget import Budget
from snip_megatron.records.run_data import RunData, number
from snip_megatron.reporting.figures import FAULT, LINE, STAGE_COLOURS, new_figure, plain, thin
from snip_megatron.reporting.phases_of_run import (
    RunPhase,
    differences,
    first_step,
    next_step,
    phases_of,
    remaining_phases,
)

MAX_ROWS = 200
"""Number of phases in the table. Of a longer run, the last ones are shown."""
EVENTS = ("plan", "phase", "plan_moved", "out_of_reach")


@dataclass(frozen=True)
class PhaseRow:
    """One phase: its state (``over``, ``in force`` or ``to come``), and what it changes."""

    phase: RunPhase
    when: str
    changes: Mapping[str, str]


@dataclass(frozen=True)
class PhaseView:
    """The phases of a run.

    Attributes:
        rows: the last MAX_ROWS phases in the order of time.
        timed: whether the average over the run is one of predicted speedups instead of the fp4 share.
        budget: the run's budget as text.
        target: the wanted average; None for a bound of the loss.
        steps: number of recorded steps that count towards the average.
        average: the average over these steps; None without any.
        expected: the average over the run if the plan is followed; None without a plan for the rest of the run.
        last: the step before which training ends, by the latest plan.
        points: (steps, average up to and including each of them), recorded and then planned.
    """

    rows: Sequence[PhaseRow]
    timed: bool
    budget: str
    target: float | None
    steps: int
    average: float | None
    expected: float | None
    last: int
    points: tuple[Sequence[int], Sequence[float | None]]

    def text(self, value: float | None) -> str:
        """Return an average as text."""
        if value is None:
            return "–"
        return f"{value:.3f} ×" if self.timed else f"{value:.2%}"


def phase_view(run: RunData) -> PhaseView | None:
    """Build the view; None for a run without plans."""
    phases = phases_of(run)
    if not phases:
        return None
    budget = str(run.config.get("budget", ""))
    try:
        asked = Budget.parse(budget, "budget")
    except SnipError:
        asked = None
    timed = asked is not None and asked.timed
    now = next_step(run)
    spent, ahead = _spent(run, timed), _ahead(remaining_phases(run), now, timed)
    average = _averages(spent, timed)
    whole = _averages(spent + ahead, timed)
    return PhaseView(
        rows=_rows(run, phases, now)[-MAX_ROWS:],
        timed=timed,
        budget=budget,
        target=None if asked is None or asked.kind == "loss" else asked.value,
        steps=len(spent),
        average=average[-1] if average else None,
        expected=whole[-1] if ahead else None,
        last=phases[-1].end,
        points=thin([step for step, _ in spent + ahead], whole),
    )


def phase_figure(view: PhaseView) -> dict[str, Any]:
    """Draw what each phase contributes, the average up to each step, and the budget."""
    figure = new_figure("predicted speedup of the linears" if view.timed else "fp4 share of FLOPs", rangemode="tozero")
    form = "%{y:.3f}" if view.timed else "%{y:.2%}"
    if not view.timed:
        figure.update_yaxes(tickformat=".0%", range=[0, 1.02])
    for name, ran, dash in (("phases that ran", True, "solid"), ("phases to come", False, "dot")):
        rows = [row.phase for row in view.rows if (row.when != "to come") == ran]
        if rows:
            x, y = _outline(rows, view.timed)
            line = {"color": LINE, "width": 2, "dash": dash}
            figure.add_scatter(x=x, y=y, name=name, mode="lines", line=line, hovertemplate=form)
    steps, averages = view.points
    line = {"color": STAGE_COLOURS[2], "width": 1.6}
    figure.add_scatter(x=steps, y=averages, name="average up to here", mode="lines", line=line, hovertemplate=form)
    if view.target is not None:
        ends = [min([*steps[:1], view.rows[0].phase.begin]), view.last]
        line = {"color": FAULT, "width": 1.2, "dash": "dash"}
        figure.add_scatter(x=ends, y=[view.target] * 2, name="budget", mode="lines", line=line, hoverinfo="skip")
    return plain(figure)


def phase_events(run: RunData) -> list[Mapping[str, Any]]:
    """Return the events about plans, without the lists of phases, which the table has."""
    kept = [event for event in run.events if event["event"] in EVENTS]
    return [{name: value for name, value in event.items() if name != "phases"} for event in kept]


# -- parts ---------------------------------------------------------------------------------------------------------
def _rows(run: RunData, phases: Sequence[RunPhase], now: int) -> list[PhaseRow]:
    earlier = [a.precision_map for a in run.adoptions if a.step < phases[0].begin]
    first: PrecisionMap | None = earlier[-1] if earlier else None
    before = [first, *(phase.precision_map for phase in phases)]
    return [
        PhaseRow(phase, _when(phase, now), differences(old, phase.precision_map))
        for old, phase in zip(before, phases, strict=False)
    ]


def _when(phase: RunPhase, now: int) -> str:
    if phase.end <= now:
        return "over"
    return "in force" if phase.begin < now else "to come"


def _spent(run: RunData, timed: bool) -> list[tuple[int, float]]:
    """Return (step, fp4 share; or time relative to bf16) of every step on record."""
    origin = first_step(run)
    rows = [row for row in run.metrics if row["step"] >= origin]
    if not timed:
        return [(row["step"], number(row.get("fp4_fraction")) or 0.0) for row in rows]
    starts = [adoption.step for adoption in run.adoptions]
    times = [1.0, *(_time(adoption.speedup) for adoption in run.adoptions)]
    return [(row["step"], times[bisect.bisect_right(starts, row["step"])]) for row in rows]


def _ahead(phases: Sequence[RunPhase], now: int, timed: bool) -> list[tuple[int, float]]:
    """Return the same for the steps that the plan has for the rest of the run; empty if it misses some of them."""
    if not phases or phases[0].begin > now:
        return []
    values = [_time(phase.precision_map.speedup) if timed else phase.share for phase in phases]
    known = [(phase, value) for phase, value in zip(phases, values, strict=True) if value is not None]
    if len(known) < len(phases):
        return []
    return [(step, value) for phase, value in known for step in range(phase.begin, phase.end)]


def _averages(values: Sequence[tuple[int, float]], timed: bool) -> list[float | None]:
    """Return the mean share, or the harmonic mean of the speedups, up to and with each step."""
    sums = itertools.accumulate(value for _, value in values)
    return [_speedup(total / count) if timed else total / count for count, total in enumerate(sums, start=1)]


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


def _time(speedup: float | None) -> float:
    return 1.0 if speedup is None or speedup <= 0.0 else 1.0 / speedup


def _speedup(time: float) -> float | None:
    return 1.0 / time if time > 0.0 else None
