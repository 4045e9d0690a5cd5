#!/usr/bin/env python3
"""Draws the rooms of the package and who imports whom, as Mermaid text, from the imports in the source.

    python docs/draw_rooms.py            write the drawing into docs/how-it-works.md, between its markers
    python docs/draw_rooms.py --check    exit with 1 if it is not what the source says

A room is a folder of ``snip_megatron``. Grimp, the library behind import-linter, reads the imports. An arrow that
follows from two others is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import grimp
import networkx

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "snip_megatron"
PAGE = ROOT / "docs" / "how-it-works.md"
BEGIN, END = "<!-- rooms: python docs/draw_rooms.py -->", "<!-- end of rooms -->"

GROUPS = {
    "Commands": ("tools",),
    "Hosts": ("megatron", "plain"),
    "A run": ("reporting", "planner", "runtime"),
    "The choice": ("sensitivity", "solver", "timing"),
    "Quantised GEMMs": ("layers", "numerics", "precision"),
}
"""The boxes and what is in them. The arrows come from the source."""


def arrows() -> networkx.DiGraph:
    """An edge from each room to every room that it imports, without those that follow from others."""
    sys.path.insert(0, str(ROOT))
    graph = grimp.build_graph(PACKAGE)
    rooms = {room for group in GROUPS.values() for room in group}
    for room in rooms:
        graph.squash_module(f"{PACKAGE}.{room}")
    found = networkx.DiGraph()
    for room in sorted(rooms):
        imported = (name.rpartition(".")[2] for name in graph.find_modules_directly_imported_by(f"{PACKAGE}.{room}"))
        found.add_edges_from((room, other) for other in sorted(imported) if other in rooms - {room})
    return networkx.transitive_reduction(found)


def drawing() -> str:
    """The Mermaid block, fence included."""
    lines = ["```mermaid", "flowchart TD"]
    for number, (title, rooms) in enumerate(GROUPS.items()):
        lines += [f'    subgraph g{number}["{title}"]', *(f"        {room}" for room in rooms), "    end"]
    lines += [f"    {room} --> {other}" for room, other in sorted(arrows().edges)]
    return "\n".join([*lines, "```"])


def main(arguments: list[str]) -> int:
    """Write or check; the exit code."""
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    fresh = f"{head}{BEGIN}\n{drawing()}\n{END}{tail}"
    if arguments == ["--check"]:
        if fresh != page:
            print(
                "docs/how-it-works.md: its drawing is not what the imports say: python docs/draw_rooms.py",
                file=sys.stderr,
            )
        return int(fresh != page)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
