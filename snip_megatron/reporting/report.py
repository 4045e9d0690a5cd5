"""``report.html``, the page about a run.

The page is one self-contained file: plotly.js, style and data are inside. Its content security policy forbids all
network access, and all scripts except the two whose hashes it names. Text from a run's files can therefore never run as
code.
"""

import base64
import functools
import hashlib
import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from snip_megatron import __version__
from snip_megatron.precision.errors import needs_extra
from snip_megatron.reporting.figures import format_figure, loss_figure, map_payload, phase_view
from snip_megatron.reporting.health import checks, measured_rise
from snip_megatron.reporting.pages import page_template, template_text
from snip_megatron.reporting.sensitivity import unit_of
from snip_megatron.reporting.summary import RunSummary, headline, sentences, summarise
from snip_megatron.runtime.account import duration, share_text
from snip_megatron.runtime.run_data import REPORT, RunData, fields_of, load_run, number
from snip_megatron.runtime.run_directory import read_lock
from snip_megatron.runtime.storage import deliver, flatten

with needs_extra("report", "a report"):
    from plotly.offline import get_plotlyjs

MAX_EVENT_ROWS = 1000
"""Number of rows in the table of events. Of a longer list, the last rows are shown."""
MAX_MAP_ROWS = 200
"""Number of rows in the table of steps by map. Of a longer list, the last rows are shown."""
SILENT_S, SILENT_STEPS = 120.0, 20
"""A run whose last record is older than so many seconds, and than so many steps take, has stopped or hangs."""
_POLICY = ("policy", "budget", "granularity", "estimator")
_HIDDEN_FACTS = ("request", "unquantised_flops", "predicted_times", "linear_stages", "linear_shapes")


def write_report(run: Path | str, out: Path | str | None = None) -> Path:
    """Write the page of a run to ``out``, by default ``report.html`` in the run directory. Return its path.

    Raises SnipError if ``run`` is not a run directory, or the file cannot be written.
    """
    path = Path(run) / REPORT if out is None else Path(out)
    deliver("page", path, render(load_run(run)))
    return path


def render(run: RunData, *, live: bool = False) -> str:
    """Return the page as text. With ``live`` it is read at once, and says how old the last record is."""
    summary = summarise(run)
    facts = {name: value for name, value in run.facts.items() if name not in _HIDDEN_FACTS}
    named = [f"{name} {run.config[name]}" for name in _POLICY if name in run.config]
    stays = run.facts.get("stays_bf16")
    unconverted = [f"Not converted: {'; '.join(map(str, stays))}."] if isinstance(stays, list) and stays else []
    rises: dict[int | None, str | None] = {adoption.step: measured_rise(adoption) for adoption in run.adoptions}
    plotly_js, page_js = get_plotlyjs(), template_text("report.js")
    return page_template("report.html").render(
        version=__version__,
        style=Markup(template_text("report.css")),
        scripts=[Markup(plotly_js), Markup(page_js)],
        script_hashes=[_csp_hash(plotly_js), _csp_hash(page_js)],
        title=run.path.resolve().name,
        lines=[line for line in (" · ".join(named), _machine_line(run)) if line],
        state=_state(run, summary, live=live),
        tiles=_tiles(run, summary),
        summary={
            "headline": headline(summary),
            "lines": [*sentences(summary), *unconverted],
            "warnings": summary.warnings,
        },
        summary_maps=summary.maps[-MAX_MAP_ROWS:],
        figures={"loss": loss_figure(run), "formats": format_figure(run)},
        maps=map_payload(run.maps),
        adoptions=len(run.adoptions),
        unit=unit_of(str(run.config.get("policy")), str(run.config.get("q"))),
        phases=phase_view(run),
        checks=checks(run),
        updates=run.updates,
        rises={u.version: rise for u in run.updates if (rise := rises.get(u.adopted_step))},
        timed=any(update.speedup is not None for update in run.updates),
        faults=[_event_row(event) for event in run.faults],
        events=[_event_row(event) for event in run.events[-MAX_EVENT_ROWS:]],
        events_left_out=max(0, len(run.events) - MAX_EVENT_ROWS),
        tables=[("Facts", _pairs(facts)), ("Configuration", _pairs(run.config))],
        unreadable=run.unreadable,
    )


