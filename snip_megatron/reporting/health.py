"""Whether a training is healthy: its losses, the guard, updates, the rise of the loss as measured, and its records."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.guard import MIN_RISE, WINDOW
from snip_megatron.runtime.run_data import Adoption, RunData, number

_SEVERAL, _MANY = 3, 5
"""Number of maps from which on their mean is judged, and multiple of its prediction above which a rise is reported."""


@dataclass(frozen=True)
class Check:
    """One line of the panel. ``healthy`` is False if it needs a look, and None if there is nothing to judge."""

    name: str
    text: str
    healthy: bool | None


def checks(run: RunData) -> list[Check]:
    """Return the checks of a run, each with what was found."""
    return [_loss(run), _guard(run), _updates(run), _rise(run), _records(run)]


def loss_spikes(run: RunData) -> list[int]:
    """Return the steps whose loss is above the mean of the 50 losses before it by the guard's number of deviations.

    As for the guard, a spike is also at least 1 % above that mean.
    """
    points = [(step, loss) for step, loss in zip(*run.series("loss"), strict=True) if loss is not None]
    if len(points) <= WINDOW:
        return []
    losses = np.array([loss for _, loss in points])
    windows = np.lib.stride_tricks.sliding_window_view(losses[:-1], WINDOW)
    mean, sigma = windows.mean(axis=1), number(run.config.get("guard_sigma")) or SnipConfig.guard_sigma
    limit = mean + np.maximum(sigma * windows.std(axis=1), MIN_RISE * np.abs(mean))
    return [points[WINDOW + int(i)][0] for i in np.flatnonzero(losses[WINDOW:] > limit)]


def measured_rise(adoption: Adoption) -> str | None:
    """Return the rise of the loss that was measured when a map was adopted, as text. None if none was measured."""
    rise, error = adoption.figure("measured_rise"), adoption.figure("measured_error")
    return None if rise is None else f"{rise:.2g}" + ("" if error is None else f" ± {error:.1g}")


def _loss(run: RunData) -> Check:
    steps, losses = run.series("loss")
    broken = [step for step, loss in zip(steps, losses, strict=True) if loss is None]
    if len(broken) == len(losses):
        return Check("Loss", "not recorded", None)
    spikes = loss_spikes(run)
    texts = [
        f"NaN or Inf: {len(broken):,}, the last at step {broken[-1]:,}" if broken else "never NaN or Inf",
        f"spikes: {len(spikes):,}, the last at step {spikes[-1]:,}" if spikes else "no spike",
    ]
    return Check("Loss", "; ".join(texts), not broken and not spikes)


def _guard(run: RunData) -> Check:
    events = [event for event in run.events if event["event"] == "guard"]
    counts = Counter(str(event.get("action", "alarm")).replace("_", " ") for event in events)
    text = ", ".join(f"{count} {action}" for action, count in counts.items())
    return Check("Guard", f"{text}, the last before step {events[-1]['step']:,}" if events else "no alarm", not events)


def _updates(run: RunData) -> Check:
    counts = Counter(event["event"] for event in run.events)
    adopted = sum(update.adopted_step is not None for update in run.updates)
    kinds = {"dropped": "dropped", "solve_failed": "failed", "skipped": "skipped", "sidecar_restart": "solver restarts"}
    faults = [f"{counts[kind]} {name}" for kind, name in kinds.items() if counts[kind]]
    last = next((e.get("reason") for e in reversed(run.events) if e["event"] in kinds and e.get("reason")), None)
    text = ", ".join([f"{adopted} of {len(run.updates)} adopted", *faults])
    return Check("Updates", text + (f"; the last reason: {last}" if last and faults else ""), not faults)


def _rise(run: RunData) -> Check:
    """Compare measured rises with their predictions, and the latest with the bound of the budget.

    A single measurement contains an effect of either sign that no score predicts, so that a mean of several maps is
    judged.
    """
    measured = [adoption for adoption in run.adoptions if measured_rise(adoption) is not None]
    if not measured:
        return Check("Rise of the loss", "not measured: no map of this run was tried before it was adopted", None)
    latest, bound = measured[-1], run.bound
    rise, error, predicted = map(latest.figure, ("measured_rise", "measured_error", "predicted_rise"))
    rise, error = rise or 0.0, error or 0.0
    text = f"map {latest.version} raised it by {measured_rise(latest)} nats as measured"
    text += "" if predicted is None else f", predicted {predicted:.2g}"
    text += "" if bound is None else f", bound {bound:g}"
    within = bound is None or rise - 2 * error <= bound

    figures = [(adoption.figure("measured_rise"), adoption.figure("predicted_rise")) for adoption in measured]
    pairs = np.array([pair for pair in figures if None not in pair], dtype=float)
    exceeds = False
    if len(pairs) >= _SEVERAL:
        (rise, predicted), error = pairs.mean(axis=0), pairs[:, 0].std(ddof=1) / len(pairs) ** 0.5
        exceeds = bool(rise - 2 * error > _MANY * predicted > 0)
        text += f"; {len(pairs)} maps: {rise:.2g} ± {error:.1g}, predicted {predicted:.2g}"
        text += f", {rise / predicted:.0f} times the prediction" if exceeds else ""
    return Check("Rise of the loss", text, within and not exceeds)


def _records(run: RunData) -> Check:
    lost = [f"{count} of {kind} lost" for kind, count in run.lost.items()]
    lost += [f"files unreadable or damaged: {len(run.unreadable)}"] if run.unreadable else []
    return Check("Records", ", ".join(lost) or "complete", not lost)
