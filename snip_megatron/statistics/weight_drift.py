"""Weight divergence of one parameter on one rank: the drift its optimizer would show for gradient errors of known size.

METHOD, "Weight divergence" and recipe steps 5 and 6. Errors are given the element-wise size that column norms predict
(one σ for the whole matrix overstates the drift, because entries with v ≈ 0 get too much) and random signs that belong
to the global element, so that every sharding draws the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from snip_megatron.statistics.drift import AdamWState, gradient_of_a_step
from snip_megatron.statistics.recorder import LinearRecorder
from snip_megatron.statistics.signs import error_signs
from snip_megatron.statistics.sums import has_kernels, sum_squares
from snip_megatron.statistics.table import RHO_GRID
from snip_megatron.statistics.updates import Update


@dataclass(frozen=True)
class StepScale:
    """What brings the probe's sums to the gradient that the optimizer of a training step sees.

    Attributes:
        gradient: recorded G times this is ∂L/∂Y of the mean token loss.
        clip: what gradient clipping multiplied the last step's gradient by.
        tokens: T of the probe.
        tokens_per_step: tokens of a training step.
    """

    gradient: float
    clip: float
    tokens: int
    tokens_per_step: int

    @property
    def variance(self) -> float:
        """Token noise of a step's gradient over that of the probe's, squared."""
        return self.tokens / self.tokens_per_step


@dataclass(frozen=True)
class LinearDrift:
    """Shares of a linear's columns in the table; float64."""

    drift2: torch.Tensor
    wdrift2: torch.Tensor
    wsigma2: torch.Tensor
    m2: torch.Tensor
    v2: torch.Tensor


def linear_drift(
    recorder: LinearRecorder,
    gradient: torch.Tensor,
    state: Update,
    scale: StepScale,
    *,
    s2: float,
    x2: float,
    g2: float,
    seed: int,
    tokens: float | None = None,
) -> LinearDrift:
    """Evaluate this rank's elements [start, end) of the local weight.

    Args:
        recorder: after :func:`snip_megatron.statistics.reduction.reduce_columns`.
        gradient: local main gradient [N local, K local], summed over data parallel ranks, as recorded.
        state: the optimizer's update of the elements.
        scale: units.
        s2, x2, g2: the table's reduced entries (global, in units of the table).
        seed: of the random signs.
        tokens: that the linear saw; None: all of the probe's.
    """
    handle = recorder.handle
    assert recorder.x_cols is not None
    assert recorder.g_cols is not None
    assert recorder.dx_cols is not None
    assert recorder.dg_cols is not None
    tokens = scale.tokens if tokens is None else max(tokens, 1.0)
    power = scale.gradient**2 * scale.variance / tokens
    # The outer product of column norms has the right shape; its norm is brought to Σ_t ‖G_t‖²‖X_t‖².
    rescale = s2 * tokens / (g2 * x2) if g2 > 0 and x2 > 0 else 0.0
    if isinstance(state, AdamWState) and _has_kernel(gradient):
        return _linear_drift_by_kernel(recorder, gradient, state, scale, power, rescale, seed)

    elements = slice(state.start, state.end)
    z = error_signs(seed, handle.out_features, handle.in_features).view(-1)[elements]
    g = _gradient(gradient, state, scale)
    base = state.direction(g)
    per_token = torch.outer(recorder.g_cols, recorder.x_cols).view(-1)[elements] * power
    unit = (per_token * rescale).sqrt().float() * (z * scale.clip)
    drift2 = state.squared_drift(g, unit, RHO_GRID.tolist(), base)

    wdrift2, wsigma2 = [], []
    for dx_cols, dg_cols in zip(recorder.dx_cols, recorder.dg_cols, strict=True):
        variance = torch.outer(dg_cols, recorder.x_cols) + torch.outer(recorder.g_cols, dx_cols)
        variance = variance.view(-1)[elements] * power
        wsigma2.append(variance.sum())
        wdrift2.append(state.squared_drift(g, variance.sqrt().float() * (z * scale.clip), [1.0], base)[0])
    m2, v2 = state.moments()
    return LinearDrift(
        drift2=drift2,
        wdrift2=torch.stack(wdrift2),
        wsigma2=torch.stack(wsigma2),
        m2=m2,
        v2=v2,
    )