# -- parts of the page ---------------------------------------------------------------------------------------------
def _pairs(tree: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the (dotted key, value as text) pairs of a nested configuration."""
    return [(key, v if isinstance(v, str) else json.dumps(v)) for key, v in flatten(tree).items()]


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
    """Return the state of the job as ``text``. ``fault`` says whether it was killed or hangs."""
    times = [number(row.get("time")) for row in (*run.metrics[-1:], *run.events[-1:])]
    last = max((at for at in times if at is not None), default=0.0)
    age, lock = time.time() - last, read_lock(run.path)
    step_s = max((stretch.step_s or 0.0 for stretch in summary.maps), default=0.0)
    total = summary.total_steps
    complete = total is not None and summary.steps >= total
    fault = False
    if lock is None or lock.has_ended:
        fault = not complete and lock is not None
        text = ("Ended" if complete else "Stopped") + (f", {lock} was killed" if fault else "")
    elif lock.is_mine and not live:
        text = "Written by the run itself"
    elif age > max(SILENT_S, SILENT_STEPS * step_s):
        fault = True
        text = f"Stopped, or hangs: {lock} has written nothing for {duration(age)}"
    else:
        text = f"{'Running' if live else 'Running when this page was written'}: {lock}"
    ago = f", {duration(max(0.0, age))} ago" if live and last else ""
    steps = f"Step {summary.steps:,}" + ("" if total is None else f" of {total:,}")
    written = f"last write {_utc(last, '%Y-%m-%d %H:%M:%S UTC')}{ago}" if last else "nothing was written"
    return {"text": f"{text}. {steps}, {written}.", "fault": fault}


def _tiles(run: RunData, summary: RunSummary) -> list[tuple[str, str]]:
    """Return the (label, value) pairs at the top of the page."""
    steps, losses = run.series("loss")
    finite = [(step, loss) for step, loss in zip(steps, losses, strict=True) if loss is not None]
    timed = next((adoption for adoption in reversed(run.adoptions) if adoption.budget is not None), None)
    total = summary.total_steps
    of = f" of {total:,}" if total is not None and total > summary.steps else ""
    last = summary.maps[-1] if summary.maps else None
    linears = " of the linears" if last is not None and last.predicted_of == "linears" else ""
    predicted = None if last is None else last.predicted
    measured = None if summary.judged is None else summary.judged.speedup
    beside = "" if predicted is None else f"; predicted{linears} {predicted:.3f}"
    loss = summary.loss
    share = f", {loss.share}" if loss is not None and loss.share else ""
    of_time = "" if summary.cost_share is None else f", {summary.cost_share:.2%} of the time"
    tiles: list[tuple[str, str | None]] = [
        ("training steps", f"{steps[-1] + 1:,}{of}" if steps else "none"),
        (f"loss at step {finite[-1][0]:,}, nats" if finite else "", f"{finite[-1][1]:.4f}" if finite else None),
        ("tokens a second", _figure(summary.tokens_s, ",.0f")),
        (f"speedup over bf16, measured{beside}", _figure(measured, ".3f")),
        (f"speedup{linears} over bf16, predicted", _figure(predicted, ".3f") if measured is None else None),
        (f"speedup over {summary.fp8} everywhere, predicted", _figure(summary.over_fp8, ".3f")),
        ("GPU hours saved so far", _figure(summary.gpu_hours_saved, ",.3g")),
        ("maps adopted", f"{len(run.maps):,}"),
        ("formats now", _formats_now(run)),
        ("budget", None if timed is None else str(timed.budget)),
        (f"predicted rise of the loss, nats{share}", None if loss is None else f"{loss.nats:.2g}"),
        ("measured rise of the loss, nats", measured_rise(run.adoptions[-1]) if run.adoptions else None),
        (f"cost of updates{of_time}", duration(summary.cost_s) if run.updates else None),
    ]
    return [(label, value) for label, value in tiles if value is not None]


def _formats_now(run: RunData) -> str | None:
    """Return the shares of the formats of the map in force, as text. None without a map."""
    shares = run.adoptions[-1].fields.get("formats") if run.adoptions else None
    items = shares.items() if isinstance(shares, Mapping) else ()
    return share_text({name: share for name, value in items if (share := number(value)) is not None}) or None


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


@functools.cache
def _csp_hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
