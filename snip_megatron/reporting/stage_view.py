"""The last map by pipeline stage: fp4 share of FLOPs, and predicted time of the linears; predicted speedups of maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from snip_megatron.precision import Format, LinearRow, PrecisionMap, fp4_fraction
from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.strict_json import is_finite
from snip_megatron.runtime.run_data import RunData, step_files
from snip_megatron.sensitivity.table import StatisticsTable
from snip_megatron.sensitivity.times import OptionTimes

_FP8 = (Format.FP8_TENSOR, Format.FP8, Format.MXFP8)


@dataclass(frozen=True)
class Prediction:
    """The times of a run's linears, and the pipeline stage of each by name."""

    times: OptionTimes
    stages: Mapping[str, int]

    @classmethod
    def stored(cls, run: RunData) -> Prediction | None:
        """Return the times that the run stored; None if it stored none. Raises SnipError if they are broken."""
        request, stages = run.facts.get("request"), run.facts.get("linear_stages")
        body = (request.get("times") if isinstance(request, Mapping) else None) or run.facts.get("predicted_times")
        if body is None:
            return None
        return cls(OptionTimes.from_dict(body, "config.json: facts"), stages if isinstance(stages, Mapping) else {})

    def step_speedup(self, precision_map: PrecisionMap) -> float | None:
        """Return the predicted speedup of the whole step under a map; None if it is not known."""
        return precision_map.step_speedup or self._speedup(precision_map, None)

    def over_fp8(self, precision_map: PrecisionMap, bf16_s: float | None) -> tuple[Format, float] | None:
        """Return the fastest 8-bit format, and how much faster a step under the map is; None if unknown.

        Both save seconds of the same step in bf16: one that took ``bf16_s``, or without it the predicted one.
        """
        own, names = self._speedup(precision_map, bf16_s), [str(linear) for linear in precision_map.linears()]
        uniform = {fmt: self._speedup(PrecisionMap.uniform(names, fmt), bf16_s) for fmt in _FP8}
        known = {fmt: speedup for fmt, speedup in uniform.items() if speedup is not None}
        if own is None or not known:
            return None
        best = max(known, key=lambda fmt: known[fmt])
        return best, own / known[best]

    def _speedup(self, precision_map: PrecisionMap, bf16_s: float | None) -> float | None:
        try:
            stages = {name: int(self.stages[name]) for name in map(str, precision_map.linears())}
            return self.times.step_speedup(precision_map, stages, bf16_s)
        except (SnipError, KeyError, TypeError, ValueError):  # a format without a time, a linear without a stage
            return None


@dataclass(frozen=True)
class StageView:
    """The last map by pipeline stage: linears, fp4 share of FLOPs, predicted seconds in bf16 and under the map.

    Times are those that the run stored, by the cost model ``model``; empty if it stored none.
    """

    linears: Mapping[str, int]
    shares: Mapping[str, float]
    times: Mapping[str, tuple[float, float]]
    model: str


def stage_view(run: RunData, rows: Sequence[LinearRow], unreadable: list[str]) -> StageView | None:
    """Build the view of a run's last map by stage; None if there are no maps or ``rows`` (:func:`recorded_linears`).

    ``unreadable`` receives a message for stored times that cannot be used.
    """
    last = next((a.precision_map for a in reversed(run.adoptions) if a.precision_map is not None), None)
    if last is None or not rows:
        return None
    flops: dict[str, dict[str, float]] = {str(stage): {} for stage in sorted({row.stage for row in rows})}
    for row in rows:
        flops[str(row.stage)][row.name] = row.flops
    outside = unquantised_flops(run)
    model, times = "", dict[str, tuple[float, float]]()
    try:
        if (stored := Prediction.stored(run)) is not None:
            by_stage = stored.times.by_stage(last, {row.name: row.stage for row in rows})
            model, times = stored.times.model, {str(stage): each for stage, each in by_stage.items()}
    except SnipError as error:
        unreadable.append(f"predicted times: {error}")
    return StageView(
        linears={stage: len(own) for stage, own in flops.items()},
        shares={s: fp4_fraction(last, own, outside.get(s, 0.0)) for s, own in flops.items()},
        times=times,
        model=model,
    )


def unquantised_flops(run: RunData) -> dict[str, float]:
    """Return stage → FLOPs a token of the linears that no map covers."""
    found = run.facts.get("unquantised_flops")
    return {str(s): f for s, f in found.items() if is_finite(f) and f >= 0} if isinstance(found, Mapping) else {}


def recorded_linears(run: RunData, unreadable: list[str]) -> tuple[LinearRow, ...]:
    """Return the linears of the latest statistics that can be read; empty if there are none."""
    for path in reversed(step_files(run.path, "stats").values()):
        try:
            return StatisticsTable.load(path).linears
        except SnipError as error:
            unreadable.append(str(error))
    return ()
