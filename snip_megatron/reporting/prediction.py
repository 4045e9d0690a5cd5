"""Predicted times of a run's linears under its maps, by the times that the run stored or by a cost model."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format, Gemm, PrecisionMap
from snip_megatron.records.run_data import RunData
from snip_megatron.records.stored import parse_shapes
from snip_megatron.sensitivity.times import OptionTimes
from snip_megatron.timing.cost_model import CostModel

_FP8 = (Format.FP8_TENSOR, Format.FP8, Format.MXFP8)


@dataclass(frozen=True)
class StageTime:
    """Predicted seconds that a training step spends in the linears of a stage on one rank: in bf16, under the map."""

    before: float
    after: float

    @property
    def saved(self) -> float:
        """The share of the bf16 time that the map saves. It is negative if the map is slower."""
        return 1.0 - self.after / self.before


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

    @classmethod
    def by_model(cls, run: RunData, model: CostModel, formats: Collection[Format]) -> Prediction | None:
        """Return the times by a cost model; None if the run stores no shapes. Raises SnipError if they are broken."""
        shapes = run.facts.get("linear_shapes")
        if not isinstance(shapes, Mapping):
            return None
        return cls(OptionTimes.predict(model, parse_shapes(shapes, "config.json"), formats), {})

    def by_stage(self, precision_map: PrecisionMap, stages: Mapping[str, int]) -> dict[int, StageTime]:
        """Return the times of each stage under a map. ``stages`` is name of a linear → stage. Raises SnipError."""
        parts: dict[int, list[tuple[float, float]]] = {stage: [] for stage in stages.values()}
        for name, stage in stages.items():
            after = (self.times.of(name, gemm, precision_map.format_of(name, gemm).value) for gemm in Gemm)
            parts[stage].append((self.times.of(name, None, Format.BF16.value), math.fsum(after)))
        return {stage: StageTime(*map(math.fsum, zip(*each, strict=True))) for stage, each in parts.items()}

    def step_speedup(self, precision_map: PrecisionMap) -> float | None:
        """Return the predicted speedup of the whole step under a map; None if it is not known."""
        if precision_map.step_speedup is not None:
            return precision_map.step_speedup
        try:
            stages = {name: int(self.stages[name]) for name in map(str, precision_map.linears())}
            saved = {stage: time.saved for stage, time in self.by_stage(precision_map, stages).items()}
            return self.times.step_speedup(stages, saved)
        except (SnipError, KeyError, TypeError, ValueError):  # a format without a time, a linear without a stage
            return None

    def over_fp8(self, precision_map: PrecisionMap) -> tuple[Format, float] | None:
        """Return the fastest 8-bit format for all linears, and by which factor a step under the map is faster.

        None if either is not known.
        """
        own, names = self.step_speedup(precision_map), [str(linear) for linear in precision_map.linears()]
        uniform = {fmt: self.step_speedup(PrecisionMap.uniform(names, fmt)) for fmt in _FP8}
        known = {fmt: speedup for fmt, speedup in uniform.items() if speedup is not None}
        if own is None or not known:
            return None
        best = max(known, key=lambda fmt: known[fmt])
        return best, own / known[best]
