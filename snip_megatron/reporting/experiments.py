"""Pages of ``snip compare`` and ``snip validate-proxy``: their figures, and the text of their tables."""

import itertools
import math
from collections.abc import Sequence

from snip_megatron.evaluation.experiment import VALIDATIONS
from snip_megatron.evaluation.proxy import Validation
from snip_megatron.evaluation.statistics import REFERENCE, Row, mean_std
from snip_megatron.evaluation.tables import FORMATS, TITLES
from snip_megatron.precision import Gemm, split_option_id
from snip_megatron.reporting.figures import STAGE_COLOURS, Figure
from snip_megatron.reporting.page import render_page

_SYMBOLS = {Gemm.FPROP: "circle", Gemm.DGRAD: "diamond", Gemm.WGRAD: "square"}
_AXIS = {"type": "log", "exponentformat": "power"}


def comparison_page(name: str, text: str, table: Sequence[Row]) -> str:
    figures = []
    for kind, title in TITLES.items():
        own = [row for row in table if row.kind == kind and row.budget is not None]
        drawn = [formats for formats in VALIDATIONS if any(row.recovered[formats] for row in own)]
        figures += [(f"{title}, {FORMATS[formats]}", _recovered(own, formats)) for formats in drawn]
    return _page(name, text, figures)


def proxy_page(text: str, validations: Sequence[Validation]) -> str:
    figures = [
        (f"{v.source}, step {v.step}: {kind} by {estimator}", _scatter(v, kind, estimator))
        for v in validations
        for kind in ("loss", "drift")
        for estimator in ("measured again", "noise")
        if any(estimator in scores for scores in v.points[kind].values())
    ]
    return _page("proxy", text, figures)


def _page(title: str, text: str, figures: Sequence[tuple[str, Figure]]) -> str:
    drawn = {f"figure-{i}": figure.as_dict() for i, (_, figure) in enumerate(figures)}
    return render_page(
        "experiment.html", title=title, text=text, captions=[c for c, _ in figures], figures=drawn, maps=None
    )


def _recovered(table: Sequence[Row], formats: str) -> Figure:
    """Draw the recovered gap over budgets: one line for each policy, error bars of one standard deviation over runs."""
    figure = Figure("gap recovered")
    figure.layout |= {"xaxis": {"title": {"text": "fp4 share of FLOPs"}, "tickformat": ".0%"}, "hovermode": "closest"}
    labels = dict.fromkeys(row.label for row in table)
    for label, colour in zip(labels, itertools.cycle(STAGE_COLOURS), strict=False):
        own = sorted((r for r in table if r.label == label and r.recovered[formats]), key=lambda r: r.budget or 0.0)
        spread = [mean_std(list(row.recovered[formats].values())) for row in own]
        width = 3.0 if label == REFERENCE else 1.4
        figure.line(label, [row.budget for row in own], [mean for mean, _ in spread], colour, "%{y:.3f}", width=width)
        errors = {"array": [0.0 if math.isnan(std) else std for _, std in spread], "thickness": 1}
        figure.data[-1] |= {"mode": "lines+markers", "error_y": errors}
    return figure


def _scatter(validation: Validation, kind: str, estimator: str) -> Figure:
    """Draw one estimator's scores of all options against the measured values, on logarithmic axes.

    ``kind`` is ``loss`` or ``drift``. Symbols distinguish fprop, dgrad and wgrad.
    """
    what = "loss divergence" if kind == "loss" else "weight divergence"
    figure = Figure(f"{what} by {estimator}")
    figure.layout |= {"xaxis": {"title": {"text": f"measured {what}"}, **_AXIS}, "yaxis": _AXIS, "hovermode": "closest"}
    names = ("measured", estimator)
    positive = {
        option: scores
        for option, scores in validation.points[kind].items()
        if all(0.0 < scores.get(name, 0.0) < math.inf for name in names)
    }
    for (gemm, symbol), colour in zip(_SYMBOLS.items(), STAGE_COLOURS, strict=False):
        own = {option: scores for option, scores in positive.items() if split_option_id(option)[1] is gemm}
        x, y = ([scores[name] for scores in own.values()] for name in names)
        figure.marks(gemm.value, x, y, list(own), colour, symbol)
    return figure
