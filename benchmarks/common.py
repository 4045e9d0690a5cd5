"""Common parts of the benchmarks: timing of interleaved contenders, and result files with their origin."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.metadata
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

_WAIT_CYCLES = 4_000_000  # about 2 ms
_LAUNCHES = 20  # of a batch: about six entries each in the launch queue, which has room for 1024
_WIDTH = 120  # characters of a field that stays on one line
ROOT = Path(__file__).resolve().parents[1]
_TIME = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")


def commit(name: str | None = None) -> str:
    """Return the measured commit: ``name``, else $SNIP_COMMIT, else git's. A copy of the tree may have no .git."""
    named = name or os.environ.get("SNIP_COMMIT")
    if named:
        return named
    head = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    with contextlib.suppress(FileNotFoundError):  # a machine without git
        return subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return "unknown"


def header(given_commit: str | None) -> dict[str, Any]:
    """Return device, versions, commit, command and date."""
    import triton

    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # the import takes seconds, and may fail
        versions["transformer_engine"] = importlib.metadata.version("transformer_engine")
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "date": datetime.date.today().isoformat(),
        "commit": commit(given_commit),
        "command": " ".join(["python", *_program(), *sys.argv[1:]]),
        "versions": versions,
    }


def _program() -> list[str]:
    """Return the program as it is called from the repository's root."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__")]
    path = Path(sys.argv[0])
    return [str(path.resolve().relative_to(ROOT)) if path.resolve().is_relative_to(ROOT) else str(path)]


def step_times(printed: str) -> list[float]:
    """Return the milliseconds of every step that a training printed (``--log-interval 1``)."""
    return [float(seconds) for seconds in _TIME.findall(printed)]


def write(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write ``result`` as JSON, by rename."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(result_text(result), encoding="utf-8")
    temporary.replace(path)


def result_text(result: Mapping[str, Any]) -> str:
    """Return ``result`` as JSON with a line for each field, and for each entry of a long list or object in a field."""

    def compact(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    def field(value: Any) -> str:
        text = compact(value)
        if len(text) <= _WIDTH or not isinstance(value, list | dict) or not _holds_objects(value):
            return text
        entries = value.items() if isinstance(value, dict) else ((None, entry) for entry in value)
        lines = ",\n".join(f"  {'' if key is None else compact(key) + ': '}{compact(entry)}" for key, entry in entries)
        return f"{{\n{lines}\n }}" if isinstance(value, dict) else f"[\n{lines}\n ]"

    return "{\n" + ",\n".join(f" {compact(key)}: {field(value)}" for key, value in result.items()) + "\n}\n"


def _holds_objects(value: list[Any] | dict[str, Any]) -> bool:
    return any(isinstance(entry, list | dict) for entry in (value.values() if isinstance(value, dict) else value))


def interleaved(
    calls: Mapping[str, Callable[[], object]], rounds: int, *, warmup: int = 2, head_start: bool = False
) -> dict[str, float]:
    """Return the median GPU milliseconds of each call.

    The calls take turns, in another order every round, so that clocks and temperature are the same for all. Otherwise a
    call would lose if it ran after a call that heats the GPU.

    Args:
        calls: name → call.
        rounds: number of rounds.
        warmup: number of calls of each before the first round.
        head_start: keep the GPU waiting at the start of a round until its launches are queued. This is for calls that
            are shorter than their launch.
    """
    for _ in range(warmup):
        for call in calls.values():
            call()
    torch.cuda.synchronize()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    order, shuffler = list(calls.items()), random.Random(0)
    for _ in range(rounds):
        shuffler.shuffle(order)
        if head_start:
            torch.cuda._sleep(_WAIT_CYCLES)
        for name, call in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in events.items()}


def cold_milliseconds(call: Callable[[], object], batches: int = 5) -> float:
    """Return the median GPU milliseconds of a call whose data is not in the L2 cache, without the time of its launch.

    The GPU sleeps until a batch of launches is queued. A batch that was queued too late does not count, and the next
    sleep is longer. Raises RuntimeError if no sleep is long enough, because ``call`` waits for the GPU.
    """
    _queued(call, _WAIT_CYCLES)  # compiles, allocates
    cycles, times = _WAIT_CYCLES, []
    while len(times) < batches * _LAUNCHES:
        batch = _queued(call, cycles)
        times += batch
        if not batch:
            cycles *= 2
        if cycles > 256 * _WAIT_CYCLES:  # about half a second
            raise RuntimeError("launches do not queue up behind a sleeping GPU: the call waits for it")
    return statistics.median(times)


def _queued(call: Callable[[], object], cycles: int) -> list[float]:
    """Return the milliseconds of each call of a batch behind a sleep.

    Returns an empty list if the sleep ended before all calls were queued.
    """
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_LAUNCHES)]
    awake = torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles)
    awake.record()
    for start, end in pairs:
        _larger_than_l2().zero_()
        start.record()
        call()
        end.record()
    late = awake.query()
    torch.cuda.synchronize()
    return [] if late else [start.elapsed_time(end) for start, end in pairs]


@functools.cache
def _larger_than_l2() -> torch.Tensor:
    return torch.empty(256 << 20, dtype=torch.uint8, device="cuda")


def geomean(values: Sequence[float]) -> float | None:
    return statistics.geometric_mean(values) if values else None


def refuse_without_cuda() -> None:
    """Exit with one line if there is no GPU."""
    if not torch.cuda.is_available():
        sys.exit(f"{Path(sys.argv[0]).name}: needs a CUDA device")


def host_milliseconds(call: Callable[[], object], count: int = 5) -> float:
    """Return how long a call occupies the launching thread, provided that the launch queue does not fill up."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e3
