"""The report's section that compares estimators with the latest measured sensitivities of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snip_megatron.errors import SnipError
from snip_megatron.evaluation.plots import proxy_figure
from snip_megatron.evaluation.proxy import DEFAULT, QUANTITIES, Validation, find_tables, validate
from snip_megatron.reporting.figures import plain
from snip_megatron.statistics.table import StatisticsTable


@dataclass(frozen=True)
class TruthView:
    """Rank correlations between estimated and measured sensitivities.

    Attributes:
        step: the step of the measurement.
        fmt: the candidate format.
        tokens: the number of tokens of the measurement.
        estimators: the names of the columns of ``rows``.
        rows: (quantity, number of options, Spearman correlation of each estimator or None).
        figure: the plotly figure of weight divergence.
    """

    step: int
    fmt: str
    tokens: int
    estimators: list[str]
    rows: list[tuple[str, int, list[float | None]]]
    figure: Mapping[str, Any]


def latest_truth(run: Path, unreadable: list[str]) -> TruthView | None:
    """Return the view of the latest statistics that hold measured columns, or None if there are none.

    The messages of broken files are added to ``unreadable``.
    """
    try:
        paths = find_tables(run)
    except SnipError:
        return None
    for path in reversed(paths):
        try:
            table = StatisticsTable.load(path)
            if table.measured is not None:
                fmt = "fp4" if "fp4" in table.formats else table.formats[-1]
                return _view(validate(table, fmt, run.name))
        except SnipError as error:
            if str(error) not in unreadable:
                unreadable.append(str(error))
    return None


def _view(validation: Validation) -> TruthView:
    names = validation.estimators
    rows: list[tuple[str, int, list[float | None]]] = []
    for quantity in QUANTITIES:
        found = [validation.of(quantity, name) for name in names]
        options = max((c.options for c in found if c is not None), default=0)
        if options:
            rows.append((quantity, options, [None if c is None else c.rho for c in found]))
    figure = plain(proxy_figure(validation, "drift", DEFAULT))
    return TruthView(validation.step, validation.fmt, validation.tokens, names, rows, figure)
