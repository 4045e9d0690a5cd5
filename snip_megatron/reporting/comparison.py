"""``snip report RUN RUN …``: several runs on one page. Configuration values that all runs share are left out."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format, Gemm, PrecisionMap
from snip_megatron.records.run_data import RunData, Update, load_run
from snip_megatron.reporting.figures import FORMAT_COLOURS, STAGE_COLOURS, UPDATE_COLOURS, Figure, thin
from snip_megatron.reporting.page import render_page, write_page
from snip_megatron.reporting.report import flatten, policy_line
from snip_megatron.reporting.summary import RunSummary, summarise
from snip_megatron.reporting.summary_text import headline

COMPARISON = "comparison.html"
MAX_RUNS = 8
"""The number of colours that readers can distinguish."""
TAIL = 0.1
"""The table shows the mean loss over this last share of the common steps."""


@dataclass(frozen=True)
class Row:
    """One run's row of the table, with losses in nats per token and times in seconds.

    A figure that the run did not record is None. Costs are those of the run's summary.
    """

    name: str
    policy: str
    verdict: str
    steps: int
    tail_loss: float | None
    validation: float | None
    adopted: int
    fp4_share: float | None
    predicted: float | None
    measured: float | None
    agreement: float | None
    per_update: float | None
    cost: float
    cost_share: float | None
    faults: int


def write_comparison(paths: Sequence[Path | str], out: Path | str | None = None) -> Path:
    """Write the page that compares several runs.

    Args:
        paths: 2 to 8 run directories.
        out: the output file; None for ``comparison.html`` in the first run directory.

    Returns:
        The path of the page.

    Raises:
        SnipError: a path is not a run directory or is given twice, or ``out`` cannot be written.
    """
    if len(paths) > MAX_RUNS:
        raise SnipError(f"{len(paths)} runs are too many for one page; give at most {MAX_RUNS}")
    resolved = [Path(path).resolve() for path in paths]
    for path in resolved:
        if resolved.count(path) > 1:
            raise SnipError(f"{path.name}: given twice; a run is compared with others")
    page = render_comparison([load_run(path) for path in paths])
    return write_page(page, Path(paths[0]) / COMPARISON if out is None else Path(out))


def render_comparison(runs: Sequence[RunData]) -> str:
    """Return the page as text. The first run is the one with which the others are compared."""
    names = run_names(runs)
    tail = _tail(runs)
    figures = {
        "loss": _lines(runs, names, "loss", Figure("loss")),
        "distance": _distance(runs, names),
        "share": _lines(runs, names, "fp4_fraction", Figure("fp4 share of FLOPs", share=True, zero=True)),
        "formats": _formats(runs, names),
        "cost": _cost(runs, names),
    }
    return render_page(
        "comparison.html",
        title=" · ".join(names),
        rows=[_row(run, name, runs[0], tail, summarise(run)) for run, name in zip(runs, names, strict=True)],
        names=names,
        tail=tail,
        differences=differences(runs),
        figures=figures,
        maps=None,
        unreadable=[line for run in runs for line in run.unreadable],
    )


def run_names(runs: Sequence[RunData]) -> list[str]:
    """Return the names of the run directories, with as many parent folders as make them distinct."""
    parts = [run.path.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [str(run.path) for run in runs]


def differences(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Return (key, value of each run) for each configuration value and fact that differs between the runs."""
    hidden = ("request", "linear_shapes")
    flat = [
        dict(flatten(r.config)) | dict(flatten({k: v for k, v in r.facts.items() if k not in hidden})) for r in runs
    ]
    keys = dict.fromkeys(key for one in flat for key in one)
    return [(key, [one.get(key, "–") for one in flat]) for key in keys if len({one.get(key) for one in flat}) > 1]


# -- figures -------------------------------------------------------------------------------------------------------
def _lines(runs: Sequence[RunData], names: Sequence[str], metric: str, figure: Figure) -> dict[str, Any] | None:
    form, shape = ("%{y:.2%}", "hv") if figure.share else ("%{y:.4f}", "linear")
    for run, name, colour in zip(runs, names, STAGE_COLOURS, strict=False):
        steps, values = run.series(metric)
        if any(value is not None for value in values):
            # The first run's line is broad, so that it stays visible under a line that coincides with it.
            figure.line(name, *thin(steps, values), colour, form, width=1.5 if run is not runs[0] else 4, shape=shape)
    return figure.as_dict() if figure.data else None


