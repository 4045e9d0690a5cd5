"""The adopted maps by pipeline stage: fp4 share of FLOPs, and predicted time of the linears."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snip_megatron.errors import SnipError, is_finite
from snip_megatron.precision import LinearRow, fp4_fraction
from snip_megatron.records.readers import step_files
from snip_megatron.records.run_data import Adoption, RunData
from snip_megatron.reporting.figures import Figure, add_stages
from snip_megatron.reporting.prediction import Prediction, StageTime
from snip_megatron.statistics.table import StatisticsTable
from snip_megatron.timing.cost_model import FlopsModel
from snip_megatron.timing.loading import load_cost_model


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
    prediction: Prediction | None = None
    times: list[dict[str, StageTime]] = []
    try:
        prediction = Prediction.stored(run) if model is None else None
        if prediction is None:
            model = FlopsModel() if model is None else model
            prediction = Prediction.by_model(run, model, {fmt for m in maps.values() for fmt in m.choices.values()})
        if prediction is not None:
            stages = {row.name: row.stage for rows in by_stage.values() for row in rows}
            found_times = [prediction.by_stage(m, stages) for m in maps.values()]
            times = [{str(stage): time for stage, time in each.items()} for each in found_times]
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
        model=prediction.times.model if times and prediction is not None else "",
        assumptions=() if model is None else model.assumptions,
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
