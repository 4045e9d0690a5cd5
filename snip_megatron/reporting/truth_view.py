"""The report's section on the latest measured truth of a run: how estimators follow it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snip_megatron.errors import SnipError
from snip_megatron.evaluation.plots import proxy_figure
from snip_megatron.evaluation.proxy import CEILING, DEFAULT, QUANTITIES, Validation, find_tables, validate
from snip_megatron.statistics.table import StatisticsTable


@dataclass(frozen=True)
class TruthView:
    """Spearman to what was measured: a row a quantity, a column an estimator; the figure is of weight divergence."""

    step: int
    fmt: str
    tokens: int
    estimators: list[str]
    rows: list[tuple[str, int, list[float | None]]]
    figure: Mapping[str, Any]


def latest_truth(run: Path, unreadable: list[str]) -> TruthView | None:
    """The latest statistics that hold measured columns; None without any. Broken files are added to ``unreadable``."""
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
    names = list(dict.fromkeys(c.estimator for c in validation.comparisons))
    names.sort(key=lambda name: (name != CEILING, name != DEFAULT))
    rows: list[tuple[str, int, list[float | None]]] = []
    for quantity in QUANTITIES:
        found = [validation.of(quantity, name) for name in names]
        options = max((c.options for c in found if c is not None), default=0)
        if options:
            rows.append((quantity, options, [None if c is None else c.rho for c in found]))
    body: dict[str, Any] = proxy_figure(validation, "drift", DEFAULT).to_plotly_json()
    body["layout"].pop("template", None)
    return TruthView(validation.step, validation.fmt, validation.tokens, names, rows, body)
