"""The bytes that rank 0 sent in a training step, from the metrics of a run, as a sentence of the report."""

from __future__ import annotations

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
    now, sent = next(((s, sent) for s in reversed(stretches) if (sent := _usual(run, s))), (None, {}))
    if now is None:
        return None
    kinds = ", ".join(f"{_NAMES.get(kind, kind)} {size(sent[kind])}" for kind in sorted(sent, key=lambda k: -sent[k]))
    before = next((found for s in stretches if not s.quantised and (found := _usual(run, s))), None)
    compared = "" if before is None or not now.quantised else f"; in bf16 {size(sum(before.values()))}"
    under = f"under map {now.version}" if now.quantised else "in bf16"
    return f"Rank 0 sent {size(sum(sent.values()))} a step {under} ({kinds}){compared}."


def size(count: float) -> str:
    """Return a number of bytes with its unit."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} bytes"


def _usual(run: RunData, stretch: Stretch) -> dict[str, float]:
    """Return the bytes of the step of a stretch whose sum is the median; empty if none are recorded."""
    own = [row.get("wire_bytes") for row in run.metrics if stretch.begin <= row["step"] < stretch.end]
    finite = [{str(k): float(n) for k, n in sent.items() if is_finite(n)} for sent in own if isinstance(sent, Mapping)]
    found = sorted(filter(None, finite), key=lambda sent: sum(sent.values()))
    return found[len(found) // 2] if found else {}
