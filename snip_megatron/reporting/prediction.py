"""Predicted speedups of a run's maps, by the times that the run stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.records.run_data import RunData
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
        if precision_map.step_speedup is not None:
            return precision_map.step_speedup
        try:
            stages = {name: int(self.stages[name]) for name in map(str, precision_map.linears())}
            return self.times.step_speedup(precision_map, stages)
        except (SnipError, KeyError, TypeError, ValueError):  # a format without a time, a linear without a stage
            return None

    def over_fp8(self, precision_map: PrecisionMap) -> tuple[Format, float] | None:
        """Return the fastest 8-bit format, and how much faster a step under the map is; None if unknown."""
        own, names = self.step_speedup(precision_map), [str(linear) for linear in precision_map.linears()]
        uniform = {fmt: self.step_speedup(PrecisionMap.uniform(names, fmt)) for fmt in _FP8}
        known = {fmt: speedup for fmt, speedup in uniform.items() if speedup is not None}
        if own is None or not known:
            return None
        best = max(known, key=lambda fmt: known[fmt])
        return best, own / known[best]
