"""Records a linear and evaluates AdamW's update error on dummy tensors before training, to compile their kernels."""

from collections.abc import Sequence

import torch

from snip_megatron.layers.warm_up import WarmUpLinear
from snip_megatron.sensitivity.recorder import LinearRecorder, Pass
from snip_megatron.sensitivity.squares import sum_squares
from snip_megatron.sensitivity.update_error import StepScale, linear_update_error, sink_update_error
from snip_megatron.sensitivity.updates import AdamWState

_SCALE = StepScale(gradient=1.0, clip=1.0, tokens=1, tokens_per_step=2)


def warm_up_recording(linear: WarmUpLinear, formats: Sequence[str], sample_tokens: int) -> LinearRecorder:
    """Run the passes of a probe of ``formats`` over two microbatches. Return the recorder with all of its sums."""
    recorder = LinearRecorder(linear.handle, tuple(formats), sample_tokens)
    d = torch.zeros_like(linear.x)
    for phase in Pass:
        recorder.start(phase)
        for _ in range(2):
            recorder.on_backward(linear.x, linear.handle.weight.detach(), linear.g, d, d)
    for dtype in {linear.x.dtype, torch.float32}:
        for size in (1024, 1025):  # Triton compiles different kernels for multiples of 16 and other lengths
            sum_squares(torch.zeros(size, dtype=dtype, device=linear.x.device))
    return recorder


def warm_up_update_error(recorder: LinearRecorder, *, sharded: bool) -> None:
    """Evaluate the update error of a recorded linear; with ``sharded`` optimizer states, of parts of the weight too."""
    weight = recorder.handle.weight
    gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    for start, end in _ranges(weight.numel(), sharded):
        state = _state(gradient, start, end)
        linear_update_error(recorder, gradient, state, _SCALE, s2=1.0, x2=1.0, g2=1.0, seed=0)


def warm_up_sinks(weight: torch.Tensor, *, sharded: bool) -> None:
    """Evaluate the update error of a parameter that is no linear's weight, of a matrix in its first rows only."""
    rows = min(len(weight), _ROWS) if weight.dim() > 1 else len(weight)
    gradient = torch.zeros(rows, *weight.shape[1:], dtype=torch.float32, device=weight.device)
    for start, end in _ranges(gradient.numel(), sharded):
        sink_update_error(gradient, _state(gradient, start, end), _SCALE, seed=0, first_row=0)


_ROWS = 128


def _ranges(size: int, sharded: bool) -> list[tuple[int, int]]:
    """Return ranges whose ends are multiples of 16 and others, because Triton compiles different kernels for them."""
    if not sharded or size < 64:
        return [(0, size)]
    return [(0, size), (0, size - 3), (3, size), (3, size - 13)]


def _state(gradient: torch.Tensor, start: int, end: int) -> AdamWState:
    moment = torch.zeros(end - start, dtype=torch.float32, device=gradient.device)
    return AdamWState(start, end, 1, moment, moment.clone(), beta1=0.9, beta2=0.95, eps=1e-8)
