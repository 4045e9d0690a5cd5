"""`report.html`: one self-contained page about a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from snip_megatron.reporting.figures import front_figure, loss_figure, share_figure, timing_figure
from snip_megatron.reporting.front import latest_front
from snip_megatron.reporting.map_view import map_payload
from snip_megatron.reporting.page import render_page, write_page
from snip_megatron.reporting.readers import REPORT
from snip_megatron.reporting.run_data import RunData, fields_of, load_run, number
from snip_megatron.reporting.stage_view import saved_figure, stage_view
from snip_megatron.reporting.truth_view import latest_truth

MAX_EVENT_ROWS = 1000
"""Rows of the table of all events; a longer record shows its end."""


def write_report(run: Path | str, out: Path | str | None = None, cost: str | None = None) -> Path:
    """Write the page about the run directory ``run`` to ``out`` (default: its report.html); returns the path.

    ``cost``: the cost model of predicted times (``flops``, a table's name or file); None: what the run itself used,
    else ``flops``. Raises SnipError if ``run`` is no run directory, ``cost`` is none or ``out`` cannot be written.
    """
    return write_page(render(load_run(run), cost), Path(run) / REPORT if out is None else Path(out))


def render(run: RunData, cost: str | None = None) -> str:
    """The page as text."""
    target = target_share(run.config)
    unreadable = list(run.unreadable)
    front = latest_front(run.path, run.updates, unreadable)
    stages = stage_view(run, cost, unreadable)
    figures = {
        "loss": loss_figure(run),
        "share": share_figure(run, target, None if stages is None else stages.shares_of(run.adoptions)),
        "saved": None if stages is None else saved_figure(stages),
        "front": front_figure(front),
        "timing": timing_figure(run.updates),
    }
    truth = latest_truth(run.path, unreadable)
    if truth is not None:
        figures["truth"] = dict(truth.figure)
    return render_page(
        "report.html",
        title=run.path.resolve().name,
        policy=policy_line(run.config),
        tiles=_tiles(run),
        figures=figures,
        maps=map_payload(run.adoptions),
        stages=stages,
        front=front,
        truth=truth,
        updates=run.updates,
        timed=any(update.speedup is not None for update in run.updates),
        faults=[_event_row(event) for event in run.faults],
        events=[_event_row(event) for event in run.events[-MAX_EVENT_ROWS:]],
        events_left_out=max(0, len(run.events) - MAX_EVENT_ROWS),
        tables=[("Facts", flatten(_plain_facts(run.facts))), ("Configuration", flatten(run.config))],
        unreadable=unreadable,
    )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(dotted key, value as text) of a configuration."""
    rows: list[tuple[str, str]] = []
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            rows += flatten(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)))
    return rows


# -- parts of the page ---------------------------------------------------------------------------------------------
def _tiles(run: RunData) -> list[tuple[str, str]]:
    """The figures at the top: (label, value)."""
    steps, losses = run.series("loss")
    finite = [(step, loss) for step, loss in zip(steps, losses, strict=True) if loss is not None]
    _, fractions = run.series("fp4_fraction")
    share = next((value for value in reversed(fractions) if value is not None), None)
    if share is None and run.adoptions:
        share = run.adoptions[-1].achieved
    stages = {stage for adoption in run.adoptions for stage in adoption.achieved_per_stage}
    blocked = sum(update.wait_s or 0.0 for update in run.updates)
    tiles = [("training steps", f"{steps[-1] + 1:,}" if steps else "none")]
    if finite:
        tiles.append((f"loss at step {finite[-1][0]:,}", f"{finite[-1][1]:.4f}"))
    if len(finite) < len(losses):
        tiles.append(("steps with a non-finite loss", f"{len(losses) - len(finite):,}"))
    tiles.append(("maps adopted", f"{len(run.adoptions):,}"))
    if share is not None:
        tiles.append(("fp4 share now", f"{share:.1%}"))
    timed = [adoption for adoption in run.adoptions if adoption.asked is not None]
    if timed:
        tiles.append(("asked", str(timed[-1].asked)))
        if timed[-1].speedup is not None:
            tiles.append(("predicted speedup of the linears now", f"{timed[-1].speedup:.3f}"))
        step = number(timed[-1].fields.get("step_speedup"))
        if step is not None:
            tiles.append(("predicted speedup of a step now", f"{step:.3f}"))
        if timed[-1].loss is not None:
            tiles.append(("predicted loss now", f"{timed[-1].loss:.3g}"))
    if len(stages) > 1:
        tiles.append(("pipeline stages", str(len(stages))))
    if run.updates:
        tiles.append(("training blocked by updates", f"{blocked:.2f} s"))
    tiles.append(("faults", f"{len(run.faults):,}"))
    return tiles


def _plain_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Without what `snip solve` needs and nobody reads: the request and the shapes behind it."""
    return {
        name: value for name, value in facts.items() if name not in ("request", "linear_shapes", "unquantised_flops")
    }


def policy_line(config: Mapping[str, Any]) -> str:
    """What the run did, in a line."""
    named = [f"{name} {config[name]}" for name in ("policy", "budget", "granularity", "estimator") if name in config]
    return " · ".join(named)


def target_share(config: Mapping[str, Any]) -> float | None:
    """The wanted fp4 share, from ``budget`` as text (``fp4=0.75``) or as an object ({"fp4": 0.75})."""
    budget = config.get("budget")
    if isinstance(budget, Mapping):
        return number(budget.get("fp4"))
    kind, _, value = str(budget).partition("=")
    try:
        return number(float(value)) if kind == "fp4" else None
    except ValueError:
        return None


def _event_row(event: Mapping[str, Any]) -> dict[str, str]:
    at = number(event.get("time"))
    try:
        when = "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        when = ""
    details = {name: value for name, value in fields_of(event).items() if value is not None}
    return {"when": when, "step": str(event["step"]), "event": event["event"], "details": _details(details)}


def _details(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in fields.items())


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return "{" + _details(value) + "}"
    return value if isinstance(value, str) else json.dumps(value)
