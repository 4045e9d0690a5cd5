"""How long the GPU takes for a module's forward and backward in a training, with what it waits for its host."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

type Mark = torch.cuda.Event | float


class Spans:
    """Notes when the latest ``count`` forwards of a module, and their backwards, began and ended."""

    def __init__(self, count: int = 8) -> None:
        self._latest: deque[list[Mark]] = deque(maxlen=count)

    def run[*Arguments, Rest](
        self, call: Callable[[Tensor, *Arguments], tuple[Tensor, Rest]], x: Tensor, *arguments: *Arguments
    ) -> tuple[Tensor, Rest]:
        """Call a module's forward. Without a backward through x, or in a capture, nothing is noted."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return call(x, *arguments)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return call(x, *arguments)
        marks = [_mark()]

        def begin(_: Tensor) -> None:
            marks.append(_mark())

        def end(_: Tensor) -> None:
            marks.append(_mark())
            self._latest.append(marks)

        y, bias = call(x, *arguments)
        marks.append(_mark())
        y.register_hook(begin)  # type: ignore[no-untyped-call]
        x.register_hook(end)  # type: ignore[no-untyped-call]
        return y, bias

    def seconds(self) -> float | None:
        """Return the median of the noted microbatches' seconds, forward and backward, or None if there are none."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return statistics.median(map(_seconds, self._latest)) if self._latest else None


def _mark() -> Mark:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds(marks: list[Any]) -> float:
    return sum(
        float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3)
        for begin, end in zip(marks[::2], marks[1::2], strict=True)
    )
