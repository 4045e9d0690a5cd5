"""Loss and gradient norm of each step on every rank, one step late, in one small asynchronous collective.

Under pipeline parallelism only the last stage sees the loss; rank 0 writes the metrics (DESIGN, rule 7).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class StepFigures:
    """Figures of one training step; None where no rank had them."""

    step: int
    loss: float | None
    grad_norm: float | None


class StepReport:
    """Sums (loss, ranks that have it) over all ranks while the next step runs.

    Args:
        device: where collectives of the group need their tensors.
        group: all training ranks; None for the default group.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._device = device
        self._group = group
        self._flight: tuple[int, torch.Tensor, float | None, Any] | None = None

    def exchange(self, step: int, loss: torch.Tensor | None, grad_norm: float | None) -> StepFigures | None:
        """Send this step's figures on their way; returns those of the step before. Collective."""
        arrived = self.drain()
        values = torch.zeros(2, dtype=torch.float64, device=self._device)
        if loss is not None:
            values[0] = loss.detach().double().reshape(())
            values[1] = 1.0
        handle = dist.all_reduce(values, group=self._group, async_op=True)
        self._flight = (step, values, grad_norm, handle)
        return arrived

    def drain(self) -> StepFigures | None:
        """The figures in flight, if any."""
        if self._flight is None:
            return None
        step, values, grad_norm, handle = self._flight
        self._flight = None
        handle.wait()
        total, count = (float(value) for value in values.cpu())
        loss = total / count if count > 0 else None
        return StepFigures(step, loss, None if grad_norm is None or math.isnan(grad_norm) else float(grad_norm))
