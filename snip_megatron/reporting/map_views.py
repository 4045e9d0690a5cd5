"""The times that a run predicted for its linears, and the phases of its latest plan as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snip_megatron.precision import Format, Gemm, PrecisionMap
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.run_data import RunData, number, version_of
from snip_megatron.sensitivity.times import OptionTimes


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
        speedups = {fmt: value for fmt, value in uniform.items() if value is not None}
        if speedup is None or not speedups:
            return None
        fastest = max(speedups, key=lambda fmt: speedups[fmt])
        return fastest, speedup / speedups[fastest]

    def _speedup(self, precision_map: PrecisionMap, bf16_s: float | None) -> float | None:
        try:
            stages = {name: int(self.stages[name]) for name in map(str, precision_map.linears())}
            return self.times.step_speedup(precision_map, stages, bf16_s)
        except (SnipError, KeyError, TypeError, ValueError):  # a format without a time, a linear without a stage
            return None


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
    """Return the phases of a run's latest plan, as its event lists them. None for a run without plans.

    Each of ``rows`` has the step ``begin``, ``steps``, the state ``when`` (``over``, ``in force``, ``to come`` or
    ``dropped``, if the guard has taken the plan's map back), the map, its fp4 ``share`` and its :func:`differences`
    from the phase before. ``expected`` is the average over the run that the plan reaches, as text.
    """
    event = next((event for event in reversed(run.events) if event["event"] == "plan"), None)
    plan = next((plan for plan in run.plans.values() if event and plan.version == version_of(event)), None)
    listed = event.get("phases") if event else None
    if event is None or plan is None or not isinstance(listed, list):
        return None
    guards = (e for e in run.events[run.events.index(event) :] if e["event"] == "guard")
    dropped = any(guard.get("action") == "taken_back" for guard in guards)
    timed = run.budget is not None and run.budget.kind != "fp4"
    step = int(run.metrics[-1]["step"]) + 1 if run.metrics else 0
    before = next((a.precision_map for a in reversed(run.adoptions) if a.step < event["step"]), None)
    rows: list[dict[str, Any]] = []
    # The event of a plan that was moved may lack the first phases, so that the lists are matched from their ends.
    for body, phase in [*zip(reversed(listed), reversed(plan.phases), strict=False)][::-1]:
        begin, steps = number(body.get("from_step")), number(body.get("steps"))
        if begin is None or steps is None:
            continue
        when = "over" if begin + steps <= step else "dropped" if dropped else "in force" if begin < step else "to come"
        after = phase.precision_map
        row = {
            "begin": int(begin),
            "steps": int(steps),
            "when": when,
            "map": after,
            "share": number(body.get("fp4_fraction")),
        }
        rows.append(row | {"changes": differences(before, after)})
        before = after
    expected = "" if plan.achieved is None or dropped else f"{plan.achieved:.3f} ×" if timed else f"{plan.achieved:.2%}"
    return {"rows": rows, "timed": timed, "version": plan.version, "budget": str(run.budget), "expected": expected}
