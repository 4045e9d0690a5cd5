"""Records backwards of a linear on dummy tensors before training, so that the kernels are compiled by then."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from snip_megatron.layers.rehearsal import StandIn
from snip_megatron.statistics.recorder import LinearRecorder, Pass
from snip_megatron.statistics.sums import sum_squares


def rehearse_recording(linear: StandIn, formats: Sequence[str], sample_tokens: int) -> LinearRecorder:
    """Run the passes of a probe over two microbatches.

    Args:
        linear: the stand-in of a linear.
        formats: the formats whose errors are recorded.
        sample_tokens: number of tokens in the recorder's sample.

    Returns:
        The recorder with all of its sums.
    """
    recorder = LinearRecorder(linear.handle, tuple(formats), sample_tokens)
    d = torch.zeros_like(linear.x)
    for phase in Pass:
        recorder.start(phase)
        for _ in range(2):
            recorder.on_backward(linear.x, linear.handle.weight.detach(), linear.g, d, d)
    _rehearse_squares(linear.x)
    return recorder


def _rehearse_squares(like: torch.Tensor) -> None:
    """Sum tensors of two lengths, because Triton compiles different kernels for multiples of 16 and other lengths."""
    for dtype in {like.dtype, torch.float32}:
        for size in (1024, 1025):
            sum_squares(torch.zeros(size, dtype=dtype, device=like.device))
