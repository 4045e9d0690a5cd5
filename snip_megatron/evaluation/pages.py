"""Self-contained HTML pages of a text and plots."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from snip_megatron.errors import needs_extra
from snip_megatron.records.storage import write_atomically

with needs_extra("evaluation", "a page of figures"):
    import plotly.graph_objects as go
    from plotly.io import to_html

COLOURS = ("#3f83c8", "#e8833a", "#3a9e7c", "#b568b8", "#c9a227", "#d1495b", "#5fa8a0", "#8f99a8", "#2a5d95", "#7a5c3e")
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
