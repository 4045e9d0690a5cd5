"""The matrix of layouts and the matrix of resumes, as one command from the repository's root:

    PYTHONPATH=.:tests/distributed python -m layout_matrix --full --out benchmarks/layouts_cpu_<date>.json

Without ``--full``: the part that the suite runs. ``--only layouts`` or ``--only resumes`` for one of the two,
``--rows 'layout experts*'`` for rows of such names. Rows are written as they come; a command that was interrupted goes
on after those that its file holds. Beside the file goes the table as Markdown. Exit code 1 when a row is beyond its
limits.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from agreement import STATISTICS_LIMIT, TOUCHED_SHARE
from launch import REPOSITORY
from layouts import FAST, LAYOUTS, LOSS_LIMIT, MODELS, RAGGED_LIMIT, LayoutRuns
from resumes import FAST_OTHER, OTHER_LAYOUT, RESHARDED_POINTS, SAME_LAYOUT, ResumeRuns
from warm_ranks import WarmRanks

Row = dict[str, Any]
Rows = Iterator[tuple[str, Callable[[], Row]]]

STEPS, LAG = 20, 2
"""Trained after the checkpoint, and from the probe to the map, of the layouts."""
LAYOUT_COLUMNS = (
    "layout", "ranks", "against", "steps", "bitwise", "statistics", "ragged", "close", "touched", "flips", "map_equal",
    "loss_difference", "worst_loss_difference", "passed",
)  # fmt: skip
"""What the table shows of a layout."""


def layout_rows(runs: LayoutRuns, *, full: bool) -> Rows:
    """(key, what makes the row) of the matrix of layouts."""
    bases = {model.base for model in MODELS.values()}
    for name in (n for n in LAYOUTS if n not in bases) if full else FAST:
        yield f"layout {name}", lambda name=name: runs.compare(name)  # type: ignore[misc]


def resume_rows(runs: ResumeRuns, *, full: bool) -> Rows:
    """(key, what makes the row) of the matrix of resumes."""
    for name, case in SAME_LAYOUT.items():
        for point in case.points if full else case.fast:
            yield f"resume {name} {point}", lambda name=name, point=point: runs.resume(name, point)  # type: ignore[misc]
    moves = FAST_OTHER
    if full:
        moves = tuple((a, b, point) for a, b in OTHER_LAYOUT for point in RESHARDED_POINTS)
    for move in moves:
        yield "move {} {} {}".format(*move), lambda move=move: runs.move(*move)  # type: ignore[misc]
    for name in ("world-1", "pp2-virtual") if full else ("world-1",):
        yield f"leave {name}", lambda name=name: runs.leave_snip(name, 7)  # type: ignore[misc]
        yield f"enter {name}", lambda name=name: runs.enter_snip(name)  # type: ignore[misc]


def header() -> Row:
    """Where the rows come from."""
    import torch
    from megatron.core import __version__ as megatron

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return {
        "command": " ".join(["python -m layout_matrix", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() or os.environ.get("SNIP_COMMIT", "unknown"),
        "device": f"CPU, {os.cpu_count()} cores, gloo, fp32",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "megatron-core": megatron},
        "limits": {"statistics": STATISTICS_LIMIT, "loss": LOSS_LIMIT},
    }


# -- the table -------------------------------------------------------------------------------------------------
def markdown(result: Row) -> str:
    """The file's rows as tables."""
    experts = all(key.startswith("layout experts") for key in result["rows"])
    lines = [
        f"# {'Layouts of experts' if experts else 'Layouts and resumes'}, {result['date']}",
        "",
        f"`{result['command']}` on {result['device']}; commit {result['commit'][:12]}.",
        *([result["note"]] if "note" in result else []),
    ]
    rows = result["rows"]
    layouts = [row for key, row in rows.items() if key.startswith("layout ")]
    if layouts:
        lines += _layout_table(layouts, result)
    resumes = [row for key, row in rows.items() if key.startswith("resume ")]
    if resumes:
        lines += ["", "## Resumed on the same layout: bit for bit", ""]
        lines += ["| run | after step | the checkpoint holds | figures | decisions | maps | last checkpoint |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for row in resumes:
            cells = (_yes(row[name]) for name in ("figures", "decisions", "maps", "checkpoint"))
            lines.append(f"| {row['run']} | {row['point']} | {row['state']} | {' | '.join(cells)} |")
    moves = [row for key, row in rows.items() if key.startswith("move ")]
    if moves:
        lines += ["", "## Resumed on another layout: the same maps at the same steps", ""]
        lines += ["Later maps: what they cost more than the uninterrupted run's own, by its scores; 0: equal.", ""]
        lines += [
            "| from → to | after step | the checkpoint holds | decisions | first map | later maps | worst Δ loss |"
        ]
        lines += ["|---|---|---|---|---|---|---|"]
        for row in moves:
            later = f"+{100 * row['excess']:.2f} %" if row["excess"] else "0"
            cells = (_yes(row["decisions"]), _yes(row["maps"]), later, f"{row['loss_difference']:.1e}")
            lines.append(f"| {row['run']} | {row['point']} | {row['state']} | {' | '.join(cells)} |")
    others = [row for key, row in rows.items() if key.split()[0] in ("leave", "enter")]
    if others:
        lines += ["", "## With and without SNIP", "", "| checkpoint | after step | as it should be |", "|---|---|---|"]
        lines += [f"| {row['run']} | {row['point']} | {_yes(row['passed'])} |" for row in others]
    return "\n".join(lines) + "\n"


def _layout_table(rows: list[Row], result: Row) -> list[str]:
    steps = rows[0]["steps"]
    lines = [
        "",
        "## Layouts, from one checkpoint",
        "",
        f"Worst relative difference of the statistics (limit {STATISTICS_LIMIT:g}; in brackets experts' tiles along"
        f" tokens, whose number is no multiple of 128, limit {RAGGED_LIMIT:g}). Differences of close quantities, drift"
        f" among them, as a share of their limit. Share of c2 and e2 that a value on a boundary of roundings moves"
        f" (limit {TOUCHED_SHARE:g}), and the worst as a share of its limit. Map. Relative difference of the loss after"
        f" {steps} steps and the worst of any step (limit {LOSS_LIMIT:g}).",
    ]
    if "yardstick" in result:
        lines += [
            f"Yardstick: one rank, same map, other draws of stochastic rounding: after {steps} steps"
            f" {result['yardstick']['loss_difference']:.1e}, worst {result['yardstick']['worst_loss_difference']:.1e}.",
        ]
    lines += ["", "| layout | ranks | against | statistics | close | flips | map | Δ loss | worst Δ loss | |"]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        if row["bitwise"]:
            figures = ["bitwise" if row["identical"] else f"{row['statistics']:.1e}", "–", "–"]
        else:
            ragged = f" ({row['ragged']:.0e})" if row["ragged"] else ""
            figures = [f"{row['statistics']:.1e}{ragged}", f"{row['close']:.2f}"]
            figures += [f"{row['touched']:.2f}, {row['flips']:.2f}"]
        figures += ["equal" if row["map_equal"] else "**differs**"]
        figures += [f"{row[name]:.1e}" if row[name] else "0" for name in ("loss_difference", "worst_loss_difference")]
        end = "" if row["passed"] else "**beyond**"
        lines.append(f"| {row['layout']} | {row['ranks']} | {row['against']} | {' | '.join(figures)} | {end} |")
    return lines


def _yes(value: bool) -> str:
    return "equal" if value else "**differs**"


# -- the command -----------------------------------------------------------------------------------------------
def write(path: Path, result: Row) -> None:
    """The JSON and, beside it, the table."""
    for target, text in ((path, json.dumps(result, indent=1) + "\n"), (path.with_suffix(".md"), markdown(result))):
        temporary = target.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.replace(target)


def earlier(out: Path) -> Row | None:
    """The result that ``out`` holds, to be added to; None without one. Exits if its rows have other columns."""
    if not out.is_file():
        return None
    result: Row = json.loads(out.read_text())
    for key, row in result["rows"].items():
        missing = [name for name in LAYOUT_COLUMNS if name not in row] if key.startswith("layout ") else []
        if missing:
            sys.exit(
                f"layout_matrix: --out {out}: written by an earlier version ({key} has no {missing[0]}): name another"
                " file, or remove this one to measure all rows again"
            )
    return result


def run(out: Path, folder: Path, *, full: bool, only: str | None, names: str = "*") -> Row:
    """Make the rows that ``out`` does not hold yet, of those whose name matches the glob ``names``."""
    here = header()
    result = earlier(out) or here | {"rows": {}}
    if here["command"] not in result["command"].split("; "):
        result["command"] += "; " + here["command"]
    result["seconds"] = result.get("seconds", 0.0)
    warm = WarmRanks()
    try:
        layouts = LayoutRuns(warm, folder, STEPS, LAG)
        todo: list[tuple[str, Callable[[], Row]]] = []
        if only != "resumes":
            if "yardstick" not in result and names == "*":
                result["yardstick"] = layouts.other_draws()
            todo += layout_rows(layouts, full=full)
        if only != "layouts":
            todo += resume_rows(ResumeRuns(warm, folder), full=full)
        for key, make in todo:
            if key in result["rows"] or not fnmatchcase(key, names):
                continue
            started = time.perf_counter()
            result["rows"][key] = row = make()
            result["seconds"] += round(time.perf_counter() - started, 1)
            print(f"{key}: {'as it should be' if row['passed'] else f'NOT as it should be: {row}'}", flush=True)
            write(out, result)
    finally:
        warm.close()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="Matrices of layouts and resumes")
    parser.add_argument("--full", action="store_true", help="every row, not only the suite's")
    parser.add_argument("--only", choices=("layouts", "resumes"))
    parser.add_argument("--rows", default="*", metavar="GLOB", help="only rows whose names match")
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON); its table goes beside it")
    parser.add_argument("--work", type=Path, help="folder for runs and checkpoints (default: a temporary one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.work or Path(temporary)
        result = run(arguments.out, folder, full=arguments.full, only=arguments.only, names=arguments.rows)
    print(markdown(result))
    rows = result["rows"].values()
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
