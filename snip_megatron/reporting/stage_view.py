"""What every adopted map means for the pipeline stages: share of FLOPs in fp4, predicted time of their linears."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format, Gemm, PrecisionMap, fp4_fraction
from snip_megatron.reporting.figures import add_stages, new_figure, plain
from snip_megatron.reporting.readers import STEP_FILES, step_of
from snip_megatron.reporting.run_data import Adoption, RunData
from snip_megatron.sensitivity.times import OptionTimes
from snip_megatron.solver.costs import LinearShape, load_cost_model
from snip_megatron.statistics.table import LinearRow, StatisticsTable


@dataclass(frozen=True)
class StageTime:
    """Predicted seconds that a step takes of a stage's linears on one rank, in bf16 and under a map."""

    before: float
    after: float

    @property
    def saved(self) -> float:
        """Share of the bf16 time; negative where a map is slower."""
        return 1.0 - self.after / self.before


@dataclass(frozen=True)
class StageView:
    """The adopted maps by pipeline stage, in order of adoption.

    Attributes:
        steps: of the adoptions. end: the run's last step.
        linears: stage → how many it has.
        shares: of each adoption, stage → share of its FLOPs in fp4.
        times: of each adoption, stage → predicted times; empty where none can be predicted.
        model: of the times; empty without.
        assumptions: what stands behind them.
    """

    steps: Sequence[int]
    end: int
    linears: Mapping[str, int]
    shares: Sequence[Mapping[str, float]]
    times: Sequence[Mapping[str, StageTime]]
    model: str
    assumptions: Sequence[str]

    def shares_of(self, adoptions: Sequence[Adoption]) -> list[Mapping[str, float]]:
        """By adoption; what it says of itself where its map is lost."""
        known = dict(zip(self.steps, self.shares, strict=True))
        return [known.get(a.step, a.achieved_per_stage) for a in adoptions]


def stage_view(run: RunData, cost: str | None, unreadable: list[str]) -> StageView | None:
    """The run's maps by stage; None without maps, or where no statistics tell which linear is on which stage.

    ``cost``: a cost model's name or file; None: the run's own times, else ``flops``. Raises SnipError on a bad
    ``cost``; what the run's files lack joins ``unreadable``.
    """
    model = None if cost is None else load_cost_model(cost)
    known = [(a.step, a.precision_map) for a in run.adoptions if a.precision_map is not None]
    rows = _rows(run, unreadable)
    if not known or not rows:
        return None
    by_stage: dict[str, list[LinearRow]] = {}
    for row in sorted(rows, key=lambda row: row.stage):
        by_stage.setdefault(str(row.stage), []).append(row)
    outside = _unquantised(run)
    name = ""
    assumptions: Sequence[str] = ()
    times: list[dict[str, StageTime]] = []
    try:
        predicted, assumptions = _times(run, model, {fmt for _, m in known for fmt in m.choices.values()})
        if predicted is not None:
            name = predicted.model
            times = [{stage: _time(predicted, m, rows) for stage, rows in by_stage.items()} for _, m in known]
    except SnipError as error:
        unreadable.append(f"predicted times: {error}")
    last = run.metrics[-1]["step"] if run.metrics else 0
    return StageView(
        steps=[step for step, _ in known],
        end=max(last, known[-1][0]),
        linears={stage: len(rows) for stage, rows in by_stage.items()},
        shares=[
            {s: fp4_fraction(m, {r.name: r.flops for r in rows}, outside.get(s, 0.0)) for s, rows in by_stage.items()}
            for _, m in known
        ],
        times=times,
        model=name,
        assumptions=assumptions,
    )


def saved_figure(view: StageView) -> dict[str, Any] | None:
    """Predicted share of the linears' bf16 time saved, by stage over steps; None without predicted times."""
    if not view.times:
        return None
    figure = new_figure("predicted time saved", rangemode="tozero")
    figure.update_yaxes(tickformat=".0%")
    figure.update_xaxes(range=[0, max(1, view.end)])
    add_stages(figure, view.steps, [{k: t.saved for k, t in by_stage.items()} for by_stage in view.times], view.end)
    return plain(figure)


def _rows(run: RunData, unreadable: list[str]) -> tuple[LinearRow, ...]:
    """The linears of the latest statistics that can be read."""
    suffix = STEP_FILES["stats"]
    files = {step: path for path in (run.path / "stats").glob("step_*") if (step := step_of(path, suffix)) is not None}
    for step in sorted(files, reverse=True):
        try:
            return StatisticsTable.load(files[step]).linears
        except SnipError as error:
            if str(error) not in unreadable:
                unreadable.append(str(error))
    return ()


def _unquantised(run: RunData) -> dict[str, float]:
    """Stage → FLOPs a token of linears that no map covers; an older run does not say."""
    found = run.facts.get("unquantised_flops")
    items = found.items() if isinstance(found, Mapping) else ()
    return {str(stage): float(value) for stage, value in items if isinstance(value, (int, float)) and value >= 0}


def _times(run: RunData, model: Any, formats: set[Format]) -> tuple[OptionTimes | None, Sequence[str]]:
    """Times by the wanted model, else those the run solved with, else FLOPs; None for a run without shapes."""
    request = run.facts.get("request")
    if model is None and isinstance(request, Mapping) and request.get("times"):
        return OptionTimes.from_dict(request["times"], "config.json: facts.request.times"), ()
    shapes = run.facts.get("linear_shapes")
    if not isinstance(shapes, Mapping):
        return None, ()
    try:
        parsed = {str(name): LinearShape(**fields) for name, fields in shapes.items()}
    except TypeError as error:
        raise SnipError(f"config.json: facts.linear_shapes: {error}") from None
    model = load_cost_model("flops") if model is None else model
    return OptionTimes.predict(model, parsed, formats), model.assumptions


def _time(times: OptionTimes, precision_map: PrecisionMap, rows: Sequence[LinearRow]) -> StageTime:
    before = math.fsum(times.of(row.name, None, Format.BF16.value) for row in rows)
    after = math.fsum(
        times.of(row.name, gemm, precision_map.format_of(row.name, gemm).value) for row in rows for gemm in Gemm
    )
    return StageTime(before, after)
