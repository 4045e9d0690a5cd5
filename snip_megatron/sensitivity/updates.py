"""The next update of each supported optimizer, and how far an error of the gradient changes it.

ΔW = ‖u(g+δ) − u(g)‖ / ‖W‖ (how-it-works.md, Weight divergence). u is the step that the optimizer takes from its own
state, without learning rate and weight decay. A state object covers the elements [start, end) of the flattened local
parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from snip_megatron.sensitivity.sums import sum_squares

MUON_SAMPLES = (0.0, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Positions in a sorted list of error sizes at which Muon's update error is evaluated. The others are interpolated.

Each evaluation takes one orthogonalisation. The update error is proportional to small errors, and saturates.
"""


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` flattened, in float32, or in its dtype if that is wider."""
    return tensor.detach().reshape(-1).to(torch.promote_types(tensor.dtype, torch.float32))


@dataclass(frozen=True)
class Update(ABC):
    """The next update, after ``step`` others, of the elements [start, end) of a flattened local parameter.

    All tensors are flat, [end − start], float32.
    """

    start: int
    end: int
    step: int

    @abstractmethod
    def mean(self) -> torch.Tensor | None:
        """Return the optimizer's estimate of the mean gradient. None before its first step."""

    @abstractmethod
    def direction(self, g: torch.Tensor) -> torch.Tensor:
        """Return u(g), the vector that the learning rate is multiplied by. Changes neither g nor the state."""

    def squared_error(
        self, g: torch.Tensor, unit: torch.Tensor, scales: Sequence[float], base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ‖u(g + ρ·unit) − u(g)‖² for each ρ in ``scales``, float64 [len(scales)]. ``base`` is u(g)."""
        base = self.direction(g) if base is None else base
        return torch.stack([sum_squares(self.direction(g + rho * unit) - base) for rho in scales])


def gradient_of_a_step(g: torch.Tensor, state: Update, noise: float) -> torch.Tensor:
    """Bring the gradient of the probe to the noise level of a training step's gradient.

    A probe has fewer tokens than a step, so its gradient deviates more from the mean gradient. The best available
    estimate of that mean is the optimizer's average, towards which ``g`` is interpolated. ``noise`` is sqrt(tokens
    of the probe / tokens of a step). Returns ``g`` unchanged if it is 1 or more, or before the first step.
    """
    mean = state.mean() if noise < 1.0 else None
    return g if mean is None else torch.lerp(mean, g, noise)


@dataclass(frozen=True)
class AdamWState(Update):
    """AdamW, with this rank's flat share of one parameter's state, float32."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    beta1: float
    beta2: float
    eps: float

    @classmethod
    def of(cls, group: Mapping[str, Any], state: Mapping[str, Any], start: int, end: int) -> AdamWState | None:
        """Build it from the parameter group and state of any library's AdamW. None before its first step."""
        if state.get("exp_avg") is None or state.get("exp_avg_sq") is None:
            return None
        return cls(
            start=start,
            end=end,
            exp_avg=flat(state["exp_avg"]),
            exp_avg_sq=flat(state["exp_avg_sq"]),
            # torch counts steps beside the moments, Apex and Transformer Engine in the parameter group.
            step=int(state.get("step", group.get("step", 0))),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
        )

    def mean(self) -> torch.Tensor | None:
        return None if self.step == 0 else self.exp_avg / (1.0 - self.beta1**self.step)

    def direction(self, g: torch.Tensor) -> torch.Tensor:
        """Return m̂ / (√v̂ + ε) of the next step, without weight decay, which an error of g does not change."""
        step = self.step + 1
        # 1 − β is computed in float64, as the optimizer does; from β₂ in float32 it would be off by 1e-5.
        m = torch.lerp(self.exp_avg, g, 1.0 - self.beta1)
        v = (self.exp_avg_sq * self.beta2).addcmul_(g, g, value=1.0 - self.beta2)
        denominator = (v / (1.0 - self.beta2**step)).sqrt_().add_(self.eps)
        return m.div_(1.0 - self.beta1**step).div_(denominator)


@dataclass(frozen=True)
class SgdState(Update):
    """SGD with momentum: u = μ·b + (1 − d)·g, or g + μ·u with Nesterov. Before the first step b is None and u = g."""

    momentum_buffer: torch.Tensor | None
    momentum: float
    dampening: float = 0.0
    nesterov: bool = False

    @classmethod
    def of(cls, group: Mapping[str, Any], state: Mapping[str, Any], start: int, end: int, step: int) -> SgdState:
        """Build it from the parameter group and state of any library's SGD, which does not count steps."""
        buffer = state.get("momentum_buffer")
        return cls(
            start=start,
            end=end,
            momentum_buffer=None if buffer is None else flat(buffer),
            step=step,
            momentum=float(group.get("momentum", 0.0)),
            dampening=float(group.get("dampening", 0.0)),
            nesterov=bool(group.get("nesterov", False)),
        )

    @property
    def _share(self) -> float:
        """Factor of the gradient when it enters the momentum buffer."""
        return 1.0 if self.momentum_buffer is None else 1.0 - self.dampening

    def mean(self) -> torch.Tensor | None:
        """Return the buffer divided by the sum of its weights. None if there is no momentum or no step yet."""
        if self.momentum_buffer is None or self.momentum <= 0.0 or self.step == 0:
            return None
        first = self.momentum ** (self.step - 1)  # dampening does not apply to the first gradient
        later = self.step - 1 if self.momentum == 1.0 else (1.0 - first) / (1.0 - self.momentum)
        return self.momentum_buffer / (first + (1.0 - self.dampening) * later)

    def direction(self, g: torch.Tensor) -> torch.Tensor:
        average = g * self._share
        if self.momentum_buffer is not None:
            average = average + self.momentum * self.momentum_buffer
        return g + self.momentum * average if self.nesterov else average

    def squared_error(
        self, g: torch.Tensor, unit: torch.Tensor, scales: Sequence[float], base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ρ²·‖unit‖² times the squared gain. This is exact, because u is linear in g."""
        gain = 1.0 + self.momentum * self._share if self.nesterov else self._share
        return torch.tensor(list(scales), dtype=torch.float64, device=unit.device).square() * (
            sum_squares(unit) * gain**2
        )


@dataclass(frozen=True)
class LionState(Update):
    """Lion (Chen et al. 2023): u = sign(β₁·m + (1 − β₁)·g). An error changes each element of u by 2 or not at all.

    m is a running average with β₂ that starts at zero.
    """

    exp_avg: torch.Tensor
    beta1: float
    beta2: float

    def mean(self) -> torch.Tensor | None:
        return None if self.step == 0 else self.exp_avg / (1.0 - self.beta2**self.step)

    def direction(self, g: torch.Tensor) -> torch.Tensor:
        return torch.lerp(self.exp_avg, g, 1.0 - self.beta1).sign_()


@dataclass(frozen=True)
class MuonState(Update):
    """Muon (Jordan et al. 2024): u = scale · orthogonalised momentum, of the whole matrix.

    Attributes:
        shape: [N local, K local] of the parameter.
        momentum_buffer: a running average that starts at zero.
        orthogonalize: the optimizer's own function from a matrix to its scaled, orthogonalised matrix, so that splits
            of fused matrices, coefficients and tensor parallel modes are those of training. It may be a collective of
            the tensor parallel group, whose ranks must then call it in the same order. It should work in full float32:
            Newton-Schulz iterations in bfloat16 answer small errors with rounding noise.
    """

    shape: tuple[int, int]
    momentum_buffer: torch.Tensor
    momentum: float
    nesterov: bool
    orthogonalize: Callable[[torch.Tensor], torch.Tensor]

    def mean(self) -> torch.Tensor | None:
        return None if self.step == 0 else self.momentum_buffer / (1.0 - self.momentum**self.step)

    def direction(self, g: torch.Tensor) -> torch.Tensor:
        average = torch.lerp(self.momentum_buffer, g, 1.0 - self.momentum)
        if self.nesterov:
            average = torch.lerp(g, average, self.momentum)
        return self.orthogonalize(average.view(self.shape)).reshape(-1)

    def squared_error(
        self, g: torch.Tensor, unit: torch.Tensor, scales: Sequence[float], base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`Update`. Evaluates at most len(MUON_SAMPLES) scales; others are interpolated in logarithms."""
        base = self.direction(g) if base is None else base
        sizes = np.asarray(scales, dtype=np.float64)
        order = np.argsort(sizes)
        samples = sizes[order[np.unique(np.rint((len(order) - 1) * np.array(MUON_SAMPLES)).astype(int))]]
        sampled = torch.stack([sum_squares(self.direction(g + size * unit) - base) for size in samples])
        values = sampled.cpu().numpy()
        if len(sizes) > len(samples) and (samples > 0.0).all() and (values > 0.0).all():
            errors = np.exp(np.interp(np.log(sizes), np.log(samples), np.log(values)))
        else:
            errors = np.interp(sizes, samples, values)
        return torch.from_numpy(errors).to(sampled.device)