def _has_kernel(gradient: torch.Tensor) -> bool:
    return has_kernels(gradient) and gradient.numel() < 2**31 - 2**16  # its indices have 32 bits


def _linear_drift_by_kernel(
    recorder: LinearRecorder,
    gradient: torch.Tensor,
    state: AdamWState,
    scale: StepScale,
    power: float,
    rescale: float,
    seed: int,
) -> LinearDrift:
    """:func:`linear_drift` with AdamW on a GPU: every error in one read of g, m and v."""
    from snip_megatron.statistics.triton_drift import ErrorSizes, drift_sums

    handle = recorder.handle
    assert recorder.x_cols is not None
    assert recorder.g_cols is not None
    assert recorder.dx_cols is not None
    assert recorder.dg_cols is not None
    seen = power * scale.clip**2
    sizes = ErrorSizes(
        seed=seed,
        rows=handle.out_features,
        cols=handle.in_features,
        unit_rows=(recorder.g_cols * (seen * rescale)).sqrt(),
        unit_cols=recorder.x_cols.sqrt(),
        var_rows=torch.cat([recorder.g_cols[None], recorder.dg_cols]) * seen,
        var_cols=torch.cat([recorder.x_cols[None], recorder.dx_cols]),
    )
    own = gradient.reshape(-1)[state.start : state.end]
    factor, noise = scale.gradient * scale.clip, scale.variance**0.5
    sums = drift_sums(own, state, sizes, RHO_GRID.tolist(), factor=factor, noise=noise)
    m2, v2 = state.moments()
    return LinearDrift(sums.by_rho, sums.by_format, sums.error2 / scale.clip**2, m2, v2)


def sink_drift(gradient: torch.Tensor, state: Update, scale: StepScale, *, seed: int, first_row: int) -> torch.Tensor:
    """Squared drift over the ρ grid of a parameter that is no linear; float64 [len(RHO_GRID)].

    An error of relative size ρ gives each element ρ times the root mean square of its row (a token's row of the
    embedding; a norm's weight is one row): rows that got no gradient get no error.

    Args:
        gradient: local main gradient, reduced, as recorded; any shape.
        state: the optimizer's update of this rank's elements.
        scale: units.
        seed: of the random signs.
        first_row: global index of the first local row.
    """
    matrix = gradient.reshape(1, -1) if gradient.dim() < 2 else gradient.reshape(gradient.shape[0], -1)
    rms = (sum_squares(matrix, 1) / matrix.shape[1]).sqrt().float() * abs(scale.gradient) * scale.variance**0.5
    rows = torch.arange(first_row, first_row + matrix.shape[0], device=gradient.device)
    cols = torch.arange(matrix.shape[1], device=gradient.device)
    if isinstance(state, AdamWState) and _has_kernel(gradient):
        from snip_megatron.statistics.triton_drift import ErrorSizes, drift_sums

        sizes = ErrorSizes(seed, rows, cols, rms.double() * scale.clip, torch.ones_like(cols, dtype=torch.float64))
        own = gradient.reshape(-1)[state.start : state.end]
        factor, noise = scale.gradient * scale.clip, scale.variance**0.5
        return drift_sums(own, state, sizes, RHO_GRID.tolist(), factor=factor, noise=noise).by_rho
    z = error_signs(seed, rows, cols)
    elements = slice(state.start, state.end)
    unit = (rms[:, None] * z).view(-1)[elements] * scale.clip
    return state.squared_drift(_gradient(gradient, state, scale), unit, RHO_GRID.tolist())


def _gradient(gradient: torch.Tensor, state: Update, scale: StepScale) -> torch.Tensor:
    """The gradient a training step would feed its optimizer, flat float32, this rank's elements."""
    own = gradient.reshape(-1)[state.start : state.end].float() * (scale.gradient * scale.clip)
    return gradient_of_a_step(own, state, scale.variance**0.5)
