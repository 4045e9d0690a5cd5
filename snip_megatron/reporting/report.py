"""``report.html``, a self-contained page about one run."""

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from snip_megatron.reporting.figures import format_figure, loss_figure, map_payload
from snip_megatron.reporting.page import render_page, write_page
from snip_megatron.reporting.phases import phase_view
from snip_megatron.reporting.stage_view import recorded_linears, stage_view, unquantised_flops
from snip_megatron.reporting.summary import RunSummary, summarise
from snip_megatron.reporting.summary_text import headline, sentences
from snip_megatron.runtime.account import duration, share_text
from snip_megatron.runtime.run_data import REPORT, RunData, fields_of, load_run, number
from snip_megatron.runtime.run_directory import read_lock
from snip_megatron.runtime.storage import flatten

MAX_EVENT_ROWS = 1000
"""Number of rows in the table of events. Of a longer list, the last rows are shown."""
MAX_MAP_ROWS = 200
"""The same for the table of steps by map."""
SILENT_S, SILENT_STEPS = 120.0, 20
"""A live run whose last record is older than both of these has stopped, or hangs."""
_FACTS_TO_COMPUTE_WITH = ("request", "unquantised_flops", "predicted_times", "linear_stages")


def write_report(run: Path | str, out: Path | str | None = None) -> Path:
    """Write the report page of a run to ``out``, or to ``report.html`` in its directory. Return its path.

    Raises SnipError if ``run`` is not a run directory, or ``out`` cannot be written.
    """
    return write_page(render(load_run(run)), Path(run) / REPORT if out is None else Path(out))


def render(run: RunData, *, live: bool = False) -> str:
    """Return the page as text.

    With ``live`` the page says how old the last record is.
    """
    summary = summarise(run)
    unreadable = list(run.unreadable)
    rows, phases = recorded_linears(run, unreadable), phase_view(run)
    figures = {
        "loss": loss_figure(run),
        "formats": format_figure(run, {row.name: row.flops for row in rows}, sum(unquantised_flops(run).values())),
    }
    return render_page(
        "report.html",
        title=run.path.resolve().name,
        lines=[line for line in (_policy_line(run.config), _machine_line(run)) if line],
        state=_state(run, summary, live=live),
        tiles=_tiles(run, summary),
        summary={
            "headline": headline(summary),
            "lines": [*sentences(summary), *_stays_bf16(run)],
            "warnings": summary.warnings,
        },
        summary_maps=summary.maps[-MAX_MAP_ROWS:],
        figures=figures,
        maps=map_payload(run.maps),
        stages=stage_view(run, rows, unreadable),
        phases=phases,
        updates=run.updates,
        timed=any(update.speedup is not None for update in run.updates),
        faults=[_event_row(event) for event in run.faults],
        events=[_event_row(event) for event in run.events[-MAX_EVENT_ROWS:]],
        events_left_out=max(0, len(run.events) - MAX_EVENT_ROWS),
        tables=[("Facts", _pairs(_shown_facts(run))), ("Configuration", _pairs(run.config))],
        unreadable=unreadable,
    )


