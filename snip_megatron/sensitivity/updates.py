"""The next update of AdamW, and how far an error of the gradient changes it.

ΔW = ‖u(g+δ) − u(g)‖ / ‖W‖ (how-it-works.md, Weight divergence). u is the step that the optimizer takes from its own
state, without learning rate and weight decay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from snip_megatron.sensitivity.sums import sum_squares


@dataclass(frozen=True)
class AdamWState:
    """AdamW's state, after ``step`` updates, of the elements [start, end) of a flattened local parameter.

    The moments are flat, [end − start], float32.
    """

    start: int
    end: int
    step: int
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
            exp_avg=_flat(state["exp_avg"]),
            exp_avg_sq=_flat(state["exp_avg_sq"]),
            # torch counts steps beside the moments, Apex and Transformer Engine in the parameter group.
            step=int(state.get("step", group.get("step", 0))),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
        )

    def part(self, start: int, end: int) -> AdamWState:
        """Return the state of the elements [start, end), a part of its own."""
        own = slice(start - self.start, end - self.start)
        return replace(self, start=start, end=end, exp_avg=self.exp_avg[own], exp_avg_sq=self.exp_avg_sq[own])

    def direction(self, g: torch.Tensor) -> torch.Tensor:
        """Return u(g) = m̂ / (√v̂ + ε) of the next step. Weight decay is left out: an error of g does not change it."""
        step = self.step + 1
        # 1 − β is computed in float64, as the optimizer does; from β₂ in float32 it would be off by 1e-5.
        m = torch.lerp(self.exp_avg, g, 1.0 - self.beta1)
        v = (self.exp_avg_sq * self.beta2).addcmul_(g, g, value=1.0 - self.beta2)
        denominator = (v / (1.0 - self.beta2**step)).sqrt_().add_(self.eps)
        return m.div_(1.0 - self.beta1**step).div_(denominator)

    def squared_error(self, g: torch.Tensor, unit: torch.Tensor, scales: Sequence[float]) -> torch.Tensor:
        """Return ‖u(g + ρ·unit) − u(g)‖² for each ρ in ``scales``, float64 [len(scales)]."""
        base = self.direction(g)
        return torch.stack([sum_squares(self.direction(g + rho * unit) - base) for rho in scales])


def gradient_of_a_step(g: torch.Tensor, state: AdamWState, noise: float) -> torch.Tensor:
    """Bring the gradient of the probe to the noise level of a training step's gradient.

    A probe has fewer tokens than a step, so its gradient deviates more from the mean gradient. The best available
    estimate of that mean is the optimizer's average, towards which ``g`` is interpolated. ``noise`` is sqrt(tokens
    of the probe / tokens of a step). Returns ``g`` unchanged if it is 1 or more, or before the first step.
    """
    if noise >= 1.0 or state.step == 0:
        return g
    return torch.lerp(state.exp_avg / (1.0 - state.beta1**state.step), g, noise)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` flattened, in float32, or in its dtype if that is wider."""
    return tensor.detach().reshape(-1).to(torch.promote_types(tensor.dtype, torch.float32))
