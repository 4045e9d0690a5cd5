"""How far an error of the gradient moves the weights: the real AdamW update, evaluated with and without the error.

METHOD, "Weight divergence": ΔW = ‖u(g+δ) − u(g)‖ / ‖W‖, u the update direction with the optimizer's own m and v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from snip_megatron.statistics.sums import sum_squares

if TYPE_CHECKING:
    from snip_megatron.statistics.updates import Update


@dataclass(frozen=True)
class AdamWState:
    """This rank's flat share of one parameter's optimizer state, float32 [end − start].

    Attributes:
        start, end: range in the flattened local parameter.
        exp_avg, exp_avg_sq: first and second moment.
        step: updates done so far.
        beta1, beta2, eps: hyper-parameters.
    """

    start: int
    end: int
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: int
    beta1: float
    beta2: float
    eps: float

    # -- what :class:`snip_megatron.statistics.updates.Update` asks ----------------------------------------------
    def mean(self) -> torch.Tensor | None:
        """The first moment, bias corrected: the best estimate of the mean gradient at hand; None before a step."""
        return None if self.step == 0 else self.exp_avg / (1.0 - self.beta1**self.step)

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """‖m‖² and ‖v‖², float64 scalars."""
        return sum_squares(self.exp_avg), sum_squares(self.exp_avg_sq)

    def direction(self, g: torch.Tensor) -> torch.Tensor:
        """See :func:`adamw_direction`."""
        return adamw_direction(g, self)

    def squared_drift(
        self, g: torch.Tensor, unit: torch.Tensor, scales: Sequence[float], base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :func:`squared_drift`."""
        return squared_drift(g, unit, scales, self, base)


def adamw_direction(g: torch.Tensor, state: AdamWState) -> torch.Tensor:
    """The next update of AdamW for gradient g, without learning rate and weight decay (which an error of g does not
    touch): m̂ / (√v̂ + ε)."""
    step = state.step + 1
    # 1 − β is formed in float64, as the optimizer does: from β₂ in float32 it would be off by 1e-5.
    m = torch.lerp(state.exp_avg, g, 1.0 - state.beta1)
    v = (state.exp_avg_sq * state.beta2).addcmul_(g, g, value=1.0 - state.beta2)
    denominator = (v / (1.0 - state.beta2**step)).sqrt_().add_(state.eps)
    return m.div_(1.0 - state.beta1**step).div_(denominator)


def gradient_of_a_step(g: torch.Tensor, state: Update, noise: float) -> torch.Tensor:
    """Bring the probe's gradient to the noise level of a training step's.

    The probe has fewer tokens than a step, so its gradient deviates more from the mean; the optimizer's own average is
    the best estimate of that mean at hand. ``noise`` = sqrt(tokens of the probe / tokens of a step), at most 1.
    """
    mean = state.mean() if noise < 1.0 else None
    return g if mean is None else torch.lerp(mean, g, noise)


def squared_drift(
    g: torch.Tensor, unit: torch.Tensor, scales: Sequence[float], state: AdamWState, base: torch.Tensor | None = None
) -> torch.Tensor:
    """‖u(g + ρ·unit) − u(g)‖² for each ρ in ``scales``; float64 [len(scales)].

    Args:
        g: gradient, flat float32.
        unit: the error at ρ = 1, flat float32.
        scales: values of ρ.
        state: AdamW's state of the same elements.
        base: u(g) when the caller has it already.
    """
    base = adamw_direction(g, state) if base is None else base
    return torch.stack([sum_squares(adamw_direction(g + rho * unit, state) - base) for rho in scales])
