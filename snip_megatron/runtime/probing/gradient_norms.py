"""‖∇W‖² of every linear after a training step, from the gradients that the step has reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.runtime.host import Host
from snip_megatron.statistics.squares import sum_squares

Held = Callable[[torch.nn.Parameter], tuple[int, int] | None]
"""Returns the range of a flattened parameter whose optimizer state this rank holds."""


class GradientNorms:
    """Computes this rank's share of the squared norms. The norms are the sums of the shares over all ranks.

    After a step ``main_grad`` still holds the reduced gradient of the step. If the optimizer is sharded, only the range
    whose state this rank keeps is reduced. An FP32 optimizer has clipped the gradient in place and others have not,
    which scales all norms by one common factor.

    Args:
        registry: linears of this rank, and the names of all linears.
        host: the training loop.
        held: the ranges of a sharded optimizer. They do not change during a run.
    """

    def __init__(self, registry: LinearRegistry, host: Host, held: Held) -> None:
        self._rows = len(registry.names)
        self._device = next((handle.weight.device for handle in registry), torch.device("cpu"))
        row = {name: index for index, name in enumerate(registry.names)}
        self._ranges: list[tuple[int, Any, int, int]] = []
        for handle in registry:
            if handle.repeats:
                continue
            own: tuple[int, int] | None = (0, handle.weight.numel())
            if host.sharded:
                own = held(handle.weight)
            elif host.groups.of(handle).dp_rank != 0:
                own = None
            if own is not None:
                self._ranges.append((row[handle.name], handle.weight, *own))

    def share(self) -> torch.Tensor:
        """Return float64 [linears of the model] on the device of the gradients, to be summed over all ranks."""
        sums = torch.zeros(self._rows, dtype=torch.float64, device=self._device)
        for row, weight, start, end in self._ranges:
            sums[row] += sum_squares(weight.main_grad.view(-1)[start:end])
        return sums
