"""Handles of linears on one rank, for code that reads a linear's place and shape without a module of Megatron."""

from dataclasses import replace
from typing import Any

import torch

from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.precision import LinearId


class Recorder:
    """Keeps what a probe shows it of each backward."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, ...]] = []

    def on_backward(self, *tensors: torch.Tensor) -> None:
        self.calls.append(tensors)


def handle_of(linear: LinearId | str, n: int = 4, k: int = 4, context: StepContext | None = None, **fields: Any) -> Any:
    """Return the handle of a column parallel linear [n, k] of torch. ``fields`` replaces fields of it."""
    name = LinearId.parse(linear) if isinstance(linear, str) else linear
    features, module = (torch.arange(n), torch.arange(k)), torch.nn.Linear(k, n, bias=False)
    handle = LinearHandle(name, "column", n, k, 0, 0, 1, *features, context or StepContext(), module)
    return replace(handle, **fields)
