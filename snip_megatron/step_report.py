"""Loss and gradient norm of each step on every rank, one step late, in one small asynchronous collective.

Under pipeline parallelism only the last stage sees the loss; rank 0 writes the metrics (DESIGN, rule 7).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_LOSS, _RANKS, _BROKEN, _ANSWERED, _SUM = 0, 1, 2, 3, 4  # places of what is summed over ranks; how many there are


@dataclass(frozen=True)
class StepFigures:
    """Figures of one training step, equal on all ranks; None where no rank had them, or where they are not finite.

    ``broken``: on some rank the loss or the gradient norm was NaN or infinite. ``gradients``: ‖∇W‖² of every linear, at
    the steps where ranks had them. ``answered``: rank 0 knew the outcome of the update on its way.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    broken: bool = False
    gradients: tuple[float, ...] | None = None
    answered: bool = False


class StepReport:
    """Sums (loss, ranks that have it) over all ranks while the next step runs.

    On a GPU the sum comes to the host by itself, on a stream of its own: reading it a step later waits for nothing that
    the training step has not waited for, and the launching thread stays ahead.

    Args:
        device: where collectives of the group need their tensors.
        group: all training ranks; None for the default group.
        arrived: figures that were on their way when a checkpoint was written: the first to be returned.
    """

    def __init__(
        self, device: torch.device, group: dist.ProcessGroup | None = None, arrived: StepFigures | None = None
    ) -> None:
        self._device = device
        self._group = group
        self._arrived = arrived
        self._flight: _Flight | None = None
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def exchange(
        self,
        step: int,
        loss: torch.Tensor | None,
        grad_norm: float | None,
        gradients: torch.Tensor | None = None,
        *,
        answered: bool = False,
    ) -> StepFigures | None:
        """Send this step's figures on their way; returns those of the step before. Collective.

        ``gradients`` is a rank's float64 share of the linears' ‖∇W‖²; all ranks give it, of one size, or none does.
        ``answered`` is for rank 0 to say.
        """
        arrived = self.drain()
        values = torch.zeros(_SUM, dtype=torch.float64, device=self._device)
        if grad_norm is not None and not math.isfinite(grad_norm):
            values[_BROKEN] = 1.0
        if loss is not None:
            own = loss.detach().double().reshape(())
            values[_LOSS], values[_RANKS] = own, 1.0
            values[_BROKEN] += ~own.isfinite()
        if answered:
            values[_ANSWERED] = 1.0
        if gradients is not None:
            values = torch.cat([values, gradients.to(values.device)])
        handle = dist.all_reduce(values, group=self._group, async_op=True)
        host, landed = (values, handle) if self._stream is None else self._to_host(values, handle, self._stream)
        self._flight = _Flight(step, values, host, landed, grad_norm)
        return arrived

    def _to_host(self, values: torch.Tensor, handle: Any, stream: Any) -> tuple[torch.Tensor, Any]:
        """Queue the copy behind the collective, beside the training stream."""
        host = torch.empty(values.numel(), dtype=torch.float64, pin_memory=True)
        landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            handle.wait()
            host.copy_(values, non_blocking=True)
            landed.record()
        return host, landed

    def in_flight(self) -> StepFigures | None:
        """The figures on their way, which stay to be returned: what a checkpoint keeps. Waits for them."""
        self._arrived = self.drain()
        return self._arrived

    def drain(self) -> StepFigures | None:
        """The figures on their way, if any."""
        if self._flight is None:
            arrived, self._arrived = self._arrived, None
            return arrived
        flight, self._flight = self._flight, None
        if self._stream is None:
            flight.landed.wait()
        else:
            flight.landed.synchronize()
        sums = flight.host.tolist()
        loss = sums[_LOSS] / sums[_RANKS] if sums[_RANKS] > 0 and math.isfinite(sums[_LOSS]) else None
        norm = flight.grad_norm
        finite = norm is not None and math.isfinite(norm)
        gradients = tuple(sums[_SUM:]) if all(map(math.isfinite, sums[_SUM:])) else ()
        return StepFigures(
            flight.step,
            loss,
            norm if finite else None,
            broken=sums[_BROKEN] > 0,
            gradients=gradients or None,
            answered=sums[_ANSWERED] > 0,
        )


@dataclass(frozen=True)
class _Flight:
    """One step's figures on their way: ``values`` must live until the copy to ``host`` has ``landed``."""

    step: int
    values: torch.Tensor
    host: torch.Tensor
    landed: Any
    grad_norm: float | None
