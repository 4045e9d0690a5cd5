"""Timing of calls that take turns: by CUDA events on a GPU, by the host's clock on a CPU.

On a GPU, each round starts with large bf16 GEMMs. They have three purposes. While they run, the launches of the round
are queued, so that no launch overhead is timed. They evict the data of the previous round from the caches. They keep
the GPU at the clock rate of a loaded GPU, as in training.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Protocol

import torch

Call = Callable[[int], object]
"""A call to be timed. Its argument counts the calls, so that the call can rotate its buffers."""

_ROUNDS = (4, 24)
_SECONDS = 0.05  # total duration of a measurement, within the limits of _ROUNDS
_HEATER = 8192
_HEATINGS = 2


class Clock(Protocol):
    """A clock that times calls in turns."""

    device: torch.device

    def seconds[Key: Hashable](self, calls: Mapping[Key, Call]) -> dict[Key, float]:
        """Return the median seconds of each call over several rounds, after a warm-up."""


class HostClock:
    """The clock of a CPU."""

    device = torch.device("cpu")

    def seconds[Key: Hashable](self, calls: Mapping[Key, Call]) -> dict[Key, float]:
        times: dict[Key, list[float]] = {key: [] for key in calls}
        for turn in range(_ROUNDS[0]):
            for key, call in calls.items():
                started = time.perf_counter()
                call(turn)
                times[key].append(max(time.perf_counter() - started, 1e-9))
        return {key: _rounded(statistics.median(taken[1:])) for key, taken in times.items()}


class GpuClock:
    """The clock of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        draws = torch.Generator(device).manual_seed(0)  # a training's own generator stays as it is
        self._a, self._b = (
            torch.randn(_HEATER, _HEATER, device=device, dtype=torch.bfloat16, generator=draws) for _ in range(2)
        )
        self._out = torch.empty_like(self._a)

    def seconds[Key: Hashable](self, calls: Mapping[Key, Call]) -> dict[Key, float]:
        self._round(calls, 0)  # compiles kernels and lets libraries allocate
        torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        self._round(calls, 1)
        torch.cuda.synchronize(self.device)
        least, most = _ROUNDS
        rounds = min(most, max(least, int(_SECONDS / (time.perf_counter() - started))))
        taken = [self._round(calls, turn + 2) for turn in range(rounds)]
        torch.cuda.synchronize(self.device)
        return {
            key: _rounded(statistics.median(events[key][0].elapsed_time(events[key][1]) for events in taken) / 1e3)
            for key in calls
        }

    def _round[Key: Hashable](
        self, calls: Mapping[Key, Call], turn: int
    ) -> dict[Key, tuple[torch.cuda.Event, torch.cuda.Event]]:
        for _ in range(_HEATINGS):
            torch.mm(self._a, self._b, out=self._out)
        events = {}
        for place, (key, call) in enumerate(calls.items()):
            start, end = _event(), _event()
            start.record()
            call(turn + place)
            end.record()
            events[key] = (start, end)
        return events


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _rounded(seconds: float) -> float:
    """Round to five significant digits, which is finer than the repeatability."""
    return float(f"{seconds:.5g}")


def clock_for(device: torch.device) -> Clock:
    return HostClock() if device.type == "cpu" else GpuClock(device)
