"""Elements of the charts in docs/images, as SVG text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from xml.sax.saxutils import escape

INK, OWN, OTHER = "#24292f", "#0b7285", "#8d5a2b"
"""Colours of the text, of SNIP, and of what it is compared with."""
_NAMES, _BARS, _VALUES, _ROW = 330, 360, 150, 20
"""Width of the column of names, of the longest bar and of the values, and height of a bar's row, in pixels."""


@dataclass(frozen=True)
class Bar:
    """A horizontal bar. ``label`` is its value as text; ``source`` is the result file, which its tooltip names."""

    group: str
    name: str
    value: float
    label: str
    source: str
    ours: bool = False


def bar_chart(title: str, bars: Sequence[Bar]) -> str:
    """Return a chart of horizontal bars that begin at 0, with a heading for each group of neighbours."""
    longest = max(bar.value for bar in bars)
    parts, y = [text(12, 22, title, weight="bold")], 34
    for group, members in groupby(bars, key=lambda bar: bar.group):
        y += 16
        parts.append(text(12, y, group, size=11.5))
        y += 8
        for bar in members:
            colour, width = OWN if bar.ours else OTHER, round(_BARS * max(bar.value, 0.0) / longest, 1)
            parts += [
                f"<g><title>{escape(f'{bar.name}: {bar.label} ({bar.source})')}</title>",
                f'<rect x="{_NAMES}" y="{y}" width="{width}" height="{_ROW - 6}" fill="{colour}"/></g>',
                text(_NAMES - 8, y + 11, bar.name, anchor="end", size=11),
                text(_NAMES + width + 6, y + 11, bar.label, size=11, colour=colour),
            ]
            y += _ROW
    return document(_NAMES + _BARS + _VALUES, y + 10, parts)


def document(width: float, height: float, parts: Sequence[str]) -> str:
    """Return the SVG file of ``parts`` on white."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" role="img">'
    )
    body = "\n".join(parts)
    return f'{head}\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, dashes: str = "none") -> str:
    """Return a straight line."""
    coordinates = f'x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}"'
    return f'<line {coordinates} stroke="{colour}" stroke-dasharray="{dashes}"/>'


def text(
    x: float,
    y: float,
    content: str,
    more: str = "",
    *,
    weight: str = "normal",
    anchor: str = "start",
    size: float = 13,
    colour: str = INK,
) -> str:
    """Return a line of text. ``more`` are further attributes."""
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{colour}" {more}'
    return f'<text x="{x}" y="{y}" {style}>{escape(content)}</text>'
