"""Update error of one parameter on one rank, for gradient errors of given sizes.

Source: how-it-works.md, Weight divergence, steps 5 and 6. The size of an element's error follows from the norms of its
row and its column. A single σ for the whole matrix would overstate the update error, because elements with v ≈ 0 would
get too large an error. Signs are random and belong to the global element, so that every sharding draws the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from snip_megatron.numerics.quantize.device_keys import has_kernels
from snip_megatron.sensitivity.errors import sum_squares
from snip_megatron.sensitivity.recorder import LinearRecorder
from snip_megatron.sensitivity.signs import Words, error_signs
from snip_megatron.sensitivity.signs import words as sign_words
from snip_megatron.sensitivity.table import RHO_GRID
from snip_megatron.sensitivity.updates import AdamWState, Update, gradient_of_a_step

if TYPE_CHECKING:
    from snip_megatron.sensitivity.kernels.update_error import ErrorSizes


@dataclass(frozen=True)
class StepScale:
    """Factors that bring the sums of a probe of ``tokens`` to the gradient that the optimizer sees in a training step.

    ``gradient`` brings recorded G to ∂L/∂Y of the mean token loss, ``clip`` is that of the last step's clipping.
    """

    gradient: float
    clip: float
    tokens: int
    tokens_per_step: int

    @property
    def variance(self) -> float:
        """Variance of a step's gradient by token noise, divided by that of the probe's gradient."""
        return self.tokens / self.tokens_per_step


def linear_update_error(
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
    words: Words = sign_words,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's share of a linear's ``drift2`` and ``wdrift2`` (``statistics/table.py``), float64: the squared
    update errors of the elements [start, end) of its local weight.

    The ``recorder`` is that of the linear after :func:`sensitivity.reduction.reduce_columns`; ``gradient``
    the local main gradient [N local, K local], summed over data parallel ranks, in recorded units; ``state`` the
    optimizer's update of the elements; ``s2``, ``x2`` and ``g2`` reduced entries of the table (global, in its units);
    ``seed`` that of the random signs, whose ``words`` the kernel takes; ``tokens`` the number that the linear saw, by
    default all of the probe.
    """
    handle = recorder.handle
    x_cols, g_cols, dx_cols, dg_cols = recorder.x_cols, recorder.g_cols, recorder.dx_cols, recorder.dg_cols
    tokens = scale.tokens if tokens is None else max(tokens, 1.0)
    power = scale.gradient**2 * scale.variance / tokens
    # The outer product of column norms gives the relative sizes; it is scaled to the norm Σ_t ‖G_t‖²‖X_t‖².
    rescale = s2 * tokens / (g2 * x2) if g2 > 0 and x2 > 0 else 0.0
    if isinstance(state, AdamWState) and _has_kernel(gradient):
        return _linear_by_kernel(recorder, gradient, state, scale, power, rescale, seed, words)

    elements = slice(state.start, state.end)
    z = error_signs(seed, handle.out_features, handle.in_features).view(-1)[elements]
    g = _gradient(gradient, state, scale)
    base = state.direction(g)
    per_token = torch.outer(g_cols, x_cols).view(-1)[elements] * power
    unit = (per_token * rescale).sqrt().float() * (z * scale.clip)
    drift2 = state.squared_error(g, unit, RHO_GRID.tolist(), base)

    wdrift2 = []
    for dx, dg in zip(dx_cols, dg_cols, strict=True):
        variance = (torch.outer(dg, x_cols) + torch.outer(g_cols, dx)).view(-1)[elements] * power
        wdrift2.append(state.squared_error(g, variance.sqrt().float() * (z * scale.clip), [1.0], base)[0])
    return drift2, torch.stack(wdrift2)


def _has_kernel(gradient: torch.Tensor) -> bool:
    return has_kernels(gradient) and gradient.numel() < 2**31 - 2**16  # the kernel's indices have 32 bits


def _linear_by_kernel(
    recorder: LinearRecorder,
    gradient: torch.Tensor,
    state: AdamWState,
    scale: StepScale,
    power: float,
    rescale: float,
    seed: int,
    words: Words,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Evaluate :func:`linear_update_error` of AdamW on a GPU: one read of g, m and v serves all errors."""
    from snip_megatron.sensitivity.kernels.update_error import ErrorSizes

    handle = recorder.handle
    x_cols, g_cols, dx_cols, dg_cols = recorder.x_cols, recorder.g_cols, recorder.dx_cols, recorder.dg_cols
    seen = power * scale.clip**2
    sizes = ErrorSizes(
        seed=seed,
        rows=handle.out_features,
        cols=handle.in_features,
        unit_rows=(g_cols * (seen * rescale)).sqrt(),
        unit_cols=x_cols.sqrt(),
        var_rows=torch.cat([g_cols[None], dg_cols]) * seen,
        var_cols=torch.cat([x_cols[None], dx_cols]),
    )
    return _kernel_sums(gradient, state, scale, sizes, words)


def _kernel_sums(
    gradient: torch.Tensor, state: AdamWState, scale: StepScale, sizes: ErrorSizes, words: Words
) -> tuple[torch.Tensor, torch.Tensor]:
    from snip_megatron.sensitivity.kernels.update_error import error_sums

    own = gradient.reshape(-1)[state.start : state.end]
    factor, noise = scale.gradient * scale.clip, scale.variance**0.5
    return error_sums(own, state, sizes, RHO_GRID.tolist(), factor=factor, noise=noise, words=words)


def sink_update_error(
    gradient: torch.Tensor, state: Update, scale: StepScale, *, seed: int, first_row: int, words: Words = sign_words
) -> torch.Tensor:
    """Return the squared update error over the ρ grid of a parameter that is no linear, float64 [len(RHO_GRID)].

    An error of relative size ρ gives each element ρ times the root mean square of its row: the row of a token in the
    embedding, or the whole weight of a norm. A row without gradient gets no error. ``gradient`` is the reduced local
    main gradient in recorded units, any shape; ``first_row`` the global index of its first row. The others are those of
    :func:`linear_update_error`.
    """
    matrix = gradient.reshape(1, -1) if gradient.dim() < 2 else gradient.reshape(gradient.shape[0], -1)
    rms = (sum_squares(matrix, 1) / matrix.shape[1]).sqrt().float() * abs(scale.gradient) * scale.variance**0.5
    rows = torch.arange(first_row, first_row + matrix.shape[0], device=gradient.device)
    cols = torch.arange(matrix.shape[1], device=gradient.device)
    if isinstance(state, AdamWState) and _has_kernel(gradient):
        from snip_megatron.sensitivity.kernels.update_error import ErrorSizes

        sizes = ErrorSizes(seed, rows, cols, rms.double() * scale.clip, torch.ones_like(cols, dtype=torch.float64))
        return _kernel_sums(gradient, state, scale, sizes, words)[0]
    z = error_signs(seed, rows, cols)
    elements = slice(state.start, state.end)
    unit = (rms[:, None] * z).view(-1)[elements] * scale.clip
    return state.squared_error(_gradient(gradient, state, scale), unit, RHO_GRID.tolist())


def _gradient(gradient: torch.Tensor, state: Update, scale: StepScale) -> torch.Tensor:
    """Return this rank's elements of the gradient that a training step would give its optimizer, flat float32."""
    own = gradient.reshape(-1)[state.start : state.end].float() * (scale.gradient * scale.clip)
    return gradient_of_a_step(own, state, scale.variance**0.5)
