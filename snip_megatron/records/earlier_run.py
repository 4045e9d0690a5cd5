"""Checks the content of an existing run directory: whether the run may continue there, and what has changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snip_megatron.errors import SnipError, cut
from snip_megatron.records.readers import CONFIG, EVENTS, read_config
from snip_megatron.records.storage import flatten, jsonable

SPEED_FACTS = (
    "device", "gemm_backend", "world_size", "tensor_parallel", "pipeline_parallel", "data_parallel",
    "sequence_parallel", "global_batch_size", "micro_batch_size",
)  # fmt: skip
"""Facts without which times of steps cannot be compared. A ``resume`` event names the first one that changed."""


def check_earlier_run(path: Path, wanted: Mapping[str, Any], *, overwrite: bool, resuming: bool) -> str | None:
    """Compare the directory's configuration with ``wanted``.

    Returns the first key that differs, or None if the configurations are equal or there is no earlier one. Raises
    SnipError where records of two runs would be mixed.
    """
    if path.exists() and not path.is_dir():
        raise SnipError(f"run directory {path}: is a file; choose another --snip-dir")
    events = (path / EVENTS).exists() and (path / EVENTS).stat().st_size > 0
    difference: tuple[str, str, str] | None = None
    fault, remedy = "", "pass --snip-overwrite or another --snip-dir"
    if (path / CONFIG).exists():
        try:
            difference = _first_difference(read_config(path)["config"], wanted)
        except SnipError as error:
            fault = str(error).removeprefix(f"run directory {path}: ")
        if difference is not None:
            key, old, new = map(cut, difference)
            fault = f"belongs to another configuration: {key} is {old} there and {new} here"
        elif events and not resuming and not fault:
            fault = "holds the events of an earlier run"
            remedy = f"resume from its checkpoint (--load), {remedy}"
    elif events:
        fault = f"holds events but no {CONFIG}"
    if fault and not overwrite:
        raise SnipError(f"run directory {path}: {fault}; {remedy}")
    return difference[0] if difference else None


def changed_fact_of(path: Path, facts: Mapping[str, Any]) -> str | None:
    """Return the name of the first fact that changes the time of a step and differs from the directory's; else None."""
    try:
        earlier = read_config(path)["facts"]
    except SnipError:  # there is none, or it was broken and is overwritten
        return None
    names = [name for name in SPEED_FACTS if name in earlier and name in facts]
    return next((name for name in names if earlier[name] != jsonable(facts[name])), None)


def _first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return (dotted key, old value, new value) of the first difference in the order of ``new``'s keys, or None."""
    before, after = flatten(old), flatten(new)
    for key in dict.fromkeys([*after, *before]):
        pair = [json.dumps(side[key]) if key in side else "absent" for side in (before, after)]
        same = key in before and key in after and before[key] == after[key]
        if not same or ("true" in pair and pair[0] != pair[1]):  # 1 equals 1.0, but not True
            return key, pair[0], pair[1]
    return None
