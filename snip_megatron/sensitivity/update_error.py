"""The next update of AdamW, and how far gradient errors of given sizes change it, for one parameter on one rank.

ΔW = ‖u(g+δ) − u(g)‖ / ‖W‖ (how-it-works.md, Weight divergence). u is the step that the optimizer takes from its own
state, without learning rate and weight decay.

The size of an element's error is a product of a factor of its row and one of its column, or a sum of two such products
(docs/how-it-works.md, recipe, steps 5 and 6). A single σ for the whole matrix would give elements with v ≈ 0 too large
an error. Signs are random and belong to the global element, so that every sharding draws the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.rounding import random_bits
from snip_megatron.sensitivity import quantization_error
from snip_megatron.sensitivity.recorder import LinearRecorder
from snip_megatron.sensitivity.sums import sum_squares
from snip_megatron.sensitivity.table import RHO_GRID

_ELEMENTS = 2**24  # that are evaluated at once, in about ten FP32 tensors of their size


# -- the next update -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class AdamWState:
    """AdamW's state, after ``step`` updates, of the elements [start, end) of a flattened local parameter."""

    start: int
    end: int
    step: int
    exp_avg: torch.Tensor  # float32 [end − start], as the other moment
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
        """Return the state of the elements [start, end), which must be a part of this state's."""
        place = slice(start - self.start, end - self.start)
        return replace(self, start=start, end=end, exp_avg=self.exp_avg[place], exp_avg_sq=self.exp_avg_sq[place])

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


# -- errors of given sizes -------------------------------------------------------------------------------------
def error_signs(seed: int, rows: Tensor, cols: Tensor) -> Tensor:
    """Return ±1 with equal probability, float32 [len(rows), len(cols)]: the signs of :func:`random_bits`."""
    return (random_bits(seed, rows, cols) >> 31).mul_(2).add_(1).to(torch.float32)


@dataclass(frozen=True)
class StepScale:
    """Factors that bring the sums of a probe to the gradient that the optimizer sees in a training step."""

    gradient: float  # brings recorded G to ∂L/∂Y of the mean token loss
    clip: float  # of the last step's clipping
    tokens: int  # of the probe
    tokens_per_step: int

    @property
    def variance(self) -> float:
        """Variance of a step's gradient by token noise, divided by that of the probe's gradient."""
        return self.tokens / self.tokens_per_step


Factors = tuple[Tensor, Tensor]  # factors of the rows and of the columns of a matrix, whose outer product it is


