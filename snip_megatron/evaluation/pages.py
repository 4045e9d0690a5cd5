"""Self-contained HTML pages of headings, tables and plots."""

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
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#1d2430;background:#fff}
table{border-collapse:collapse;margin:.5rem 0 1.5rem}th,td{padding:.25rem .7rem;border-bottom:1px solid #d8dde5}
th{text-align:left}td{font-variant-numeric:tabular-nums}.figure{margin:1rem 0}.table{overflow-x:auto}
"""


def write_page(path: Path, title: str, markdown: str, figures: Sequence[tuple[str, Any]]) -> None:
    """Write a page.

    Args:
        path: the output file.
        title: title of the page.
        markdown: the text, of headings, lists, tables and paragraphs.
        figures: (caption, plotly figure) pairs, which follow the text.

    Raises:
        OSError: the file cannot be written.
    """
    parts = [_html(markdown)]
    for number, (caption, figure) in enumerate(figures):
        body = to_html(figure, full_html=False, include_plotlyjs=number == 0, config={"displaylogo": False})
        parts.append(f'<h3>{html.escape(caption)}</h3><div class="figure">{body}</div>')
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    page = f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'
    write_atomically(path, page.encode())


def figure(x_title: str, y_title: str, **axes: Mapping[str, Any]) -> Any:
    """Return an empty plotly figure in the style of the pages. ``axes`` holds layouts of ``xaxis`` and ``yaxis``."""
    empty = go.Figure(
        layout={"template": "simple_white", "height": 460, "margin": {"l": 60, "r": 20, "t": 20, "b": 50}}
    )
    empty.update_layout(**axes)
    empty.update_xaxes(title_text=x_title, showgrid=True)
    empty.update_yaxes(title_text=y_title, showgrid=True)
    return empty


def _html(markdown: str) -> str:
    """Convert the subset of markdown that this room writes: headings, lists, tables and paragraphs."""
    parts = []
    for block in markdown.strip().split("\n\n"):
        lines = block.split("\n")
        if lines[0].startswith("#"):
            level = len(lines[0]) - len(lines[0].lstrip("#"))
            parts.append(f"<h{level}>{_inline(lines[0].lstrip('# '))}</h{level}>")
        elif lines[0].startswith("|"):
            rows = [
                [_inline(cell.strip()) for cell in line.strip("|").split("|")] for line in lines if "|---" not in line
            ]
            head = "".join(f"<th>{cell}</th>" for cell in rows[0])
            body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows[1:])
            parts.append(f'<div class="table"><table><tr>{head}</tr>{body}</table></div>')
        elif lines[0].startswith("- "):
            parts.append(f"<ul>{''.join(f'<li>{_inline(line[2:])}</li>' for line in lines)}</ul>")
        else:
            parts.append(f"<p>{_inline(block)}</p>")
    return "".join(parts)


def _inline(text: str) -> str:
    pieces = html.escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if i % 2 else piece for i, piece in enumerate(pieces))
