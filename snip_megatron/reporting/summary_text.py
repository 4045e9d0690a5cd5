"""The summary of a run as sentences, for the end of a run and for the report."""

from snip_megatron.reporting.summary import LossCost, RunSummary
from snip_megatron.runtime.account import duration

_COST_NAMES = {
    "compile": "compiling at start",
    "probe": "probes",
    "collect": "reduction of statistics",
    "times": "timing of GEMMs",
    "submit": "submission",
    "dropped": "dropped updates",
    "postpone": "waiting for the solver",
    "kept": "waiting for failed solves",
    "guard": "refused maps",
    "adopt": "adoption",
    "settled": "slower steps afterwards",
    "recapture": "capturing graphs again",
}


def headline(summary: RunSummary) -> str:
    """Return the verdict in one sentence."""
    if summary.saved_s is None or summary.verdict not in ("yes", "no"):
        return f"Worth it: {summary.verdict}. {summary.why[:1].upper()}{summary.why[1:]}."
    text = f"{_saved(summary.saved_s)} so far"
    if summary.saved_run_s is not None and summary.total_steps is not None and summary.total_steps > summary.steps:
        text += f", {_saved(summary.saved_run_s)} over the run if {summary.assumes}"
    whole = (summary.bf16_s or 0.0) * summary.steps
    share = "" if not whole else f" ({summary.saved_s / whole:+.1%} of its time in bf16 so far)"
    return f"Worth it: {summary.verdict}. {text[0].upper()}{text[1:]}{share}, all costs of SNIP included."


def sentences(summary: RunSummary) -> list[str]:
    found = [_steps(summary), _costs(summary), _loss(summary, summary.loss), _memory(summary)]
    return [sentence for sentence in found if sentence]


def lines(summary: RunSummary) -> list[str]:
    """Return all of it, as the end of a run prints it."""
    return [headline(summary), *sentences(summary), *(f"Warning: {warning}." for warning in summary.warnings)]


def _saved(seconds: float) -> str:
    return f"{'saved' if seconds >= 0 else 'lost'} {duration(abs(seconds))}"


def _steps(summary: RunSummary) -> str:
    parts = []
    if summary.bf16_s is not None:
        parts.append(f"{duration(summary.bf16_s)} in bf16 (median of {summary.bf16_steps} steps)")
    shown = summary.judged or next((m for m in reversed(summary.maps) if m.quantised and m.step_s), None)
    if shown is not None and shown.step_s is not None:
        mean = "" if shown.mean_s is None else f", mean {duration(shown.mean_s)}"
        speed = "" if shown.speedup is None else f": {shown.speedup:.2f} x"
        of = " for the linears alone" if shown.predicted_of == "linears" else ""
        predicted = "" if shown.predicted is None else f", {shown.predicted:.2f} x was predicted{of}"
        under = f"under map {shown.version} ({shown.steps:,} steps{mean})"
        parts.append(f"{duration(shown.step_s)} {under}{speed}{predicted}")
    return f"A step took {', '.join(parts)}." if parts else ""


def _costs(summary: RunSummary) -> str:
    if not summary.updates and not summary.cost_s:
        return ""
    share = "" if summary.cost_share is None else f", {summary.cost_share:.2%} of the time"
    largest = sorted(summary.costs.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{_COST_NAMES.get(kind, kind)} {duration(seconds)}" for kind, seconds in largest)
    count = "SNIP" if not summary.updates else "1 update" if summary.updates == 1 else f"{summary.updates:,} updates"
    return f"{count} cost {duration(summary.cost_s)}{share}: {parts}."


def _loss(summary: RunSummary, loss: LossCost | None) -> str:
    if loss is None:
        return ""
    during = "" if loss.at_end is None else " while it is in force,"
    parts = [
        f"Map {loss.version} is predicted to raise the loss by {loss.nats:.2g} nats{during} over bf16 at equal weights"
        f" ({loss.low:.2g} to {loss.high:.2g} as far as small models tell: the error at real sizes, and what training"
        " makes of the rise, were not measured)"
    ]
    if loss.at_end is not None:
        bounds = "" if loss.bound is None else f": --snip-budget loss={loss.bound:g} bounds this figure, not the first"
        left = f"of all phases of its plan, {loss.at_end:.2g} nats are predicted to be left at the end of training"
        parts.append(left + bounds)
    if not loss.backward:
        parts.append("without the formats of dgrad and wgrad, whose cost these scores do not give in nats")
    if loss.measured is not None:
        parts.append(f"the last validation differs by {loss.measured:+.2g} between the map's formats and bf16")
    if loss.steps is not None:
        time = "" if summary.bf16_s is None or summary.why else f", {duration(loss.steps * summary.bf16_s)} of training"
        parts.append(f"at present the loss falls by as much in about {loss.steps:,.0f} steps{time}")
    return f"{'; '.join(parts)}."


def _memory(summary: RunSummary) -> str:
    memory = summary.memory
    if memory is None:
        return ""
    what = "resident memory" if memory.resident else "GPU memory"
    before = "" if memory.before is None else f", {memory.before / 2**30:.2f} GiB before the first update"
    return f"Peak of {what} on rank 0: {memory.peak / 2**30:.2f} GiB{before}."