def _error_sums(
    gradient: Tensor,
    state: AdamWState,
    scale: StepScale,
    seed: int,
    ids: tuple[Tensor, Tensor],
    unit: Factors,
    variances: Factors | None = None,
) -> tuple[Tensor, Tensor]:
    """Return Σ (u(g + δ) − u(g))² over this rank's elements, at each ρ of the grid and of each candidate, float64.

    Args:
        gradient: the local main gradient in recorded units, any shape.
        state: the optimizer's update of this rank's elements.
        scale: scales of the gradient.
        seed: seed of the signs.
        ids: global ids of rows [N] and columns [K], to which the signs belong.
        unit: float64 factors [N], [K]. Their product is the size of an element's error at ρ = 1.
        variances: float64 factors [1 + F, N], [1 + F, K]. The error of candidate f has the variance
            rows[f]·cols[0] + rows[0]·cols[f]. None if there are no candidates.
    """
    device, flat = gradient.device, gradient.reshape(-1)
    rows, cols = (each.to(device) for each in ids)
    unit_rows, unit_cols = _in_fp32(unit)
    var_rows, var_cols = (flat.new_empty(1, 0),) * 2 if variances is None else _in_fp32(variances)
    drift2 = torch.zeros(len(RHO_GRID), dtype=torch.float64, device=device)
    candidates = torch.zeros(len(var_rows) - 1, dtype=torch.float64, device=device)
    for start in range(state.start, state.end, _ELEMENTS):
        part = state.part(start, min(start + _ELEMENTS, state.end))
        part_rows = slice(part.start // len(cols), -(-part.end // len(cols)))
        first = part_rows.start * len(cols)

        def of_part(matrix: Tensor, begin: int = part.start - first, end: int = part.end - first) -> Tensor:
            return matrix.view(-1)[begin:end]

        z = of_part(error_signs(seed, rows[part_rows], cols))
        g = flat[part.start : part.end].float() * (scale.gradient * scale.clip)
        g = gradient_of_a_step(g, part, scale.variance**0.5)
        drift2 += part.squared_error(g, of_part(torch.outer(unit_rows[part_rows], unit_cols)) * z, RHO_GRID.tolist())
        for f in range(1, len(var_rows)):
            variance = torch.outer(var_rows[f, part_rows], var_cols[0]) + torch.outer(
                var_rows[0, part_rows], var_cols[f]
            )
            candidates[f - 1] += part.squared_error(g, of_part(variance).sqrt() * z, [1.0])[0]
    return drift2, candidates


def _in_fp32(factors: Factors) -> Factors:
    """Return factors in FP32, those of columns at most 1, which keeps products in the range of FP32."""
    rows, cols = factors
    largest = cols.amax().clamp(min=torch.finfo(torch.float64).tiny)
    return (rows * largest).float(), (cols / largest).float()


# -- linears and other parameters ------------------------------------------------------------------------------
def linear_update_error(
    recorder: LinearRecorder,
    gradient: Tensor,
    state: AdamWState,
    scale: StepScale,
    *,
    s2: float,
    x2: float,
    g2: float,
    seed: int,
    tokens: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return this rank's share of a linear's ``drift2`` and ``wdrift2`` (table.py), float64.

    They are the squared update errors of the elements [start, end) of its local weight.

    Args:
        recorder: that of the linear, after :func:`snip_megatron.sensitivity.reduction.reduce_columns`.
        gradient: the local main gradient [N local, K local], summed over data parallel ranks, in recorded units.
        state: the optimizer's update of the elements.
        s2, x2, g2: reduced entries of the table, global and in its units.
        seed: seed of the random signs.
        tokens: tokens that the linear saw, by default all of the probe.
    """
    tokens = scale.tokens if tokens is None else max(tokens, 1.0)
    # The outer product of column norms gives the relative sizes; it is scaled to the norm Σ_t ‖G_t‖²‖X_t‖².
    rescale = s2 * tokens / (g2 * x2) if g2 > 0 and x2 > 0 else 0.0
    power = scale.gradient**2 * scale.variance / tokens * scale.clip**2
    ids = recorder.handle.out_features, recorder.handle.in_features
    unit = (recorder.g_cols * (power * rescale)).sqrt(), recorder.x_cols.sqrt()
    of_rows = torch.cat([recorder.g_cols[None], recorder.dg_cols]) * power
    of_cols = torch.cat([recorder.x_cols[None], recorder.dx_cols])
    return _error_sums(gradient, state, scale, seed, ids, unit, (of_rows, of_cols))


def sink_update_error(gradient: Tensor, state: AdamWState, scale: StepScale, *, seed: int, first_row: int) -> Tensor:
    """Return the squared update error over the ρ grid of a parameter that is no linear, float64 [len(RHO_GRID)].

    An error of relative size ρ gives each element ρ times the root mean square of its row: the row of a token in the
    embedding, or the whole weight of a norm. A row without gradient gets no error.

    Args:
        gradient: the local main gradient of any shape, summed over data parallel ranks, in recorded units.
        first_row: global index of its first row.

    The other arguments are those of :func:`linear_update_error`.
    """
    matrix = gradient.reshape(1, -1) if gradient.dim() < 2 else gradient.reshape(gradient.shape[0], -1)
    row_squares = quantization_error.sum_squares(matrix, 1)
    rms = (row_squares / matrix.shape[1]).sqrt().float() * abs(scale.gradient) * scale.variance**0.5
    rows = torch.arange(first_row, first_row + matrix.shape[0], device=gradient.device)
    cols = torch.arange(matrix.shape[1], device=gradient.device)
    unit = rms.double() * scale.clip, torch.ones_like(cols, dtype=torch.float64)
    return _error_sums(gradient, state, scale, seed, (rows, cols), unit)[0]
