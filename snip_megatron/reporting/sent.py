"""The bytes that rank 0 sent in a training step, from the metrics of a run, as a sentence of the report."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from snip_megatron.errors import is_finite
from snip_megatron.records.run_data import RunData
from snip_megatron.runtime.account import Stretch

_NAMES = {
    "all_gather": "all-gathers",
    "reduce_scatter": "reduce-scatters",
    "all_reduce": "all-reduces",
    "all_to_all": "all-to-alls",
    "broadcast": "broadcasts",
    "send": "sends to another stage",
}


def sent_sentence(run: RunData, stretches: Sequence[Stretch]) -> str | None:
    """Return what rank 0 sends in a step under the map in force, by kind of collective, and what it sent in bf16.

    ``stretches`` are the steps between adoptions in the order of time. None if no bytes are recorded: on one rank,
    under CUDA graphs, or by an earlier release.
    """
    by_step = {row["step"]: sent for row in run.metrics if (sent := _bytes(row.get("wire_bytes")))}
    steps = list(by_step)  # ascending
    usual = [(each, found) for each in stretches if (found := _usual(by_step, steps, each))]
    if not usual:
        return None
    now, sent = usual[-1]
    kinds = ", ".join(f"{_NAMES.get(kind, kind)} {size(sent[kind])}" for kind in sorted(sent, key=lambda k: -sent[k]))
    before = next((found for each, found in usual if not each.quantised), None)
    compared = "" if before is None or not now.quantised else f"; in bf16 {size(sum(before.values()))}"
    under = f"under map {now.version}" if now.quantised else "in bf16"
    return f"Rank 0 sent {size(sum(sent.values()))} a step {under} ({kinds}){compared}."


def size(count: float) -> str:
    """Return a number of bytes with its unit."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} bytes"


def _bytes(recorded: object) -> dict[str, float]:
    if not isinstance(recorded, Mapping):
        return {}
    return {str(kind): float(count) for kind, count in recorded.items() if is_finite(count)}


def _usual(by_step: Mapping[int, dict[str, float]], steps: Sequence[int], stretch: Stretch) -> dict[str, float]:
    """Return the bytes of the step of a stretch whose sum is the median; empty if none are recorded."""
    first, stop = (bisect.bisect_left(steps, step) for step in (stretch.begin, stretch.end))
    found = sorted((by_step[step] for step in steps[first:stop]), key=lambda b: sum(b.values()))
    return found[len(found) // 2] if found else {}
