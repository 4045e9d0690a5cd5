"""``report.html``, a self-contained page about one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from snip_megatron.errors import SnipError
from snip_megatron.precision.budget import Budget
from snip_megatron.records.readers import REPORT
from snip_megatron.records.run_data import RunData, fields_of, load_run, number
from snip_megatron.reporting.figures import front_figure, loss_figure, share_figure, timing_figure
from snip_megatron.reporting.front import latest_front
from snip_megatron.reporting.map_view import map_payload
from snip_megatron.reporting.page import render_page, write_page
from snip_megatron.reporting.phase_view import phase_events, phase_figure, phase_view
from snip_megatron.reporting.sent import sent_sentence
from snip_megatron.reporting.stage_view import saved_figure, stage_view
from snip_megatron.reporting.worth import judge
from snip_megatron.reporting.worth_text import headline, sentences

MAX_EVENT_ROWS = 1000
"""Number of rows in the table of events. Of a longer list, the last rows are shown."""
MAX_MAP_ROWS = 200
"""The same for the table of steps by map."""


def write_report(run: Path | str, out: Path | str | None = None, cost: str | None = None) -> Path:
    """Write the report page of a run.

    Args:
        run: the run directory.
        out: the output file; None for ``report.html`` in the run directory.
        cost: the cost model for predicted times (``flops``, the name of a table, or a file); None for the times that
            the run used, or ``flops`` if it used none.

    Returns:
        The path of the page.

    Raises:
        SnipError: ``run`` is not a run directory, ``cost`` is not a cost model, or ``out`` cannot be written.
    """
    return write_page(render(load_run(run), cost), Path(run) / REPORT if out is None else Path(out))


def render(run: RunData, cost: str | None = None, *, live: bool = False) -> str:
    """Return the page as text. For ``cost`` see :func:`write_report`.

    With ``live`` the page leaves out what takes seconds to compute: other budgets.
    """
    worth = judge(run)
    sent = sent_sentence(run, [each.stretch for each in worth.maps])
    target = target_share(run.config)
    unreadable = list(run.unreadable)
    front = None if live else latest_front(run.path, run.updates, unreadable)
    stages = stage_view(run, cost, unreadable)
    phases = phase_view(run)
    figures = {
        "loss": loss_figure(run),
        "share": share_figure(run, target, None if stages is None else stages.shares_of(run.adoptions)),
        "saved": None if stages is None else saved_figure(stages),
        "front": front_figure(front),
        "timing": timing_figure(run.updates),
    }
    if phases is not None:
        figures["phases"] = phase_figure(phases)
    return render_page(
        "report.html",
        title=run.path.resolve().name,
        policy=policy_line(run.config),
        tiles=_tiles(run),
        worth={
            "headline": headline(worth),
            "lines": [*sentences(worth), *filter(None, [sent])],
            "warnings": worth.warnings,
        },
        worth_maps=worth.maps[-MAX_MAP_ROWS:],
        figures=figures,
        maps=map_payload(run.adoptions),
        stages=stages,
        phases=phases,
        phase_events=[_event_row(event) for event in phase_events(run)[-MAX_EVENT_ROWS:]],
        front=front,
        updates=run.updates,
        timed=any(update.speedup is not None for update in run.updates),
        faults=[_event_row(event) for event in run.faults],
        events=[_event_row(event) for event in run.events[-MAX_EVENT_ROWS:]],
        events_left_out=max(0, len(run.events) - MAX_EVENT_ROWS),
        tables=[("Facts", flatten(_plain_facts(run.facts))), ("Configuration", flatten(run.config))],
        unreadable=unreadable,
    )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return the (dotted key, value as text) pairs of a nested configuration."""
    rows: list[tuple[str, str]] = []
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            rows += flatten(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)))
    return rows


# -- parts of the page ---------------------------------------------------------------------------------------------
def _tiles(run: RunData) -> list[tuple[str, str]]:
    """Return the (label, value) pairs at the top of the page."""
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


_FACTS_TO_COMPUTE_WITH = ("request", "linear_shapes", "unquantised_flops", "predicted_times", "layer_stages")


def _plain_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts without those that are no use to a reader."""
    return {name: value for name, value in facts.items() if name not in _FACTS_TO_COMPUTE_WITH}


def policy_line(config: Mapping[str, Any]) -> str:
    """Return one line with the policy, budget, granularity and estimator of a configuration."""
    named = [f"{name} {config[name]}" for name in ("policy", "budget", "granularity", "estimator") if name in config]
    return " · ".join(named)


def target_share(config: Mapping[str, Any]) -> float | None:
    """Return the budget's fp4 share, or None for another kind of budget and for a configuration without a valid one."""
    try:
        budget = Budget.parse(config.get("budget"), "budget")
    except SnipError:
        return None
    return budget.value if budget.kind == "fp4" else None


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
