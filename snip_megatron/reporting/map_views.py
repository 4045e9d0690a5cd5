"""Tables about the maps of a run: the last map by pipeline stage, and the phases of its plans.

:class:`Prediction` holds the times that the run predicted for its linears. :func:`stage_view` and :func:`phase_view`
return the tables of the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from snip_megatron.precision import Format, Gemm, LinearRow, PrecisionMap, fp4_fraction
from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.phases import PrecisionPlan
from snip_megatron.precision.strict_json import is_finite
from snip_megatron.runtime.run_data import RunData, number, step_files, version_of
from snip_megatron.sensitivity.table import StatisticsTable
from snip_megatron.sensitivity.times import OptionTimes

MAX_PHASE_ROWS = 200
"""Number of phases in the table. Of a longer run, the last ones are shown."""


# -- pipeline stages -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Prediction:
    """The predicted times of a run's linears, and the pipeline stage of each linear by name."""

    times: OptionTimes
    stages: Mapping[str, int]

    @classmethod
    def load(cls, run: RunData) -> Prediction | None:
        """Load the times that a run stored. Returns None if it stored none. Raises SnipError if they are invalid."""
        request, stages = run.facts.get("request"), run.facts.get("linear_stages")
        body = (request.get("times") if isinstance(request, Mapping) else None) or run.facts.get("predicted_times")
        if body is None:
            return None
        return cls(OptionTimes.from_dict(body, "config.json: facts"), stages if isinstance(stages, Mapping) else {})

    def step_speedup(self, precision_map: PrecisionMap) -> float | None:
        """Return the predicted speedup of the whole step under a map. None if it is not known."""
        return precision_map.step_speedup or self._speedup(precision_map, None)

    def over_fp8(self, precision_map: PrecisionMap, bf16_s: float | None) -> tuple[Format, float] | None:
        """Compare a step under a map with one that has all linears in the fastest 8-bit format.

        Returns this format and the ratio of the two speedups, or None if a prediction is missing. Both speedups are
        over the same step in bf16: the measured one of ``bf16_s`` seconds, or the predicted one if that is None.
        """
        speedup, names = self._speedup(precision_map, bf16_s), [str(linear) for linear in precision_map.linears()]
        formats = (Format.FP8_TENSOR, Format.FP8, Format.MXFP8)
        uniform = {fmt: self._speedup(PrecisionMap.uniform(names, fmt), bf16_s) for fmt in formats}
        known = {fmt: value for fmt, value in uniform.items() if value is not None}
        if speedup is None or not known:
            return None
        fastest = max(known, key=lambda fmt: known[fmt])
        return fastest, speedup / known[fastest]

    def _speedup(self, precision_map: PrecisionMap, bf16_s: float | None) -> float | None:
        try:
            stages = {name: int(self.stages[name]) for name in map(str, precision_map.linears())}
            return self.times.step_speedup(precision_map, stages, bf16_s)
        except (SnipError, KeyError, TypeError, ValueError):  # a format without a time, a linear without a stage
            return None


def stage_view(run: RunData, rows: Sequence[LinearRow], unreadable: list[str]) -> dict[str, Any] | None:
    """Return a run's last map by stage. None if there is no map, or if ``rows`` is empty.

    The numbers of ``linears`` and the fp4 ``shares`` of FLOPs are keyed by stage. So are ``times``, the (seconds in
    bf16, seconds under the map) by the cost model ``model``; they are empty if the run stored no times. ``rows`` are
    the linears of :func:`recorded_linears`. A message is appended to ``unreadable`` if the stored times are invalid.
    """
    last = next((a.precision_map for a in reversed(run.adoptions) if a.precision_map is not None), None)
    if last is None or not rows:
        return None
    flops: dict[str, dict[str, float]] = {str(stage): {} for stage in sorted({row.stage for row in rows})}
    for row in rows:
        flops[str(row.stage)][row.name] = row.flops
    unquantised = unquantised_flops(run)
    model, times = "", dict[str, tuple[float, float]]()
    try:
        if (prediction := Prediction.load(run)) is not None:
            by_stage = prediction.times.by_stage(last, {row.name: row.stage for row in rows})
            model, times = prediction.times.model, {str(stage): pair for stage, pair in by_stage.items()}
    except SnipError as error:
        unreadable.append(f"predicted times: {error}")
    shares = {s: fp4_fraction(last, of_stage, unquantised.get(s, 0.0)) for s, of_stage in flops.items()}
    linears = {stage: len(of_stage) for stage, of_stage in flops.items()}
    return {"linears": linears, "shares": shares, "times": times, "model": model}


def unquantised_flops(run: RunData) -> dict[str, float]:
    """Return stage → FLOPs a token of the linears that no map covers."""
    flops = run.facts.get("unquantised_flops")
    return {str(s): f for s, f in flops.items() if is_finite(f) and f >= 0} if isinstance(flops, Mapping) else {}


