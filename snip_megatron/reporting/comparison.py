"""``snip report RUN RUN …``: several runs on one page. Configuration values that all runs share are left out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from snip_megatron.numerics.products import EMULATIONS
from snip_megatron.precision.errors import SnipError
from snip_megatron.reporting.figures import STAGE_COLOURS, Figure, thin
from snip_megatron.reporting.page import render_page, write_page
from snip_megatron.reporting.report import formats_now, machine_line, pairs, policy_line, shown_facts
from snip_megatron.reporting.summary import RunSummary, summarise
from snip_megatron.reporting.summary_text import headline
from snip_megatron.runtime.account import TOLERANCE
from snip_megatron.runtime.records.run_data import RunData, load_run

COMPARISON = "comparison.html"
MAX_RUNS = 8
"""The number of colours that readers can distinguish."""
TAIL = 0.1
"""The table shows the mean loss over this last share of the common steps."""


_ERRORS = 2.0
"""Standard errors of a difference of losses from which on it counts."""
_BLOCKS = 10


@dataclass(frozen=True)
class Against:
    """A run against the first one.

    ``speed`` is its tokens a second over those of the first run, costs of SNIP included; None if either is unknown.
    ``loss`` is its loss less that of the first run, over the last tenth of the common steps; None without such steps.
    ``error`` is the standard error of ``loss``, from the means of blocks of steps; None with too few steps.
    """

    name: str
    speed: float | None
    loss: float | None
    error: float | None

    @property
    def pace(self) -> str:
        if self.speed is None:
            return "of unknown speed"
        return "faster" if self.speed > TOLERANCE else "slower" if self.speed < 1.0 / TOLERANCE else "as fast"

    @property
    def quality(self) -> str:
        if self.loss is None or self.error is None or abs(self.loss) <= _ERRORS * self.error:
            return "no difference shown"
        return "better" if self.loss < 0 else "worse"

    def __str__(self) -> str:
        speed = "" if self.speed is None else f" ({self.speed:.2f} × the tokens a second, costs of SNIP included)"
        noise = "" if self.error is None else f" ± {_ERRORS * self.error:.4f}"
        loss = "its loss is not comparable" if self.loss is None else f"loss {self.loss:+.4f}{noise}, {self.quality}"
        return f"{self.name} is {self.pace}{speed}; {loss}."


def write_comparison(paths: Sequence[Path | str], out: Path | str | None = None) -> Path:
    """Write the page that compares 2 to 8 run directories, by default in the first one. Return its path.

    Raises SnipError if a path is not a run directory or is given twice, or ``out`` cannot be written.
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
    names, tail = run_names(runs), _tail(runs)
    summaries = [summarise(run) for run in runs]
    figures = {
        "loss": _lines(runs, names, "loss", Figure("loss")),
        "distance": _distance(runs, names),
        "share": _lines(runs, names, "fp4_fraction", Figure("fp4 share of FLOPs", share=True, zero=True)),
    }
    others = _against(runs, names, summaries)
    return render_page(
        "comparison.html",
        title=" · ".join(names),
        verdict=verdict(names[0], others),
        others=others,
        rows=[_row(*each, tail) for each in zip(runs, names, summaries, strict=True)],
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
    flat = [dict(pairs(r.config)) | dict(pairs(shown_facts(r))) for r in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    return [(key, [one.get(key, "–") for one in flat]) for key in keys if len({one.get(key) for one in flat}) > 1]


# -- figures -------------------------------------------------------------------------------------------------------
def _lines(runs: Sequence[RunData], names: Sequence[str], metric: str, figure: Figure) -> dict[str, Any] | None:
    form, shape = ("%{y:.2%}", "hv") if figure.share else ("%{y:.4f}", "linear")
    for run, name, colour in zip(runs, names, STAGE_COLOURS, strict=False):
        steps, values = run.series(metric)
        if any(values):
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


# -- verdict and table ---------------------------------------------------------------------------------------------
def verdict(first: str, others: Sequence[Against]) -> str:
    """Return which run to take, in one sentence."""
    if all(each.speed is None for each in others):
        known = [each for each in others if each.quality == "better"]
        best = min(known, key=lambda each: each.loss or 0.0).name if known else first
        return f"Speeds cannot be compared; by the loss, {'take ' + best if known else 'none is better than ' + first}."
    good = [each for each in others if each.pace == "faster" and each.quality != "worse"]
    if good:
        best_of = max(good, key=lambda each: each.speed or 0.0)
        return f"Take {best_of.name}: {best_of.speed:.2f} × as fast as {first}, and no worse as far as the loss shows."
    if trades := [each.name for each in others if each.pace == "faster"]:
        return f"A trade: {', '.join(trades)} costs loss for its speed; else take {first}."
    better = [each.name for each in others if each.quality == "better" and each.pace == "as fast"]
    return f"Take {better[0]}: as fast as {first}, with less loss." if better else f"Take {first}: none is faster."


def _against(runs: Sequence[RunData], names: Sequence[str], summaries: Sequence[RunSummary]) -> list[Against]:
    paces = [_pace(run, summary) for run, summary in zip(runs, summaries, strict=True)]
    tail, base = _tail(runs), _losses(runs[0])
    found = []
    for run, name, pace in list(zip(runs, names, paces, strict=True))[1:]:
        own = _losses(run)
        differences = [own[s] - base[s] for s in range(*tail) if s in own and s in base] if tail else []
        same = all(run.facts.get(fact) == runs[0].facts.get(fact) for fact in ("device", "world_size"))
        speed = pace / paces[0] if same and pace and paces[0] else None
        blocks = [float(np.mean(each)) for each in np.array_split(differences, _BLOCKS) if len(each)]
        error = float(np.std(blocks, ddof=1) / math.sqrt(_BLOCKS)) if len(blocks) == _BLOCKS else None
        found.append(Against(name, speed, _mean(differences), error))
    return found


def _pace(run: RunData, summary: RunSummary) -> float | None:
    """Return tokens a second, SNIP's costs included; None where steps mean nothing, as with emulated formats."""
    if summary.tokens_s is None or run.facts.get("gemm_backend") in EMULATIONS:
        return None
    return summary.tokens_s * (1.0 - (summary.cost_share or 0.0))


def _row(run: RunData, name: str, summary: RunSummary, tail: tuple[int, int] | None) -> dict[str, Any]:
    """Return one run's row of the table, losses in nats per token. A figure that the run did not record is None."""
    losses, validations = _losses(run), run.validations()
    validation = list(validations.get("map", validations.get("bf16", {})).values())
    now = next((m for m in reversed(summary.maps) if m.step_s), None)
    return {
        "name": name,
        "machine": machine_line(run),
        "policy": policy_line(run.config),
        "verdict": headline(summary),
        "steps": summary.steps,
        "tail_loss": _mean([losses.get(s) for s in range(*tail)]) if tail else None,
        "validation": validation[-1] if validation else None,
        "adopted": len(run.maps),
        "formats": formats_now(run),
        "tokens_s": summary.tokens_s,
        "median_s": None if now is None else now.step_s,
        "mean_s": None if now is None else now.mean_s,
        "predicted": run.adoptions[-1].speedup if run.adoptions else None,
        "measured": None if summary.judged is None else summary.judged.speedup,
        "per_update": summary.update_s if summary.updates else None,
        "cost": summary.cost_s,
        "cost_share": summary.cost_share,
        "faults": len(run.faults),
    }


def _tail(runs: Sequence[RunData]) -> tuple[int, int] | None:
    """Return [start, stop) of the last tenth of the steps that all runs have, or None if there are no such steps."""
    known = [run.series("loss")[0] for run in runs]
    if not all(known):
        return None
    first, stop = max(steps[0] for steps in known), min(steps[-1] for steps in known) + 1
    return (stop - max(1, round(TAIL * (stop - first))), stop) if stop > first else None


def _losses(run: RunData) -> dict[int, float]:
    return {s: v for s, v in zip(*run.series("loss"), strict=True) if v is not None}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
