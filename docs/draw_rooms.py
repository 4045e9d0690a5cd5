#!/usr/bin/env python3
"""Draws the rooms of the package and who imports whom, as Mermaid text, from the imports in the source.

    python docs/draw_rooms.py            write the drawing into docs/how-it-works.md, between its markers
    python docs/draw_rooms.py --check    exit with 1 if it is not what the source says

A room is a folder of ``snip_megatron``, or one of the modules beside them that a training step passes through. An arrow
that follows from two others is left out; where two rooms import each other, the arrow has two heads.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "snip_megatron"
PAGE = ROOT / "docs" / "how-it-works.md"
BEGIN, END = "<!-- rooms: python docs/draw_rooms.py -->", "<!-- end of rooms -->"

GROUPS = {
    "Training ranks": ("megatron", "controller", "layers", "gemm", "quantization", "statistics"),
    "Rank 0 and the process beside it": ("coordinator", "sidecar", "sensitivity", "solver"),
    "Run directory and pages": ("reporting", "replay"),
    "Commands without training": ("cli", "doctor", "planner", "calibration", "evaluation", "export", "launch"),
}
"""Only for the boxes: the arrows come from the source. ``precision``, ``config`` and ``errors`` serve everybody."""
PARTS = {
    "controller": ("controller", "adoption", "guard", "trigger", "controller_state", "step_report"),
    "coordinator": ("coordinator", "pace"),
    "megatron": ("megatron", "pretrain_gpt", "bridge"),
}
"""Modules drawn as one box under another name."""


def room_of(module: str) -> str | None:
    """The room of a dotted module of the package; None for one that is not drawn."""
    parts = module.split(".")
    if parts[0] != PACKAGE.name or len(parts) < 2:
        return None
    name = next((room for room, members in PARTS.items() if parts[1] in members), parts[1])
    return name if any(name in rooms for rooms in GROUPS.values()) else None


def imports_of(path: Path) -> set[str]:
    """Dotted names that a module imports anywhere, and the modules that its command tables name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            dotted = node.value.startswith(f"{PACKAGE.name}.") and node.value.replace(".", "_").isidentifier()
            found |= {node.value} if dotted else set()
    return found


def arrows() -> dict[str, set[str]]:
    """Room → rooms that it imports."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if (room := room_of(module)) is not None:
            found[room] |= {other for name in imports_of(path) if (other := room_of(name)) not in (None, room)}  # type: ignore[misc]
    return found


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without the arrows that follow from others."""

    def reach(start: str, skip: tuple[str, str]) -> set[str]:
        seen: set[str] = set()
        queue = [start]
        while queue:
            room = queue.pop()
            for other in graph.get(room, ()):
                if (room, other) != skip and other not in seen:
                    seen.add(other)
                    queue.append(other)
        return seen

    graph = {room: set(others) for room, others in graph.items()}
    for room in sorted(graph):
        for other in sorted(graph[room]):
            if room not in graph.get(other, ()) and other in reach(room, (room, other)):
                graph[room].discard(other)
    return graph


def drawing() -> str:
    """The Mermaid block, fence included."""
    graph = arrows()
    present = {room for room in graph if (PACKAGE / room).exists() or (PACKAGE / f"{room}.py").exists()}
    lines = ["```mermaid", "flowchart TD"]
    for number, (title, rooms) in enumerate(GROUPS.items()):
        lines.append(f'    subgraph g{number}["{title}"]')
        lines += [f"        {room}" for room in rooms if room in present]
        lines.append("    end")
    for room, others in sorted(reduced(graph).items()):
        for other in sorted(others & present):
            both = room in graph.get(other, ())
            if not both or room < other:
                lines.append(f"    {room} {'<-->' if both else '-->'} {other}")
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