def recorded_linears(run: RunData, unreadable: list[str]) -> tuple[LinearRow, ...]:
    """Return the linears of the latest readable statistics. Empty if there are none.

    A message is appended to ``unreadable`` for each file that cannot be read.
    """
    for path in reversed(step_files(run.path, "stats").values()):
        try:
            return StatisticsTable.load(path).linears
        except SnipError as error:
            unreadable.append(str(error))
    return ()


# -- phases --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RunPhase:
    """The steps [begin, end) under one map of the plan ``version``.

    ``share`` is the fp4 share of FLOPs of the map. None if it is not known.
    """

    begin: int
    end: int
    precision_map: PrecisionMap
    share: float | None
    version: int

    @property
    def steps(self) -> int:
        return self.end - self.begin


def phases_of(run: RunData) -> list[RunPhase]:
    """Return the phases in the order of time. Empty for a run without plans.

    A plan is in force until the next one, or until the guard takes its map back. If a run is resumed with another
    number of steps, its phases move.
    """
    result: list[RunPhase] = []
    plans = _plans_in_force(run)
    ends = [*(step for step, _ in plans[1:]), None]
    for (start, phases), end in zip(plans, ends, strict=False):
        for phase in phases:
            first, last = max(phase.begin, start), phase.end if end is None else min(phase.end, end)
            previous = result[-1] if result else None
            if last <= first:
                continue
            if previous is not None and previous.end == first and previous.precision_map is phase.precision_map:
                result[-1] = replace(previous, end=last)
            else:
                result.append(replace(phase, begin=first, end=last))
    return result


def differences(before: PrecisionMap | None, after: PrecisionMap) -> dict[str, str]:
    """Return how the formats of two maps differ, by kind of GEMM, such as ``{"fprop": "12 fp4 → fp8"}``.

    Kinds of GEMM without a difference are left out. If ``before`` is None, all GEMMs ran in bf16.
    """
    old = before if before is not None else PrecisionMap(choices={})
    names = {str(linear) for precision_map in (old, after) for linear in precision_map.linears()}
    changes: dict[str, str] = {}
    for gemm in Gemm:
        counts = Counter((old.format_of(name, gemm).value, after.format_of(name, gemm).value) for name in names)
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        if texts := [f"{count} {a} → {b}" for (a, b), count in ranked if a != b]:
            changes[gemm.value] = ", ".join(texts)
    return changes


def phase_view(run: RunData) -> dict[str, Any] | None:
    """Return the table of a run's phases. None for a run without plans.

    ``rows`` are the last :data:`MAX_PHASE_ROWS` phases in the order of time, each with its state (``over``, ``in
    force`` or ``to come``) and its :func:`differences`. ``target`` is the average over the run that the ``budget``
    demands, None if it bounds the loss. ``expected`` is the average that the latest plan reaches, as text, None if that
    plan was dropped. ``timed`` says whether these are predicted times; if not, they are fp4 shares.
    """
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
    target = None if budget is None or budget.kind == "loss" else budget.value
    table = {"rows": rows[-MAX_PHASE_ROWS:], "timed": timed, "budget": str(run.config.get("budget", ""))}
    return table | {"target": target, "expected": _expected(run, timed)}


def _next_step(run: RunData) -> int:
    return int(run.metrics[-1]["step"]) + 1 if run.metrics else 0


def _plans_in_force(run: RunData) -> list[tuple[int, list[RunPhase]]]:
    """Return (step, phases of the plan in force from there on) in the order of time.

    There are no phases after a step at which the guard dropped a plan.
    """
    plans = {plan.version: plan for plan in run.plans.values()}
    result: list[tuple[int, list[RunPhase]]] = []
    for event in run.events:
        plan = plans.get(version_of(event) or 0)
        if event["event"] == "guard" and event.get("action") == "taken_back":
            result.append((event["step"], []))
        elif event["event"] == "plan" and plan is not None:
            result.append((event["step"], _event_phases(event, plan)))
    return result


def _event_phases(event: Mapping[str, Any], plan: PrecisionPlan) -> list[RunPhase]:
    """Return the phases that an event lists, with the maps of its plan.

    The event of a plan that was moved may lack the first phases, so that the lists are matched from their ends.
    """
    listed = event.get("phases")
    bodies = [body for body in listed if isinstance(body, Mapping)] if isinstance(listed, list) else []
    phases = []
    for body, phase in zip(reversed(bodies), reversed(plan.phases), strict=False):
        begin, steps = number(body.get("from_step")), number(body.get("steps"))
        if begin is not None and steps is not None:
            share = number(body.get("fp4_fraction"))
            phases.append(RunPhase(int(begin), int(begin + steps), phase.precision_map, share, plan.version))
    return phases[::-1]


def _expected(run: RunData, timed: bool) -> str | None:
    """Return the average over the run that the latest plan reaches, as text. None if the plan was dropped."""
    achieved = [plan.achieved for plan in run.plans.values()][-1]
    if achieved is None or not _plans_in_force(run)[-1][1]:
        return None
    return f"{achieved:.3f} ×" if timed else f"{achieved:.2%}"
