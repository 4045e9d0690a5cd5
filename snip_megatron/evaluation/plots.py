"""Figures of comparisons and of proxy validations."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence
from typing import Any

from snip_megatron.evaluation.pages import COLOURS, figure
from snip_megatron.evaluation.proxy import Validation
from snip_megatron.evaluation.statistics import Row, mean_std
from snip_megatron.precision import split_option_id

SYMBOLS = {"fprop": "circle", "dgrad": "diamond", "wgrad": "square"}


def recovered_figure(table: Sequence[Row], formats: str) -> Any:
    """Draw the recovered gap over budgets: one line for each policy, error bars of one standard deviation over runs."""
    plot = figure("fp4 share of FLOPs", "gap recovered", xaxis={"tickformat": ".0%"})
    labels = list(dict.fromkeys(row.label for row in table if row.budget is not None))
    for label, colour in zip(labels, itertools.cycle(COLOURS), strict=False):
        own = sorted((r for r in table if r.label == label and r.recovered[formats]), key=lambda r: r.budget or 0.0)
        spread = [mean_std(list(row.recovered[formats].values())) for row in own]
        plot.add_scatter(
            x=[row.budget for row in own],
            y=[mean for mean, _ in spread],
            error_y={"array": [0.0 if math.isnan(std) else std for _, std in spread], "thickness": 1},
            name=html.escape(label),
            mode="lines+markers",
            line={"color": colour, "width": 3 if label == "snip" else 1.4},
        )
    return plot


def proxy_figure(validation: Validation, kind: str, estimator: str) -> Any:
    """Draw one estimator's scores of all options against the measured values, on logarithmic axes.

    ``kind`` is ``loss`` or ``drift``. Symbols distinguish fprop, dgrad and wgrad.
    """
    axis = {"type": "log", "exponentformat": "power"}
    what = "loss divergence" if kind == "loss" else "weight divergence"
    plot = figure(f"measured {what}", f"{what} by {html.escape(estimator)}", xaxis=axis, yaxis=axis)
    points = validation.points[kind]
    for (gemm, symbol), colour in zip(SYMBOLS.items(), COLOURS, strict=False):
        own = [option for option in points if str(split_option_id(option)[1].value) == gemm]  # type: ignore[union-attr]
        own = [o for o in own if points[o]["measured"] > 0.0 and points[o].get(estimator, 0.0) > 0.0]
        if own:
            plot.add_scatter(
                x=[points[option]["measured"] for option in own],
                y=[points[option][estimator] for option in own],
                text=own,
                name=gemm,
                mode="markers",
                marker={"symbol": symbol, "size": 7, "color": colour},
                hovertemplate="%{text}<br>%{x:.3g}, %{y:.3g}",
            )
    return plot
