"""What one optimizer does with a gradient, and how far an error of it moves the weights: the drift behind ΔW.

METHOD, "Weight divergence": ΔW = ‖u(g+δ) − u(g)‖ / ‖W‖, u the step the optimizer takes, without learning rate and
weight decay. AdamW's is :class:`snip_megatron.statistics.drift.AdamWState`; the others are here. A state covers
elements [start, end) of the flattened local parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from snip_megatron.statistics.sums import sum_squares

MUON_SAMPLES = (0.0, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Where in a sorted list of error sizes Muon's drift is evaluated, an orthogonalisation each: drift is proportional to
small errors and bends where it saturates."""


class Update(Protocol):
    """The next update of this rank's share of a parameter; all tensors flat, [end − start]."""

    @property
    def start(self) -> int:
        """First element of the flattened local parameter."""

    @property
    def end(self) -> int:
        """One past the last."""

    def mean(self) -> torch.Tensor | None:
        """The optimizer's own estimate of the mean gradient; None before its first step."""

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Squared norms of the first and the second moment, float64 scalars; 0 for what it does not keep."""

    def direction(self, g: torch.Tensor) -> torch.Tensor:
        """u(g): what the learning rate is multiplied by. Leaves g and the state as they are."""

    def squared_drift(
        self, g: torch.Tensor, unit: torch.Tensor, scales: Sequence[float], base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """‖u(g + ρ·unit) − u(g)‖² for each ρ in ``scales``, float64 [len(scales)]; ``base`` is u(g) where known."""


@dataclass(frozen=True)
class SgdState:
    """SGD with momentum: u = μ·b + (1 − d)·g, or g + μ·u under Nesterov.

    Attributes:
        start, end: range in the flattened local parameter.
        momentum_buffer: b; None before the first step, when u = g.
        step: updates done so far, for the mean.
        momentum, dampening, nesterov: hyper-parameters.
    """

    start: int
    end: int
    momentum_buffer: torch.Tensor | None
    step: int
    momentum: float
    dampening: float = 0.0
    nesterov: bool = False

    @property
    def _share(self) -> float:
        """What the gradient is multiplied by on its way into the buffer."""
        return 1.0 if self.momentum_buffer is None else 1.0 - self.dampening

    def mean(self) -> torch.Tensor | None:
        """The buffer over the sum of its weights."""
        if self.momentum_buffer is None or self.momentum <= 0.0 or self.step == 0:
            return None
        first = self.momentum ** (self.step - 1)  # the first gradient entered undamped
        later = self.step - 1 if self.momentum == 1.0 else (1.0 - first) / (1.0 - self.momentum)
        return self.momentum_buffer / (first + (1.0 - self.dampening) * later)

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """‖b‖²; there is no second moment."""
        zero = torch.zeros((), dtype=torch.float64)
        return zero if self.momentum_buffer is None else sum_squares(self.momentum_buffer), zero

    def direction(self, g: torch.Tensor) -> torch.Tensor:
        """See :class:`Update`."""
        moved = g * self._share
        if self.momentum_buffer is not None:
            moved = moved + self.momentum * self.momentum_buffer
        return g + self.momentum * moved if self.nesterov else moved

    def squared_drift(
        self, g: torch.Tensor, unit: torch.Tensor, scales: Sequence[float], base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """u is linear in g: ρ²·‖unit‖² times the gain squared, exactly, whatever g and the buffer are."""
        gain = 1.0 + self.momentum * self._share if self.nesterov else self._share
        return torch.tensor(list(scales), dtype=torch.float64, device=unit.device).square() * (
            sum_squares(unit) * gain**2
        )


@dataclass(frozen=True)
class LionState:
    """Lion: u = sign(β₁·m + (1 − β₁)·g) (Chen et al. 2023): each element moves by 2 or not at all.

    Attributes:
        start, end: range in the flattened local parameter.
        exp_avg: m, a running average with β₂ that starts at zero.
        step: updates done so far, for the mean.
        beta1, beta2: hyper-parameters.
    """

    start: int
    end: int
    exp_avg: torch.Tensor
    step: int
    beta1: float
    beta2: float

    def mean(self) -> torch.Tensor | None:
        """m, bias corrected."""
        return None if self.step == 0 else self.exp_avg / (1.0 - self.beta2**self.step)

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """‖m‖²; there is no second moment."""
        return sum_squares(self.exp_avg), torch.zeros((), dtype=torch.float64)

    def direction(self, g: torch.Tensor) -> torch.Tensor:
        """See :class:`Update`."""
        return torch.lerp(self.exp_avg, g, 1.0 - self.beta1).sign_()

    def squared_drift(
        self, g: torch.Tensor, unit: torch.Tensor, scales: Sequence[float], base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`Update`."""
        base = self.direction(g) if base is None else base
        return torch.stack([sum_squares(self.direction(g + rho * unit) - base) for rho in scales])


@dataclass(frozen=True)
class MuonState:
    """Muon: u = scale · orthogonalised(momentum), of the whole matrix (Jordan et al. 2024).

    Attributes:
        start, end: 0 and the number of elements: Muon's state is never cut inside a matrix.
        shape: [N local, K local] of the parameter.
        momentum_buffer: a running average that starts at zero.
        step: updates done so far, for the mean.
        momentum, nesterov: hyper-parameters.
        orthogonalize: matrix → scaled, orthogonalised matrix: the optimizer's own, so that splits of fused matrices,
            coefficients and tensor parallel modes are its own. May be a collective of the tensor parallel group, whose
            ranks must then call in the same order. It should work in full float32: Newton-Schulz in bfloat16 answers
            small errors with rounding noise, which is no property of the error.
    """

    start: int
    end: int
    shape: tuple[int, int]
    momentum_buffer: torch.Tensor
    step: int
    momentum: float
    nesterov: bool
    orthogonalize: Callable[[torch.Tensor], torch.Tensor]

    def mean(self) -> torch.Tensor | None:
        """The buffer, bias corrected."""
        return None if self.step == 0 else self.momentum_buffer / (1.0 - self.momentum**self.step)

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """‖buffer‖²; there is no second moment."""
        return sum_squares(self.momentum_buffer), torch.zeros((), dtype=torch.float64)

    def direction(self, g: torch.Tensor) -> torch.Tensor:
        """See :class:`Update`. One orthogonalisation."""
        moved = torch.lerp(self.momentum_buffer, g, 1.0 - self.momentum)
        if self.nesterov:
            moved = torch.lerp(g, moved, self.momentum)
        return self.orthogonalize(moved.view(self.shape)).reshape(-1)

    def squared_drift(
        self, g: torch.Tensor, unit: torch.Tensor, scales: Sequence[float], base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`Update`. At most len(MUON_SAMPLES) of ``scales`` are evaluated, the others interpolated linearly
        in logarithms."""
        base = self.direction(g) if base is None else base
        every = np.asarray(scales, dtype=np.float64)
        order = np.argsort(every)
        chosen = order[np.unique(np.rint((len(order) - 1) * np.array(MUON_SAMPLES)).astype(int))]
        seen = torch.stack([sum_squares(self.direction(g + every[i] * unit) - base) for i in chosen])
        known, values = every[chosen], seen.cpu().numpy()
        if len(every) > len(known) and (known > 0.0).all() and (values > 0.0).all():
            drift = np.exp(np.interp(np.log(every), np.log(known), np.log(values)))
        else:
            drift = np.interp(every, known, values)
        return torch.from_numpy(drift).to(seen.device)