def _pairs(tree: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the (dotted key, value as text) pairs of a nested configuration."""
    return [(key, v if isinstance(v, str) else json.dumps(v)) for key, v in flatten(tree).items()]


def _shown_facts(run: RunData) -> dict[str, Any]:
    """Return the facts that a page shows: those that a reader can use."""
    return {name: value for name, value in run.facts.items() if name not in _FACTS_TO_COMPUTE_WITH}


def _stays_bf16(run: RunData) -> list[str]:
    """Return a sentence about the linears that no map covers; none if there are none."""
    stays = run.facts.get("stays_bf16")
    return [f"Not converted: {'; '.join(map(str, stays))}."] if isinstance(stays, list) and stays else []


def _policy_line(config: Mapping[str, Any]) -> str:
    """Return one line with the policy, budget, granularity and estimator of a configuration."""
    named = [f"{name} {config[name]}" for name in ("policy", "budget", "granularity", "estimator") if name in config]
    return " · ".join(named)


# -- parts of the page ---------------------------------------------------------------------------------------------
def _machine_line(run: RunData) -> str:
    """Return one line with card, host, date and versions."""
    facts, ranks = run.facts, number(run.facts.get("world_size"))
    device = facts.get("device")
    cards = f"{int(ranks)} × {device}" if device and ranks else device
    begin, end = (number(run.metrics[i].get("time")) if run.metrics else None for i in (0, -1))
    days = list(dict.fromkeys(_utc(at, "%Y-%m-%d") for at in (begin, end) if at is not None))
    names = (("version", "snip_megatron"), ("torch", "torch"), ("megatron_core", "megatron-core"))
    versions = [f"{name} {facts[key]}" for key, name in names if key in facts]
    return " · ".join(str(part) for part in (cards, facts.get("host"), " to ".join(days), *versions) if part)


def _state(run: RunData, summary: RunSummary, *, live: bool) -> dict[str, Any]:
    """Return whether the job still runs, as a ``text``, and whether it was killed or hangs, a ``fault``."""
    times = [number(row.get("time")) for row in (*run.metrics[-1:], *run.events[-1:])]
    last = max((at for at in times if at is not None), default=0.0)
    age, lock = time.time() - last, read_lock(run.path)
    usual = max((each.step_s or 0.0 for each in summary.maps), default=0.0)
    total, over = summary.total_steps, summary.total_steps is not None and summary.steps >= summary.total_steps
    fault = True
    if lock is None or lock.gone:
        what, fault = ("Ended", False) if over else ("Stopped", lock is not None)
        what += f", {lock} was killed" if fault else ""
    elif lock.mine and not live:
        what, fault = "Written by the run itself", False
    elif age > max(SILENT_S, SILENT_STEPS * usual):
        what = f"Stopped, or hangs: {lock} has written nothing for {duration(age)}"
    else:
        what, fault = f"{'Running' if live else 'Running when this page was written'}: {lock}", False
    ago = f", {duration(max(0.0, age))} ago" if live and last else ""
    steps = f"step {summary.steps:,}" + ("" if total is None else f" of {total:,}")
    written = f"last write {_utc(last, '%Y-%m-%d %H:%M:%S UTC')}{ago}" if last else "nothing was written"
    return {"text": f"{what}. {steps[:1].upper()}{steps[1:]}, {written}.", "fault": fault}


def _tiles(run: RunData, summary: RunSummary) -> list[tuple[str, str]]:
    """Return the (label, value) pairs at the top of the page."""
    steps, losses = run.series("loss")
    finite = [(step, loss) for step, loss in zip(steps, losses, strict=True) if loss is not None]
    timed = next((adoption for adoption in reversed(run.adoptions) if adoption.asked is not None), None)
    total = summary.total_steps
    of = f" of {total:,}" if total is not None and total > summary.steps else ""
    now = summary.maps[-1] if summary.maps else None
    predicted = None if now is None or now.predicted is None else f"{now.predicted:.3f}"
    linears = " of the linears" if now is not None and now.predicted_of == "linears" else ""
    cost = f"{summary.cost_s:.2f} s" + ("" if summary.cost_share is None else f", {summary.cost_share:.2%}")
    measured = None if summary.judged is None else summary.judged.speedup
    found: list[tuple[str, str | None]] = [
        ("training steps", f"{steps[-1] + 1:,}{of}" if steps else "none"),
        (f"loss at step {finite[-1][0]:,}" if finite else "", f"{finite[-1][1]:.4f}" if finite else None),
        ("steps with a non-finite loss", f"{len(losses) - len(finite):,}" if 0 < len(finite) < len(losses) else None),
        ("tokens a second", _figure(summary.tokens_s, ",.0f")),
        ("speedup over bf16, measured", _figure(measured, ".3f")),
        (f"speedup{linears} over bf16, predicted", predicted),
        (f"speedup over {summary.fp8} everywhere, predicted", _figure(summary.over_fp8, ".3f")),
        ("maps adopted", f"{len(run.maps):,}"),
        ("formats now", _formats_now(run)),
        ("asked", None if timed is None else str(timed.asked)),
        ("predicted loss now", _figure(None if timed is None else timed.loss, ".3g")),
        ("cost of updates", cost if run.updates else None),
        ("faults", f"{len(run.faults):,}"),
    ]
    return [(label, value) for label, value in found if value is not None]


def _formats_now(run: RunData) -> str | None:
    """Return the shares of the formats of the map in force, as text; None without a map."""
    shares = run.adoptions[-1].fields.get("formats") if run.adoptions else None
    known = shares.items() if isinstance(shares, Mapping) else ()
    return share_text({name: share for name, value in known if (share := number(value)) is not None}) or None


def _figure(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


def _event_row(event: Mapping[str, Any]) -> dict[str, str]:
    at = number(event.get("time"))
    details = {name: value for name, value in fields_of(event).items() if value is not None}
    when = "" if at is None else _utc(at, "%Y-%m-%d %H:%M:%S")
    return {"when": when, "step": str(event["step"]), "event": event["event"], "details": _details(details)}


def _utc(at: float, form: str) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).strftime(form)
    except (OverflowError, ValueError, OSError):
        return ""


def _details(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in fields.items())


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return "{" + _details(value) + "}"
    return value if isinstance(value, str) else json.dumps(value)
