"""The cost of updates in a training: the time by which its steps took longer, compared with the times in its events."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from snip_megatron.reporting.summary import Prediction
from snip_megatron.runtime.run_data import load_run

_LAYER = re.compile(r".*layers\.\d+\.")
AFTER = 3
"""Number of steps from an adoption on that may still compile or allocate."""


def accounts(events: Sequence[Mapping[str, Any]], ms: Sequence[float]) -> list[dict[str, Any]]:
    """Return the cost of every adopted update, in order.

    The time of step s is ``ms[s]``. The steps of an update are those from its probe to :data:`AFTER` steps after its
    adoption. ``longer_s`` is the time by which they took longer than the median of the settled steps before the update,
    or from the adoption on than the median of the settled steps after it. ``events_s`` is the sum of the seconds for
    which its events blocked the training thread. ``at_update_s`` and ``from_adoption_s`` are the parts of ``longer_s``.
    ``probe_s`` has the seconds of each kind of pass.
    """
    submits = [int(event["step"]) for event in events if event["event"] == "submit"]
    adopts = [int(event["step"]) for event in events if event["event"] == "adopt"]
    pairs = [(step, next((a for a in adopts if a > step), None)) for step in submits]
    accounts: list[dict[str, Any]] = []
    begin = 1  # step 0 compiles and allocates
    for number, (update, adopted) in enumerate(pairs):
        if adopted is None:
            continue
        settled, last = adopted + AFTER, pairs[number + 1][0] if number + 1 < len(pairs) else len(ms)
        before, after = ms[begin:update], ms[settled:last]
        before = before[len(before) // 2 :]  # graphs are captured in the first steps
        begin = settled
        if not before or not after:
            continue
        usual = {True: statistics.median(after), False: statistics.median(before)}
        window = range(update, settled)
        waits: dict[str, float] = {}
        passes: dict[str, float] = {}
        for event in events:
            if event.get("of_step", event["step"]) in window and event.get("wait_s"):
                kind = str(event["event"])
                waits[kind] = waits.get(kind, 0.0) + float(event["wait_s"])
                if kind == "probe":
                    passes[str(event["kind"])] = float(event["wait_s"])
        longer = {step: (ms[step] - usual[step >= adopted]) / 1e3 for step in window}
        accounts.append(
            {
                "update_step": update,
                "adopt_step": adopted,
                "longer_s": sum(longer.values()),
                "events_s": sum(waits.values()),
                "events": waits,
                "probe_s": passes,
                "at_update_s": longer[update],
                "from_adoption_s": sum(s for step, s in longer.items() if step >= adopted),
                "steps_ms": list(ms[update:settled]),
                "usual_ms": {"before": usual[False], "after": usual[True]},
            }
        )
    return accounts


def adopted_maps(run: Path) -> list[dict[str, Any]]:
    """Return the maps of a run directory by step: predicted loss and speedups, and how often each format was chosen."""
    maps = []
    for path in sorted((run / "maps").glob("step_*.json"), key=lambda path: int(path.stem[len("step_") :])):
        body = json.loads(path.read_text(encoding="utf-8"))
        formats = Counter(f"{_LAYER.sub('', option)} {chosen}" for option, chosen in body["choices"].items())
        predicted = {key: body.get(key) for key in ("loss", "speedup", "step_speedup")}
        maps.append({"step": int(path.stem[len("step_") :]), **predicted, "formats": dict(formats)})
    return maps


def predicted_step(run: Path, bf16_ms: float | None) -> float | None:
    """Return the milliseconds of a step that are predicted under the last map of a run directory. None if unknown.

    They are those of its steps in bf16, ``bf16_ms``, less what the times of its GEMMs say that the map saves; without
    such steps, those that the planner predicts.
    """
    data = load_run(run)
    prediction, chosen = Prediction.load(data), data.adoptions[-1].precision_map if data.adoptions else None
    if prediction is None or chosen is None:
        return None
    seconds = prediction.times.step_seconds(chosen, prediction.stages, None if bf16_ms is None else bf16_ms / 1e3)
    return None if seconds is None else 1e3 * seconds[1]
