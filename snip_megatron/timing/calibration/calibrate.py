"""Measures a workload, and keeps what it has when it is stopped: by its time limit, Ctrl-C or SIGTERM."""

from __future__ import annotations

import gc
import math
import os
import platform
import signal
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.precision import Format
from snip_megatron.precision.errors import SnipError, installed_version
from snip_megatron.timing.calibration.clock import Call, Clock
from snip_megatron.timing.calibration.measure import Measurer
from snip_megatron.timing.calibration.workload import Size, Workload
from snip_megatron.timing.table import TimingTable

if TYPE_CHECKING:
    from snip_megatron.numerics.quantize.kernels.compiler import Compilation

_PACKAGES = ("torch", "triton", "transformer-engine", "sgl-deep-gemm", "snip_megatron")
_KINDS = ("gemms", "activations", "weights", "grouped", "attention")
_MOST_PROCESSES = 16
_COMPILING = 0.4  # of the time, at most, is spent waiting for kernels


class Stopped(BaseException):
    """The measurement ends here. The message says why."""


@contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """Raise :class:`Stopped` in this context after ``seconds``, and at SIGINT or SIGTERM. A second signal kills."""
    why = {signal.SIGALRM: f"its {seconds:.0f} s are over", signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}

    def stop(number: int, frame: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for each in why:
            signal.signal(each, signal.SIG_DFL)
        raise Stopped(f"stopped: {why[signal.Signals(number)]}")

    earlier = {number: signal.signal(number, stop) for number in why}
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in earlier.items():
            signal.signal(number, handler)


def calibrate(
    measurer: Measurer,
    workload: Workload,
    about: Mapping[str, Any],
    seconds: float | None = None,
    compilation: Compilation | None = None,
) -> TimingTable:
    """Measure ``workload``, or as much of it as ``seconds`` allow (see :func:`stopped_after`; None: no limit, and
    signals are left alone).

    ``about`` are facts for the table, to which ``versions``, ``complete`` and ``notes`` are added. Attention and copies
    are measured beside the ``compilation`` of :func:`compile_kernels`. The rest waits for it, but not for most of
    ``seconds``. Without one, what is not compiled yet is compiled at its first launch. Raises SnipError if no size of
    some kind was measured, so that nothing could read the table.
    """
    rows: dict[str, dict[Size, Any]] = {kind: {} for kind in _KINDS}
    notes: list[str] = []
    sizes = workload.ordered()
    copy_rate: float | None = None
    done = 0
    try:
        with nullcontext() if seconds is None else stopped_after(seconds):
            copy_rate = measurer.copy_rate()
            for kind, size in sizes:
                if compilation is not None and kind != "attention":
                    compilation.running(math.inf if seconds is None else _COMPILING * seconds)
                    compilation.close()
                    compilation = None
                try:
                    rows[kind][size] = getattr(measurer, kind)(size)
                except RuntimeError as error:  # out of memory, or a size that a library refuses
                    notes.append(f"{kind} {size}: {' '.join(str(error).split())[:160]}")
                done += 1
    except Stopped as stopped:
        notes.append(f"{stopped}; {len(sizes) - done} of {len(sizes)} sizes are not measured")
    finally:
        if compilation is not None:
            compilation.close()
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
        gemms=rows["gemms"],
        activations=rows["activations"],
        weights=rows["weights"],
        grouped=rows["grouped"],
        attention=rows["attention"],
        copy_rate=copy_rate,
        memory=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        about={**about, "versions": versions(), "complete": not notes, "notes": notes},
    )


def device_name(device: torch.device) -> str:
    """Return the name of a device in tables: the GPU's name in torch, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def versions() -> dict[str, str]:
    """Return the versions of Python and of what multiplies and quantises, by package."""
    found = {name: installed_version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **{name: each for name, each in found.items() if each is not None}}


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
    """Run what :func:`calibrate` times, but attention, once, so that its kernels can be listed."""
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
