"""The adopted maps by pipeline stage: fp4 share of FLOPs, and predicted time of the linears."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snip_megatron.errors import SnipError, is_finite
from snip_megatron.precision import Format, Gemm, PrecisionMap, fp4_fraction
from snip_megatron.records.readers import step_files
from snip_megatron.records.run_data import Adoption, RunData
from snip_megatron.records.stored import parse_shapes
from snip_megatron.reporting.figures import Figure, add_stages
from snip_megatron.sensitivity.times import OptionTimes
from snip_megatron.statistics.table import LinearRow, StatisticsTable
from snip_megatron.timing.cost_model import CostModel, FlopsModel
from snip_megatron.timing.loading import load_cost_model


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
class StageView:
    """The adopted maps by pipeline stage, in order of adoption.

    Attributes:
        steps: the step of each adoption.
        end: the run's last step.
        linears: stage → number of linears.
        shares: for each adoption, stage → fp4 share of the stage's FLOPs.
        times: for each adoption, stage → predicted times; empty if times cannot be predicted.
        model: name of the cost model; empty if times cannot be predicted.
        assumptions: the assumptions of the cost model, a sentence each.
    """

    steps: Sequence[int]
    end: int
    linears: Mapping[str, int]
    shares: Sequence[Mapping[str, float]]
    times: Sequence[Mapping[str, StageTime]]
    model: str
    assumptions: Sequence[str]

    def shares_of(self, adoptions: Sequence[Adoption]) -> list[Mapping[str, float]]:
        """Return the shares of each adoption. If its map is lost, the shares of its ``adopt`` event are used."""
        known = dict(zip(self.steps, self.shares, strict=True))
        return [known.get(a.step, a.achieved_per_stage) for a in adoptions]


def stage_view(run: RunData, cost: str | None, unreadable: list[str]) -> StageView | None:
    """Build the view of a run's maps by stage.

    Args:
        run: the run.
        cost: the name or file of a cost model; None for the times that the run used, or ``flops`` if it used none.
        unreadable: receives a message for each file that cannot be used.

    Returns:
        The view, or None if there are no maps, or no statistics that assign the linears to stages.

    Raises:
        SnipError: ``cost`` is not a cost model.
    """
    model = None if cost is None else load_cost_model(cost)
    maps = {a.step: a.precision_map for a in run.adoptions if a.precision_map is not None}
    by_stage: dict[str, list[LinearRow]] = {}
    for row in sorted(_rows(run, unreadable), key=lambda row: row.stage):
        by_stage.setdefault(str(row.stage), []).append(row)
    if not maps or not by_stage:
        return None
    found = run.facts.get("unquantised_flops")  # of linears that no map covers
    outside = {str(s): f for s, f in found.items() if is_finite(f) and f >= 0} if isinstance(found, Mapping) else {}
    predicted: OptionTimes | None = None
    assumptions: Sequence[str] = ()
    times: list[dict[str, StageTime]] = []
    try:
        predicted, assumptions = _times(run, model, {fmt for m in maps.values() for fmt in m.choices.values()})
        if predicted is not None:
            times = [{s: _time(predicted, m, rows) for s, rows in by_stage.items()} for m in maps.values()]
    except SnipError as error:
        unreadable.append(f"predicted times: {error}")
    return StageView(
        steps=list(maps),
        end=max(run.metrics[-1]["step"] if run.metrics else 0, *maps),
        linears={stage: len(rows) for stage, rows in by_stage.items()},
        shares=[
            {s: fp4_fraction(m, {r.name: r.flops for r in rows}, outside.get(s, 0.0)) for s, rows in by_stage.items()}
            for m in maps.values()
        ],
        times=times,
        model=predicted.model if times and predicted is not None else "",
        assumptions=assumptions,
    )


def saved_figure(view: StageView) -> dict[str, Any] | None:
    """Draw the share of the linears' bf16 time that each stage saves. Returns None without predicted times."""
    if not view.times:
        return None
    figure = Figure("predicted time saved", zero=True)
    figure.layout["yaxis"] = {"tickformat": ".0%"}
    figure.layout["xaxis"] = {"title": {"text": "training step"}, "range": [0, max(1, view.end)]}
    add_stages(figure, view.steps, [{k: t.saved for k, t in by_stage.items()} for by_stage in view.times], view.end)
    return figure.as_dict()


def _rows(run: RunData, unreadable: list[str]) -> tuple[LinearRow, ...]:
    """Return the linears of the latest statistics that can be read; empty if there are none."""
    for path in reversed(step_files(run.path, "stats").values()):
        try:
            return StatisticsTable.load(path).linears
        except SnipError as error:
            unreadable.append(str(error))
    return ()


def _times(run: RunData, model: CostModel | None, formats: set[Format]) -> tuple[OptionTimes | None, Sequence[str]]:
    """Return the option times, and the assumptions behind them.

    The times are those of ``model`` if given, else those of the run's own request, else those of the ``flops`` model.
    They are None if the run stores no shapes.
    """
    request = run.facts.get("request")
    if model is None and isinstance(request, Mapping) and request.get("times"):
        return OptionTimes.from_dict(request["times"], "config.json: facts.request.times"), ()
    shapes = run.facts.get("linear_shapes")
    if not isinstance(shapes, Mapping):
        return None, ()
    model = FlopsModel() if model is None else model
    return OptionTimes.predict(model, parse_shapes(shapes, "config.json"), formats), model.assumptions


def _time(times: OptionTimes, precision_map: PrecisionMap, rows: Sequence[LinearRow]) -> StageTime:
    formats = [(row.name, gemm, precision_map.format_of(row.name, gemm).value) for row in rows for gemm in Gemm]
    before = math.fsum(times.of(row.name, None, Format.BF16.value) for row in rows)
    return StageTime(before, math.fsum(times.of(*each) for each in formats))
