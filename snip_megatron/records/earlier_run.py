"""Checks the content of an existing run directory: whether the run may continue there, and what has changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snip_megatron.errors import SnipError, cut
from snip_megatron.records.readers import CONFIG, EVENTS, read_config
from snip_megatron.records.storage import jsonable

SPEED_FACTS = (
    "device",
    "gemm_backend",
    "world_size",
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "sequence_parallel",
    "global_batch_size",
    "micro_batch_size",
)
"""Facts without which times of steps cannot be compared. A ``resume`` event names the first one that changed."""


def check_earlier_run(
    path: Path, wanted: Mapping[str, Any], defaults: Mapping[str, Any], *, overwrite: bool, resuming: bool
) -> str | None:
    """Compare the directory's configuration with ``wanted`` and refuse records that must not be mixed.

    Returns the first key that differs, or None if the configurations are equal or there is no earlier one.
    """
    if path.exists() and not path.is_dir():
        raise SnipError(f"run directory {path}: is a file; choose another --snip-dir")
    if not (path / CONFIG).exists():
        if _has_events(path) and not overwrite:
            raise SnipError(
                f"run directory {path}: holds events but no {CONFIG}; pass --snip-overwrite or another --snip-dir"
            )
        return None
    try:
        earlier = {**defaults, **read_config(path)["config"]}
    except SnipError as error:
        if not overwrite:
            raise SnipError(f"{error}; pass --snip-overwrite or another --snip-dir") from None
        return None
    difference = _first_difference(earlier, wanted)
    if difference is not None and not overwrite:
        key, old, new = map(cut, difference)
        raise SnipError(
            f"run directory {path}: belongs to another configuration: {key} is {old} there and {new} here; "
            "pass --snip-overwrite or another --snip-dir"
        )
    if _has_events(path) and not overwrite and not resuming:
        raise SnipError(
            f"run directory {path}: holds the events of an earlier run; resume from its checkpoint (--load), "
            "pass --snip-overwrite or choose another --snip-dir"
        )
    return difference[0] if difference else None


def changed_fact_of(path: Path, facts: Mapping[str, Any]) -> str | None:
    """Return the name of the first fact that changes the time of a step and differs from the directory's; else None."""
    try:
        earlier = read_config(path)["facts"]
    except SnipError:  # there is none, or it was broken and is overwritten
        return None
    names = [name for name in SPEED_FACTS if name in earlier and name in facts]
    return next((name for name in names if earlier[name] != jsonable(facts[name])), None)


def _has_events(path: Path) -> bool:
    try:
        return (path / EVENTS).stat().st_size > 0
    except OSError:
        return False


def _first_difference(old: Any, new: Any, key: str = "") -> tuple[str, str, str] | None:
    """Return (dotted key, old value, new value) of the first difference in the order of ``new``'s keys, or None."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in [*new, *(name for name in old if name not in new)]:
            dotted = f"{key}.{name}" if key else str(name)
            if name not in old or name not in new:
                pair = [json.dumps(side[name]) if name in side else "absent" for side in (old, new)]
                return dotted, pair[0], pair[1]
            if (found := _first_difference(old[name], new[name], dotted)) is not None:
                return found
        return None
    if old == new and isinstance(old, bool) == isinstance(new, bool):  # 1 equals 1.0, but not True
        return None
    return key, json.dumps(old), json.dumps(new)
