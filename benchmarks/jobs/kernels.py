"""Where one step of a training spends the GPU's time, by kind of kernel: ``python -m benchmarks.job --kernels``."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

type Row = tuple[str, int, float]
"""Name of a kernel, launches, milliseconds."""
type Gap = tuple[str, str, float]
"""Kernels before and after milliseconds in which the GPU does nothing."""

STEP = "SNIP_JOB_KERNELS_STEP"
"""Environment variable of a rank: the step, counted from 1, whose kernels it records."""

FILE = "kernels.json"
LONGEST = 20
_KINDS = (
    ("communication", r"nccl|c10d::"),
    ("attention", r"fmha|flash|attention|matmul_dq"),
    ("gemm", r"gemm|grouped_wgrad|nvjet|cutlass|xmma|cublas|scaled_mm|aten::(mm|bmm|addmm|linear|matmul)$"),
    ("optimizer", r"multi_tensor|adam|l2norm"),
    (
        "quantisation",
        r"(tile|block|tensor|tiled|amax|exact|exact_amax|range|swiglu|swiglu_gradient|add)_kernel|quanti[sz]e",
    ),
    ("norm", r"rmsnorm|layernorm|layer_norm|rms_norm"),
)
"""Kind → pattern of kernel names, the first that matches counts. All others are ``other``: element-wise, copies."""


def kind_of(name: str) -> str:
    """Return the kind of a kernel, by its name."""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


_LAUNCH = re.compile(r"cu(da)?(Launch\w*Kernel|GraphLaunch)")
_WAIT = re.compile(r"cuda((Stream|Event|Device)Synchronize|Memcpy)$")


def recorded[T](call: Callable[[], T]) -> tuple[T, list[Row], list[Gap], dict[str, float]]:
    """Return what a call returns, the kernels that it launches, when the GPU waited between them, and what the host did
    (:func:`host_of`).

    On a machine without a GPU, torch's operators are recorded instead.
    """
    gpu = torch.cuda.is_available()
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if gpu else kinds.CPU]) as profile:
        started = time.perf_counter()
        result = call()
        if gpu:
            torch.cuda.synchronize()
        ms = (time.perf_counter() - started) * 1e3
    rows = [
        (event.key, event.count, (event.self_device_time_total if gpu else event.self_cpu_time_total) / 1e3)
        for event in profile.key_averages()
    ]
    device = torch.autograd.DeviceType.CUDA if gpu else torch.autograd.DeviceType.CPU
    events_of_device = [event for event in profile.events() if event.device_type == device]
    times = [(event.time_range.start, event.time_range.end, event.name) for event in events_of_device]
    gaps = gaps_between(times)
    stops, starts = [end for _, end, _ in times], [start for start, _, _ in times]
    busy = (max(stops, default=0.0) - min(starts, default=0.0)) / 1e3 - sum(gap for *_, gap in gaps)
    host = host_of([event.name for event in profile.events()], busy / ms, waits=int(gpu))
    return result, [row for row in rows if row[2] > 0], gaps, host | {"ms": round(ms, 2)}


def host_of(names: Iterable[str], busy: float, *, waits: int = 0) -> dict[str, float]:
    """Return the share of a step in which a kernel runs, how often the host waited for the device, and how often it
    launched a kernel or a graph. ``names`` are those of all events, and ``waits`` is a number of waits not to count.
    """
    names = list(names)
    synchronisations = sum(_WAIT.match(name) is not None for name in names) - waits
    launches = sum(_LAUNCH.match(name) is not None for name in names)
    return {"busy": round(busy, 4), "synchronisations": synchronisations, "launches": launches}


def gaps_between(times: Iterable[tuple[float, float, str]]) -> list[Gap]:
    """Return the gaps between kernels of (start, end, name), in microseconds, which may overlap."""
    gaps: list[Gap] = []
    end, last = float("inf"), ""
    for start, until, name in sorted(times):
        if start > end:
            gaps.append((last, name, (start - end) / 1e3))
        if not last or until > end:
            end, last = until, name
    return gaps


def recorder(folder: Path, step: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrapper of Megatron's ``train_step`` that records the kernels of one step in ``folder``."""

    def wrap(train_step: Callable[..., Any]) -> Callable[..., Any]:
        def step_with_record(*args: Any, **kwargs: Any) -> Any:
            if kwargs["iteration"] + 1 != step:
                return train_step(*args, **kwargs)
            result, *record = recorded(lambda: train_step(*args, **kwargs))
            (folder / FILE).write_text(json.dumps(record), encoding="utf-8")
            return result

        return step_with_record

    return wrap


def record(folder: Path) -> None:
    """Record a step in ``folder`` if this process was asked to, by the environment. Megatron must be importable."""
    step = os.environ.get(STEP)
    if step is not None and os.environ.get("RANK", "0") == "0":
        from snip_megatron.megatron import compat

        compat.wrap_train_step(recorder(folder, int(step)))


def summary(folder: Path) -> dict[str, Any] | None:
    """Return the result of :func:`summarised` for the record in ``folder``. None without a record."""
    path = folder / FILE
    return summarised(*json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def summarised(rows: Iterable[Row], gaps: Iterable[Gap], host: dict[str, float]) -> dict[str, Any]:
    """Return milliseconds by kind of kernel, the longest kernels, the milliseconds between kernels, and ``host``."""
    rows = sorted(rows, key=lambda row: -row[2])
    kinds: dict[str, float] = {}
    for name, _, ms in rows:
        kinds[kind_of(name)] = kinds.get(kind_of(name), 0.0) + ms
    longest = [{"kernel": name[:120], "launches": count, "ms": round(ms, 3)} for name, count, ms in rows[:LONGEST]]
    idle: dict[tuple[str, str], list[float]] = {}
    for before, after, ms in gaps:
        idle.setdefault((before[:60], after[:60]), []).append(ms)
    waits = [
        {"after": before, "before": after, "times": len(each), "ms": round(sum(each), 3)}
        for (before, after), each in sorted(idle.items(), key=lambda pair: -sum(pair[1]))[:LONGEST]
    ]
    by_kind = {kind: round(ms, 3) for kind, ms in kinds.items()}
    idle_ms = round(sum(map(sum, idle.values())), 3)
    return {"ms": by_kind, "longest": longest, "idle": idle_ms, "waits": waits, "host": host}
