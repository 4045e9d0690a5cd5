"""Measures the sizes of a grid or of a model's linears, and keeps what it has when it is stopped."""

from __future__ import annotations

import gc
import itertools
import math
import os
import platform
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.precision import Format
from snip_megatron.precision.errors import SnipError, installed_version
from snip_megatron.timing.cost_model import LinearShape
from snip_megatron.timing.measure import Call, Clock, Measurer, Size
from snip_megatron.timing.table import TimingTable

if TYPE_CHECKING:
    from snip_megatron.numerics.quantize.kernels.compiler import Compilation

# Tokens, features, attention (sequence, heads, head size), grouped (experts, tokens, n, k).
_GRID: tuple[Size, Size, tuple[Size, ...], tuple[Size, ...]] = (
    (2048, 8192, 16384),
    (512, 2048, 4096, 8192, 32768),
    ((2048, 16, 64), (8192, 16, 64), (2048, 16, 128), (8192, 16, 128)),
    ((8, 128), (8192, 65536), (1024, 4096), (1024, 4096)),
)
_CPU_GRID = ((32, 128), (64, 256), ((64, 2, 32),), ((2,), (128,), (64, 128), (64, 128)))


@dataclass(frozen=True)
class Workload:
    """The sizes to measure, in an order in which a calibration that is stopped leaves a coarser full grid."""

    gemms: tuple[Size, ...]  # (tokens, n, k)
    activations: tuple[Size, ...]  # (tokens, features)
    weights: tuple[Size, ...]  # (n, k)
    attention: tuple[Size, ...] = ()  # (sequence, heads, head size)
    grouped: tuple[Size, ...] = ()  # (experts, tokens of all experts, n, k)

    def ordered(self) -> list[tuple[str, Size]]:
        """Return (attribute, size) for all sizes: attention, then single linears, whose kinds advance together, and
        last grouped ones, whose kernels take longest to compile.
        """
        linears = {"activations": self.activations, "weights": self.weights, "gemms": self.gemms}
        places = [(i / len(sizes), kind, size) for kind, sizes in linears.items() for i, size in enumerate(sizes)]
        ordered = [(kind, size) for _, kind, size in sorted(places, key=lambda place: place[0])]
        return [*(("attention", s) for s in self.attention), *ordered, *(("grouped", s) for s in self.grouped)]


def grid_workload(device_type: str) -> Workload:
    """Return a grid of powers of two. The grid of a CPU is tiny and only serves to try the command."""
    tokens, features, attention, grouped = _CPU_GRID if device_type == "cpu" else _GRID
    return Workload(
        gemms=coarse_first((tokens, features, features)),
        activations=coarse_first((tokens, features)),
        weights=coarse_first((features, features)),
        attention=attention,
        grouped=coarse_first(grouped),
    )


def shapes_workload(shapes: Iterable[LinearShape], attention: Iterable[Size] = ()) -> Workload:
    """Return the sizes of these linears and of ``attention``."""
    shapes = tuple(shapes)
    gemms = dict.fromkeys((shape.tokens, shape.n, shape.k) for shape in shapes if not shape.grouped)
    return Workload(
        gemms=tuple(gemms),
        activations=tuple(dict.fromkeys((m, edge) for m, n, k in gemms for edge in (n, k))),
        weights=tuple(dict.fromkeys((n, k) for _, n, k in gemms)),
        attention=tuple(dict.fromkeys(attention)),
        grouped=tuple(dict.fromkeys(shape.group for shape in shapes if shape.grouped)),
    )


def coarse_first(axes: Sequence[Sequence[int]]) -> tuple[Size, ...]:
    """Return the product of sorted axes, ends of axes first, then middles: a prefix contains a full coarser grid."""
    levels = [_levels(0, len(axis) - 1) for axis in axes]
    places = itertools.product(*(range(len(axis)) for axis in axes))
    ordered = sorted(places, key=lambda place: (max(level[i] for level, i in zip(levels, place, strict=True)), place))
    return tuple(tuple(axis[i] for axis, i in zip(axes, place, strict=True)) for place in ordered)


def _levels(low: int, high: int, depth: int = 0) -> dict[int, int]:
    """Return place → how often the places ``low`` to ``high`` of an axis must be halved until it is an end."""
    levels = dict.fromkeys((low, high), depth)
    if high - low < 2:
        return levels
    middle = (low + high) // 2
    return _levels(low, middle, depth + 1) | _levels(middle, high, depth + 1) | levels


