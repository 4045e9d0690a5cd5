"""Evaluates AdamW's drift on dummy tensors before training, so that its kernels are compiled by then."""

from __future__ import annotations

import torch

from snip_megatron.optimizers.updates import AdamWState
from snip_megatron.optimizers.weight_drift import StepScale, linear_drift, sink_drift
from snip_megatron.statistics.recorder import LinearRecorder

_SCALE = StepScale(gradient=1.0, clip=1.0, tokens=1, tokens_per_step=2)


def rehearse_drift(recorder: LinearRecorder, *, sharded: bool) -> None:
    """Evaluate the drift of a recorded linear.

    Args:
        recorder: the recorder of the linear.
        sharded: whether ranks hold shards of the optimizer's state. Parts of the weight are then evaluated as well.
    """
    weight = recorder.handle.weight
    gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    for start, end in _ranges(weight.numel(), sharded):
        state = _state(gradient, start, end)
        linear_drift(recorder, gradient, state, _SCALE, s2=1.0, x2=1.0, g2=1.0, seed=0)


def rehearse_sinks(weight: torch.Tensor, *, sharded: bool) -> None:
    """Evaluate the drift of a parameter that is not the weight of a linear.

    Args:
        weight: a parameter with the shape and dtype. Only the first rows of a matrix are evaluated.
        sharded: see :func:`rehearse_drift`.
    """
    gradient = torch.zeros_like(weight[:_ROWS] if weight.dim() > 1 else weight, dtype=torch.float32)
    for start, end in _ranges(gradient.numel(), sharded):
        sink_drift(gradient, _state(gradient, start, end), _SCALE, seed=0, first_row=0)


_ROWS = 128


def _ranges(size: int, sharded: bool) -> list[tuple[int, int]]:
    """Return ranges whose ends are multiples of 16 and others, because Triton compiles different kernels for them."""
    if not sharded or size < 64:
        return [(0, size)]
    return [(0, size), (0, size - 3), (16, size), (16, size - 3), (3, size), (3, size - 13)]


def _state(gradient: torch.Tensor, start: int, end: int) -> AdamWState:
    moment = torch.zeros(end - start, dtype=torch.float32, device=gradient.device)
    return AdamWState(start, end, moment, moment.clone(), step=1, beta1=0.9, beta2=0.95, eps=1e-8)
