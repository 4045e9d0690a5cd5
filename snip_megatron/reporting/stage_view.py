"""The adopted maps by pipeline stage: fp4 share of FLOPs, and predicted time of the linears under the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from snip_megatron.errors import SnipError, is_finite
from snip_megatron.precision import LinearRow, fp4_fraction
from snip_megatron.records.readers import step_files
from snip_megatron.records.run_data import RunData
from snip_megatron.reporting.prediction import Prediction, StageTime
from snip_megatron.statistics.table import StatisticsTable
from snip_megatron.timing.cost_model import FlopsModel
from snip_megatron.timing.loading import load_cost_model


@dataclass(frozen=True)
class StageView:
    """The adopted maps by pipeline stage.

    Attributes:
        linears: stage → number of linears.
        shares: for each adoption, stage → fp4 share of the stage's FLOPs. If its map is lost, that of its event.
        last: stage → fp4 share under the last map.
        times: stage → predicted times under the last map; empty if they cannot be predicted.
        model: name of the cost model; empty if times cannot be predicted.
        assumptions: the assumptions of the cost model, a sentence each.
    """

    linears: Mapping[str, int]
    shares: Sequence[Mapping[str, float]]
    last: Mapping[str, float]
    times: Mapping[str, StageTime]
    model: str
    assumptions: Sequence[str]


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
    maps = [a.precision_map for a in run.adoptions if a.precision_map is not None]
    rows = _rows(run, unreadable)
    if not maps or not rows:
        return None
    flops: dict[str, dict[str, float]] = {str(stage): {} for stage in sorted({row.stage for row in rows})}
    for row in rows:
        flops[str(row.stage)][row.name] = row.flops
    found = run.facts.get("unquantised_flops")  # of linears that no map covers
    outside = {str(s): f for s, f in found.items() if is_finite(f) and f >= 0} if isinstance(found, Mapping) else {}
    shares = [
        {s: fp4_fraction(a.precision_map, own, outside.get(s, 0.0)) for s, own in flops.items()}
        if a.precision_map is not None
        else a.achieved_per_stage
        for a in run.adoptions
    ]
    prediction: Prediction | None = None
    times: dict[str, StageTime] = {}
    try:
        prediction = Prediction.stored(run) if model is None else None
        if prediction is None:
            model = FlopsModel() if model is None else model
            prediction = Prediction.by_model(run, model, set(maps[-1].choices.values()))
        if prediction is not None:
            by_stage = prediction.by_stage(maps[-1], {row.name: row.stage for row in rows})
            times = {str(stage): time for stage, time in by_stage.items()}
    except SnipError as error:
        unreadable.append(f"predicted times: {error}")
    return StageView(
        linears={stage: len(own) for stage, own in flops.items()},
        shares=shares,
        last={s: fp4_fraction(maps[-1], own, outside.get(s, 0.0)) for s, own in flops.items()},
        times=times,
        model=prediction.times.model if times and prediction is not None else "",
        assumptions=() if model is None else model.assumptions,
    )


def _rows(run: RunData, unreadable: list[str]) -> tuple[LinearRow, ...]:
    """Return the linears of the latest statistics that can be read; empty if there are none."""
    for path in reversed(step_files(run.path, "stats").values()):
        try:
            return StatisticsTable.load(path).linears
        except SnipError as error:
            unreadable.append(str(error))
    return ()
