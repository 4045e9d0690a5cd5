"""Self-contained HTML pages of a text and plots: of comparisons, and of proxy validations."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from snip_megatron.errors import needs_extra
from snip_megatron.evaluation.proxy import Validation
from snip_megatron.evaluation.statistics import Row, mean_std
from snip_megatron.precision import split_option_id
from snip_megatron.records.storage import write_atomically

with needs_extra("evaluation", "a page of figures"):
    import plotly.graph_objects as go
    from plotly.io import to_html

COLOURS = ("#3f83c8", "#e8833a", "#3a9e7c", "#b568b8", "#c9a227", "#d1495b", "#5fa8a0", "#8f99a8", "#2a5d95", "#7a5c3e")
SYMBOLS = {"fprop": "circle", "dgrad": "diamond", "wgrad": "square"}
_STYLE = "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:80rem;padding:0 1rem}pre{overflow-x:auto}"


def write_page(path: Path, title: str, markdown: str, figures: Sequence[tuple[str, Any]]) -> None:
    """Write a page of the plots, which are (caption, plotly figure) pairs, and the text. Raises OSError."""
    parts = []
    for number, (caption, figure) in enumerate(figures):
        body = to_html(figure, full_html=False, include_plotlyjs=number == 0, config={"displaylogo": False})
        parts.append(f"<h2>{html.escape(caption)}</h2>{body}")
    parts.append(f"<pre>{html.escape(markdown)}</pre>")
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    page = f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'
    write_atomically(path, page.encode())


def figure(x_title: str, y_title: str, **axes: Mapping[str, Any]) -> Any:
    """Return an empty plotly figure in the style of the pages. ``axes`` holds layouts of ``xaxis`` and ``yaxis``."""
    layout = {"template": "simple_white", "height": 460, "margin": {"l": 60, "r": 20, "t": 20, "b": 50}}
    empty = go.Figure(layout=layout)
    empty.update_layout(**axes)
    empty.update_xaxes(title_text=x_title, showgrid=True)
    empty.update_yaxes(title_text=y_title, showgrid=True)
    return empty


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