def _distance(runs: Sequence[RunData], names: Sequence[str]) -> dict[str, Any] | None:
    """Draw running means of each run's loss minus that of the first run."""
    base = _losses(runs[0])
    figure = Figure(f"loss less that of {names[0]}")
    for run, name, colour in list(zip(runs, names, STAGE_COLOURS, strict=False))[1:]:
        own = _losses(run)
        if steps := sorted(base.keys() & own.keys()):
            window = max(1, len(steps) // 20)
            sums = np.cumsum([0.0, *(own[s] - base[s] for s in steps)])
            starts = np.maximum(np.arange(1, len(sums)) - window, 0)
            means = (sums[1:] - sums[starts]) / (np.arange(1, len(sums)) - starts)
            figure.line(name, *thin(steps, means.tolist()), colour, "%{y:+.4f}", width=1.5)
    return figure.as_dict() if figure.data else None


def _formats(runs: Sequence[RunData], names: Sequence[str]) -> dict[str, Any] | None:
    """Draw one bar for each run: the shares of the last map's GEMMs by format."""
    counts = [Counter(_formats_of(last).values()) if (last := _last_map(run)) else Counter() for run in runs]
    figure = Figure("share of the last map's GEMMs", share=True)
    for fmt in Format:
        if any(count[fmt] for count in counts):
            shares = [count[fmt] / count.total() if count else None for count in counts]
            figure.bars(fmt.value, names, shares, FORMAT_COLOURS[fmt], f"{fmt.value} %{{y:.1%}}<extra></extra>")
    return figure.as_dict() if figure.data else None


def _cost(runs: Sequence[RunData], names: Sequence[str]) -> dict[str, Any] | None:
    """Draw two bars for each run: the mean seconds of an update by part, and the time that it blocked training."""
    parts: dict[str, Callable[[Update], float | None]] = {
        "collect": lambda u: u.collect_s,
        "probes": lambda u: sum(u.probes_s.values()) if u.probes_s else None,
        "solve": lambda u: u.solve_s,
        "training blocked": lambda u: u.wait_s,
    }
    figure = Figure("mean seconds of an update", zero=True)
    for name, get in parts.items():
        means = [_mean([get(update) for update in run.updates]) for run in runs]
        group = "blocked" if name == "training blocked" else "parts"
        figure.bars(name, names, means, UPDATE_COLOURS[name], f"{name} %{{y:.3g}} s<extra></extra>", group)
    return figure.as_dict() if any(any(trace["y"]) for trace in figure.data) else None


# -- the table -----------------------------------------------------------------------------------------------------
def _row(run: RunData, name: str, first: RunData, tail: tuple[int, int] | None, summary: RunSummary) -> Row:
    steps, _ = run.series("loss")
    losses, validations = _losses(run), run.validations()
    validation = list(validations.get("map", validations.get("bf16", {})).values())
    _, shares = run.series("fp4_fraction")
    last, base = _last_map(run), _last_map(first)
    return Row(
        name=name,
        policy=policy_line(run.config),
        verdict=headline(summary),
        steps=steps[-1] + 1 if steps else 0,
        tail_loss=_mean([losses.get(s) for s in range(*tail)]) if tail else None,
        validation=validation[-1] if validation else None,
        adopted=len(run.adoptions),
        fp4_share=next((value for value in reversed(shares) if value is not None), None),
        predicted=run.adoptions[-1].speedup if run.adoptions else None,
        measured=summary.judged.stretch.speedup if summary.judged is not None else None,
        agreement=_agreement(base, last) if base is not None and last is not None and run is not first else None,
        per_update=summary.update_s if summary.updates else None,
        cost=summary.cost_s,
        cost_share=summary.cost_share,
        faults=len(run.faults),
    )


def _tail(runs: Sequence[RunData]) -> tuple[int, int] | None:
    """Return [start, stop) of the last tenth of the steps that all runs have, or None if there are no such steps."""
    known = [run.series("loss")[0] for run in runs]
    if not all(known):
        return None
    first, stop = max(steps[0] for steps in known), min(steps[-1] for steps in known) + 1
    return (stop - max(1, round(TAIL * (stop - first))), stop) if stop > first else None


def _losses(run: RunData) -> dict[int, float]:
    return {s: v for s, v in zip(*run.series("loss"), strict=True) if v is not None}


def _last_map(run: RunData) -> PrecisionMap | None:
    return next((a.precision_map for a in reversed(run.adoptions) if a.precision_map is not None), None)


def _formats_of(precision_map: PrecisionMap) -> dict[tuple[str, Gemm], Format]:
    names = [str(linear) for linear in precision_map.linears()]
    return {key: precision_map.format_of(*key) for key in itertools.product(names, Gemm)}


def _agreement(base: PrecisionMap, other: PrecisionMap) -> float | None:
    """Return the share of the GEMMs common to both maps that have the same format, or None without common GEMMs."""
    one, two = _formats_of(base), _formats_of(other)
    both = one.keys() & two.keys()
    return sum(one[key] is two[key] for key in both) / len(both) if both else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
