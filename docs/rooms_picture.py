"""The drawing of the rooms as SVG, for the site: browsers need a script from elsewhere to draw Mermaid text."""

from __future__ import annotations

import re

WIDE, HIGH, GAP, STEP = 112, 30, 16, 104
"""Width and height of a room, space between two rooms, and distance of two rows, in pixels."""


def parse(text: str) -> tuple[dict[str, list[str]], list[tuple[str, str]]]:
    """Read the Mermaid text of ``draw_rooms.py``: rooms by title of their group, and arrows."""
    groups: dict[str, list[str]] = {}
    for title, body in re.findall(r'subgraph \w+\["([^"]+)"\]\n(.*?)\n\s*end', text, re.DOTALL):
        groups[title] = body.split()
    return groups, re.findall(r"(\w+) --> (\w+)", text)


def svg(text: str) -> str:
    """Draw one row of boxes for each group, and curves for the arrows. Colours are those of the page."""
    groups, arrows = parse(text)
    most = max(map(len, groups.values()))
    width, height = most * (WIDE + GAP) + GAP, len(groups) * STEP + 8
    place: dict[str, tuple[int, int]] = {}
    boxes = []
    for row, (title, rooms) in enumerate(groups.items()):
        top = row * STEP + 8
        left = (width - len(rooms) * (WIDE + GAP) + GAP) // 2
        boxes.append(f'<text x="{GAP}" y="{top + 8}" class="title">{title}</text>')
        for column, room in enumerate(rooms):
            x, y = left + column * (WIDE + GAP), top + 18
            place[room] = x, y
            label = f'<text x="{x + WIDE // 2}" y="{y + 20}">{room}</text>'
            boxes.append(f'<rect x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="5"/>{label}')
    curves = "".join(f'<path d="{_curve(place[a], place[b])}"/>' for a, b in arrows)
    style = (
        "rect{fill:none;stroke:currentColor}text{fill:currentColor;font:13px sans-serif;text-anchor:middle}"
        ".title{text-anchor:start;font-weight:bold}path{fill:none;stroke:currentColor;opacity:.45;marker-end:url(#tip)}"
    )
    tip = '<marker id="tip" markerWidth="7" markerHeight="6" refX="7" refY="3" orient="auto">'
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="The rooms and their imports" class="rooms">'
    scoped = re.sub(r"(^|\})(?=[^}])", r"\1.rooms ", style)
    return (
        f'{head}<style>{scoped}</style><defs>{tip}<polygon points="0 0, 7 3, 0 6" fill="currentColor"/></marker></defs>'
        f"{curves}{''.join(boxes)}</svg>"
    )


def _curve(start: tuple[int, int], end: tuple[int, int]) -> str:
    """From the bottom of one room to the top of a room in a lower row, or around the rooms between two of one row."""
    (x1, y1), (x2, y2) = start, end
    if y1 < y2:
        a, b = (x1 + WIDE // 2, y1 + HIGH), (x2 + WIDE // 2, y2)
        half = (b[1] - a[1]) // 2
        return f"M{a[0]} {a[1]} C{a[0]} {a[1] + half} {b[0]} {b[1] - half} {b[0]} {b[1]}"
    if y1 > y2:
        return _upwards(start, end)
    if abs(x1 - x2) == WIDE + GAP:
        right = x2 > x1
        return f"M{x1 + WIDE * right} {y1 + HIGH // 2} L{x2 + WIDE * (not right)} {y1 + HIGH // 2}"
    a, b, low = x1 + WIDE // 2, x2 + WIDE // 2, y1 + HIGH
    return f"M{a} {low} C{a} {low + 26} {b} {low + 26} {b} {low}"


def _upwards(start: tuple[int, int], end: tuple[int, int]) -> str:
    """From the top of a room to the bottom of a room in a higher row."""
    (x1, y1), (x2, y2) = start, end
    a, b = (x1 + WIDE // 2, y1), (x2 + WIDE // 2, y2 + HIGH)
    half = (a[1] - b[1]) // 2
    return f"M{a[0]} {a[1]} C{a[0]} {a[1] - half} {b[0]} {b[1] + half} {b[0]} {b[1]}"
