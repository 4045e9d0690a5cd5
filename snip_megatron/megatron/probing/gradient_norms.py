"""Computes ‖∇W‖² of every linear after a training step from DDP's gradient buffers."""

from __future__ import annotations

from typing import Any

import torch

from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.megatron import compat
from snip_megatron.statistics.reduction import ProbeGroups
from snip_megatron.statistics.sums import sum_squares


class GradientNorms:
    """Computes this rank's share of the squared norms. The norms are the sums of the shares over all ranks.

    After a step ``main_grad`` still holds the reduced gradient of the step. If the optimizer is sharded, only the range
    whose state this rank keeps is reduced. An FP32 optimizer has clipped the gradient in place and others have not,
    which scales all norms by one common factor.

    Args:
        registry: Linears of this rank, and the names of all linears.
        groups: Process groups.
        optimizer_sharded: Whether optimizer states are sharded over data parallel ranks.
    """

    def __init__(self, registry: LinearRegistry, groups: ProbeGroups, *, optimizer_sharded: bool) -> None:
        self._registry = registry
        self._groups = groups
        self._sharded = optimizer_sharded
        self._row = {name: index for index, name in enumerate(registry.names)}
        self._ranges: list[tuple[int, torch.nn.Parameter, int, int]] | None = None

    def share(self, optimizer: Any) -> torch.Tensor:
        """Return float64 [linears of the model] on the device of the gradients, to be summed over all ranks."""
        if self._ranges is None:
            self._ranges = self._own(optimizer)
        sums = torch.zeros(len(self._row), dtype=torch.float64, device=self._device)
        for row, weight, start, end in self._ranges:
            sums[row] += sum_squares(weight.main_grad.view(-1)[start:end])  # type: ignore[attr-defined]
        return sums

    @property
    def _device(self) -> torch.device:
        return next((handle.weight.device for handle in self._registry), torch.device("cpu"))

    def _own(self, optimizer: Any) -> list[tuple[int, torch.nn.Parameter, int, int]]:
        """Return (row, weight, start, end) of the ranges that this rank reports. They do not change during a run."""
        own = []
        for handle in self._registry:
            weight, start, end = handle.weight, 0, handle.weight.numel()
            if self._sharded:
                held = compat.held_state(optimizer, weight)
                if held is None:
                    continue
                start, end = held.start, held.end
            elif self._groups.of(handle).dp_rank != 0:
                continue
            own.append((self._row[handle.name], weight, start, end))
        return own
