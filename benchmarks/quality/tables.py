"""The markdown page of a comparison: policies, differences with confidence intervals, origin of the figures."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.quality.experiment import VALIDATIONS
from benchmarks.quality.results import Results
from benchmarks.quality.statistics import (
    Difference,
    Row,
    differences,
    latest,
    planned_count,
    rows,
)

TITLES = {"from_warm": "From the warm checkpoint", "from_scratch": "From scratch"}


def markdown(results: Results) -> str:
    """Return the page. Phases without a finished run are left out."""
    table = rows(list(results.runs.values()))
    parts = [f"# {results.experiment['name']}", _origin(results)]
    for kind, title in TITLES.items():
        of_kind = _ordered(results, [row for row in table if row.kind == kind])
        if of_kind:
            parts += [f"## {title}", _policies(of_kind)]
    planned = results.experiment.get("planned", [])
    if announced := differences(table, planned):
        count = planned_count(planned)
        over = f"these {count}" if count == len(announced) else f"all {count}, of which {len(announced)} were made"
        parts += [f"## Planned comparisons (p by Holm over {over})", _differences(announced)]
    failed = [entry for entry in latest(list(results.runs.values())) if entry["status"] != "done"]
    if failed:
        parts += ["## Failed", "\n".join(f"- {e['label']}, seed {e['seed']}: {e.get('error')}" for e in failed)]
    return "\n\n".join(parts) + "\n"


def spread(values: Iterable[float], digits: int) -> str:
    """Format values as ``mean ± std``, a single value without ``± std``, and no value as a dash."""
    numbers = list(values)
    if not numbers:
        return "–"
    deviation = "" if len(numbers) == 1 else f" ± {np.std(numbers, ddof=1):.{digits}f}"
    return f"{np.mean(numbers):.{digits}f}{deviation}"


def _ordered(results: Results, table: Sequence[Row]) -> list[Row]:
    """Sort rows by budget, then in the order of the experiment file. Policies that the file lacks come last."""
    phases = results.experiment.get("phases", [])
    labels = [(phase["kind"], candidate["label"]) for phase in phases for candidate in phase["candidates"]]

    def place(row: Row) -> tuple[bool, float, int]:
        key = (row.kind, row.label)
        return row.budget is not None, row.budget or 0.0, labels.index(key) if key in labels else len(labels)

    return sorted(table, key=place)


def _policies(table: Sequence[Row]) -> str:
    lines = [
        "| budget | policy | fp4 share | gap, map's formats | recovered, map's formats | recovered, bf16 | runs |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in table:
        budget = "–" if row.budget is None else f"{100 * row.budget:g} %"
        figures = [spread(row.gap["map"].values(), 4), *(spread(row.recovered[f].values(), 3) for f in VALIDATIONS)]
        lines.append(f"| {budget} | {row.label} | {row.share:.3f} | {' | '.join(figures)} | {len(row.gap['map'])} |")
    return "\n".join(lines)


def _differences(pairs: Sequence[Difference]) -> str:
    lines = [
        "| validated in | budget | difference, gap recovered | mean | 95 % interval | p (Holm) | the first is |",
        "|---|---|---|---|---|---|---|",
    ]
    for d in pairs:
        formats = "the map's formats" if d.validation == "map" else d.validation
        lines.append(f"| {formats} | {100 * d.budget:g} % | {d.ours} − {d.theirs} | {_figures(d)} |")
    return "\n".join(lines)


def _figures(d: Difference) -> str:
    """Return the last four columns of a row: mean, interval, p-value, verdict."""
    interval = "–" if d.low is None or d.high is None else f"{d.low:+.3f} … {d.high:+.3f}"
    p = "–" if d.adjusted is None else f"{d.adjusted:.3f}"
    return f"{d.mean:+.3f} | {interval} | {p} | {d.verdict}"


def _origin(results: Results) -> str:
    """Return the list that describes the origin of the figures: commit, hardware, text, checkpoint."""
    finished = [entry for entry in results.runs.values() if entry["status"] == "done"]
    experiment: Mapping[str, Any] = results.experiment
    lines = [
        f"- model {experiment['model']}, {len(finished)} runs, seeds {_list(e['seed'] for e in finished)}",
        f"- commit {_list(e['commit'] for e in finished)}; {_list(e['hardware'] for e in finished)}; torch"
        f" {_list(e['torch'] for e in finished)}; {_list(e['date'] for e in finished)}",
        f"- text: {results.data['tokens']:,} training tokens, sha256 {str(results.data['sha256'])[:16]}",
        *(
            f"- warm checkpoint: {facts['steps']} steps, weights sha256 {sha[:16]}"
            for sha, facts in results.warm.items()
        ),
        f"- runs side by side: {_list(e['side_by_side'] for e in finished)}",
        "- gap: validation loss − that of bf16; recovered: 1 − gap / gap of uniform-fp4; mean ± std over runs",
    ]
    return "\n".join(lines)


def _list(values: Iterable[Any]) -> str:
    return ", ".join(str(value) for value in sorted(set(values))) or "–"
