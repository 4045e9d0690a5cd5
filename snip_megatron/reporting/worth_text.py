"""The figures of :mod:`snip_megatron.reporting.worth` as sentences, for the end of a run and for the report."""

from __future__ import annotations

from snip_megatron.reporting.worth import LossCost, Memory, Worth
from snip_megatron.runtime.account import duration

_COST_NAMES = {
    "compile": "compiling at start",
    "probe": "probes",
    "collect": "reduction of statistics",
    "submit": "submission",
    "dropped": "dropped updates",
    "postpone": "waiting for the solver",
    "kept": "waiting for failed solves",
    "guard": "refused maps",
    "adopt": "adoption",
    "settled": "slower steps afterwards",
    "recapture": "capturing graphs again",
}


def headline(worth: Worth) -> str:
    """Return the verdict in one sentence."""
    if worth.saved_s is None or worth.verdict not in ("yes", "no"):
        return f"Worth it: {worth.verdict}. {worth.why[:1].upper()}{worth.why[1:]}."
    parts = [f"{_saved(worth.saved_s)} so far"]
    if worth.saved_run_s is not None and worth.total_steps is not None and worth.total_steps > worth.steps:
        parts.append(f"{_saved(worth.saved_run_s)} over the run if {worth.assumes}")
    text = ", ".join(parts)
    whole = None if worth.bf16_s is None else worth.bf16_s * worth.steps
    share = "" if not whole else f" ({worth.saved_s / whole:+.1%} of its time in bf16 so far)"
    return f"Worth it: {worth.verdict}. {text[0].upper()}{text[1:]}{share}, all costs of SNIP included."


def sentences(worth: Worth) -> list[str]:
    """Return what is known about time, costs, loss and memory, a sentence each. Warnings are not among them."""
    found = [_steps(worth), _costs(worth), None if worth.loss is None else _loss(worth, worth.loss)]
    found.append(None if worth.memory is None else _memory(worth.memory))
    return [sentence for sentence in found if sentence is not None]


def lines(worth: Worth) -> list[str]:
    """Return all of it, as the end of a run prints it."""
    return [headline(worth), *sentences(worth), *(f"Warning: {warning}." for warning in worth.warnings)]


def _saved(seconds: float) -> str:
    return f"{'saved' if seconds >= 0 else 'lost'} {duration(abs(seconds))}"


def _steps(worth: Worth) -> str | None:
    parts = []
    if worth.bf16_s is not None:
        parts.append(f"{duration(worth.bf16_s)} in bf16 (median of {worth.bf16_steps} steps)")
    judged = worth.judged or next((m for m in reversed(worth.maps) if m.stretch.quantised and m.stretch.step_s), None)
    stretch = None if judged is None else judged.stretch
    if judged is not None and stretch is not None and stretch.step_s is not None:
        speed = "" if stretch.speedup is None else f": {stretch.speedup:.2f} x"
        of = " for the linears alone" if judged.predicted_of == "linears" else ""
        predicted = "" if judged.predicted is None else f", {judged.predicted:.2f} x was predicted{of}"
        parts.append(
            f"{duration(stretch.step_s)} under map {stretch.version} ({stretch.steps:,} steps){speed}{predicted}"
        )
    return f"A step took {', '.join(parts)}." if parts else None


def _costs(worth: Worth) -> str | None:
    if not worth.updates and not worth.cost_s:
        return None
    stretches = [each.stretch for each in worth.maps]
    timed = [(each.steps, each.steps * each.step_s) for each in stretches if each.step_s is not None]
    share = ""
    if timed:  # steps under a map that was too short for a median take as long as the others
        steps, seconds = map(sum, zip(*timed, strict=True))
        trained = seconds / steps * sum(each.steps for each in stretches)
        share = f", {worth.cost_s / (trained + worth.cost_s):.2%} of the time"
    largest: list[tuple[str, float]] = sorted(worth.costs.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{_COST_NAMES.get(kind, kind)} {duration(seconds)}" for kind, seconds in largest)
    count = f"{worth.updates:,} update{'' if worth.updates == 1 else 's'}"
    return f"{count} cost {duration(worth.cost_s)}{share}: {parts}."


def _loss(worth: Worth, loss: LossCost) -> str:
    parts = [
        f"Map {loss.version} is predicted to raise the loss by {loss.nats:.2g} nats over bf16 at equal weights"
        f" ({loss.low:.2g} to {loss.high:.2g} as far as small models tell: the error at real sizes, and what training"
        " makes of the rise, were not measured)"
    ]
    if not loss.backward:
        parts.append("without the formats of dgrad and wgrad, whose cost these scores do not give in nats")
    if loss.measured is not None:
        parts.append(f"the last validation differs by {loss.measured:+.2g} between the map's formats and bf16")
    if loss.steps is not None:
        time = "" if worth.bf16_s is None or worth.why else f", {duration(loss.steps * worth.bf16_s)} of training"
        parts.append(f"at present the loss falls by as much in about {loss.steps:,.0f} steps{time}")
    return f"{'; '.join(parts)}."


def _memory(memory: Memory) -> str:
    what = "resident memory" if memory.resident else "GPU memory"
    before = "" if memory.before is None else f", {_gib(memory.before)} before the first update"
    return f"Peak of {what} on rank 0: {_gib(memory.peak)}{before}."


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
