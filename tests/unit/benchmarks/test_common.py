"""The timing of calls that are shorter than their launch, on a made-up GPU with a host that is slower than it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks import common

KERNEL, CLEAR, CYCLES_A_MS = 0.044, 0.02, 2_000_000


class Gpu:
    """One stream and its host; times in ms. A launch takes ``host`` of the host's time."""

    def __init__(self, host: float) -> None:
        self.host, self.now, self.free = host, 0.0, 0.0
        self.sleeps: list[float] = []

    def launch(self, duration: float, host: float = 0.005) -> None:
        self.now += host
        self.free = max(self.free, self.now) + duration

    def call(self) -> None:
        self.launch(KERNEL, self.host)

    def synchronize(self) -> None:
        self.now = max(self.now, self.free)

    def sleep(self, cycles: int) -> None:
        self.sleeps.append(cycles / CYCLES_A_MS)
        self.launch(self.sleeps[-1])

    def zero_(self) -> None:
        self.launch(CLEAR)

    def event(self, enable_timing: bool = False) -> Event:
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at = gpu, 0.0

    def record(self) -> None:
        self.at = max(self.gpu.free, self.gpu.now)

    def query(self) -> bool:
        return self.at <= self.gpu.now

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Gpu]:
    def make(host: float) -> Gpu:
        made = Gpu(host)
        for name in ("synchronize", "_sleep", "Event"):
            monkeypatch.setattr(
                torch.cuda, name, {"_sleep": made.sleep, "Event": made.event}.get(name, made.synchronize)
            )
        monkeypatch.setattr(common, "_larger_than_l2", lambda: made)
        return made

    return make


@pytest.mark.parametrize(("host", "longest"), [(0.001, 2.0), (0.06, 2.0), (0.3, 8.0), (3.0, 64.0)])
def test_the_time_is_the_kernels_own(gpu: Callable[[float], Gpu], host: float, longest: float) -> None:
    """And the sleep no longer than the launches need, to the next power of two."""
    made = gpu(host)
    assert common.cold_milliseconds(made.call) == pytest.approx(KERNEL)
    assert max(made.sleeps) == longest


def test_a_call_that_waits_for_the_gpu_is_refused(gpu: Callable[[float], Gpu]) -> None:
    made = gpu(0.01)

    def waits() -> None:
        made.call()
        made.synchronize()

    with pytest.raises(RuntimeError, match="the call waits for it"):
        common.cold_milliseconds(waits)
