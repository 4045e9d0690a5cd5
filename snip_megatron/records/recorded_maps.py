"""The adoptions that a run directory recorded, which ``--snip-replay`` repeats."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from snip_megatron.errors import SnipError
from snip_megatron.precision import PrecisionMap
from snip_megatron.records.readers import read_events


def replay_schedule(run: str) -> list[tuple[int, Path]]:
    """Return (step, map file) of every adoption that a run directory recorded, in order.

    Raises:
        SnipError: no adoption is recorded, or a map file is missing.
    """
    folder = Path(run)
    schedule = []
    for event in read_events(folder):
        if event.get("event") == "adopt":
            step = int(event["step"])
            path = folder / "maps" / f"step_{step}.json"
            if not path.is_file():
                raise SnipError(f"--snip-replay {run}: events.jsonl adopts a map at step {step} but {path} is missing")
            schedule.append((step, path))
    if not schedule:
        raise SnipError(
            f"--snip-replay {run}: no adopted map is recorded there; give the directory of a run under SNIP"
        )
    return schedule


@functools.cache  # the model, the warm-up and rank 0 need the same maps, and each file is read over the network
def replayed_maps(run: str) -> Mapping[int, PrecisionMap]:
    """Return the maps of :func:`replay_schedule` by the steps of their adoptions. Raises SnipError."""
    return {
        step: PrecisionMap.from_json(path.read_text(encoding="utf-8"), where=str(path))
        for step, path in replay_schedule(run)
    }