_PACKAGES = ("torch", "triton", "transformer-engine", "sgl-deep-gemm", "snip_megatron")
_KINDS = ("gemms", "activations", "weights", "grouped", "attention")
_MOST_PROCESSES = 16
_COMPILING = 0.4  # of the time, at most, is spent waiting for kernels


def calibrate(
    measurer: Measurer,
    workload: Workload,
    about: Mapping[str, Any],
    seconds: float | None = None,
    compilation: Compilation | None = None,
) -> TimingTable:
    """Measure ``workload``, or as much of it as is done after ``seconds`` or at Ctrl-C. All of it if that is None.

    ``about`` are facts for the table, to which ``versions``, ``complete`` and ``notes`` are added. Attention and copies
    are measured beside the ``compilation`` of :func:`compile_kernels`. The rest waits for it, but at most 0.4 of
    ``seconds``. Raises SnipError if no size of some kind was measured, because nothing could read such a table.
    """
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    rows: dict[str, dict[Size, Any]] = {kind: {} for kind in _KINDS}
    notes: list[str] = []
    sizes = workload.ordered()
    copy_rate: float | None = None
    measured, stopped = 0, ""
    try:
        copy_rate = measurer.copy_rate()
        for kind, size in sizes:
            if time.monotonic() >= deadline:
                stopped = f"its {seconds:.0f} s are over"
                break
            if compilation is not None and kind != "attention":
                compilation.running(math.inf if seconds is None else _COMPILING * seconds)
                compilation.close()
                compilation = None
            try:
                rows[kind][size] = getattr(measurer, kind)(size)
            except RuntimeError as error:  # out of memory, or a size that a library refuses
                notes.append(f"{kind} {size}: {' '.join(str(error).split())[:160]}")
            measured += 1
    except KeyboardInterrupt:
        if seconds is None:
            raise
        stopped = "interrupted"
    finally:
        if compilation is not None:
            compilation.close()
    if stopped:
        notes.append(f"stopped: {stopped}; {len(sizes) - measured} of {len(sizes)} sizes are not measured")
    device = measurer.clock.device
    if device.type == "cuda":
        gc.collect()  # modules may refer to themselves, and a training needs their memory
        torch.cuda.empty_cache()
    missing = [kind for kind in ("gemms", "activations", "weights") if not rows[kind]]
    if missing:
        raise SnipError(f"no size of {missing[0]} could be measured: {'; '.join(notes)}")
    return TimingTable(
        device=device_name(device),
        backend=measurer.backend.name,
        formats=(Format.BF16, *measurer.formats),
        **rows,
        copy_rate=copy_rate,
        memory=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        about={**about, "versions": versions(), "complete": not notes, "notes": notes},
    )


def device_name(device: torch.device) -> str:
    """Return the name of a device in tables: the GPU's name in torch, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def versions() -> dict[str, str]:
    """Return the versions of Python and of what multiplies and quantises, by package."""
    installed = {name: installed_version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **{name: v for name, v in installed.items() if v is not None}}


def compile_kernels(measurer: Measurer, workload: Workload) -> Compilation | None:
    """Start to compile the kernels of ``workload`` in other processes. Returns None on a CPU."""
    device = measurer.clock.device
    if device.type != "cuda":
        return None
    from triton.runtime import driver

    from snip_megatron.numerics.quantize.kernels.compiler import Compilation
    from snip_megatron.numerics.quantize.kernels.launch import list_launches

    with list_launches() as listing:
        run_once(measurer.backend, measurer.formats, workload, device)
    processes = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))
    return Compilation(sorted(listing.kernels, key=repr), driver.active.get_current_target(), processes)


def run_once(backend: GemmBackend, formats: tuple[Format, ...], workload: Workload, device: torch.device) -> None:
    """Run once everything that :func:`calibrate` times, except attention, so that its kernels can be listed."""
    once = Measurer(backend, _Once(device), formats)
    for kind, size in replace(workload, attention=()).ordered():
        with suppress(RuntimeError):  # as in calibrate
            getattr(once, kind)(size)


class _Once(Clock):
    """Runs each call once, without timing it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds[Key: Hashable](self, calls: Mapping[Key, Call]) -> dict[Key, float]:
        for call in calls.values():
            call(0)
        return dict.fromkeys(calls, 1.0)
