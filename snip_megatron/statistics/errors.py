"""Sums over one operand of a linear: its squares and the squared errors of candidate formats. Plain torch; the kernels
of ``triton_sums.py`` have the same names and results.

Where training rounds stochastically, the error is its expectation over the draws: no seed enters, and nothing but the
numbers themselves decides, so that every layout finds the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from snip_megatron.quantization import FOUR_BIT, fake_quantize, quantize
from snip_megatron.quantization.formats import SPECS, Element, resolve
from snip_megatron.statistics.sums import sum_squares


@dataclass(frozen=True)
class TensorSums:
    """Of x [R, C] and F formats; float64.

    Attributes:
        rows, cols: Σ_c x² [R] and Σ_r x² [C].
        row_errors: Σ (Q(x) − x)² [F], tiles along C.
        col_errors: Σ_r (Q(x) − x)² [F, C], tiles along R.
        dots: Σ_c d·x, then Σ_c d·(Q(x) − x) with tiles along C, [1 + F, R]; None without d.
    """

    rows: Tensor
    cols: Tensor
    row_errors: Tensor
    col_errors: Tensor
    dots: Tensor | None = None


def tensor_sums(
    x: Tensor,
    formats: Sequence[str],
    *,
    stochastic: bool = False,
    amax: Tensor | None = None,
    d: Tensor | None = None,
) -> TensorSums:
    """Sums over an activation or a gradient.

    Args:
        x: fp32, bf16 or fp16 [R, C], tokens by features.
        formats: names of candidate formats.
        stochastic: x is a gradient: four-bit formats round it stochastically.
        amax: max|·| (0-dim) of the tensor that x is a shard of, for formats that scale by it; default: that of x.
        d: any floating dtype [R, C]; with it the rows' inner products with x and its errors (rounded to nearest).

    Raises:
        SnipError: a format that cannot be quantised to, another dtype or number of dimensions.
    """
    of = partial(squared_errors, x, stochastic=stochastic, amax=amax)
    rows = [of(fmt).sum(dtype=torch.float64) for fmt in formats]
    cols = [of(fmt, axis=0).sum(0, dtype=torch.float64) for fmt in formats]
    dots = None if d is None else torch.stack([_dots(d, x.float()), *(_dots(d, _error(x, f, amax)) for f in formats)])
    return TensorSums(sum_squares(x, 1), sum_squares(x, 0), torch.stack(rows), torch.stack(cols), dots)


def _error(x: Tensor, fmt: str, amax: Tensor | None) -> Tensor:
    return fake_quantize(x, fmt, tensor_amax=amax) - x.float()


def _dots(d: Tensor, x: Tensor) -> Tensor:
    return (d * x).sum(1, dtype=torch.float64)


def weight_sums(w: Tensor, formats: Sequence[str], *, amax: Tensor | None = None) -> Tensor:
    """‖W‖² and each format's ‖Q(W) − W‖² in blocks: float64 [1 + F]. Arguments as of :func:`tensor_sums`."""
    errors = [squared_errors(w, fmt, block=True, amax=amax).sum(dtype=torch.float64) for fmt in formats]
    return torch.stack([sum_squares(w), *errors])


def output_sums(quantised: Tensor, exact: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """G_t·E_t of every row [R] and ‖E‖² (0-dim), float64, of E = ``quantised`` − ``exact``.

    Args:
        quantised, exact: FP32 [R, N].
        g: any floating dtype [R, N].
    """
    error = quantised - exact
    return (error * g).sum(1, dtype=torch.float64), sum_squares(error)


def squared_errors(
    x: Tensor,
    fmt: str,
    *,
    axis: int = -1,
    block: bool = False,
    stochastic: bool = False,
    amax: Tensor | None = None,
) -> Tensor:
    """(Q(x) − x)² element by element, FP32 [R, C]; of stochastic rounding the expectation.

    ``axis`` and ``block`` as in :func:`snip_megatron.quantization.fake_quantize`, ``amax`` as its ``tensor_amax``.
    """
    if not (stochastic and fmt in FOUR_BIT):
        return (fake_quantize(x, fmt, axis=axis, block=block, tensor_amax=amax) - x.float()).square()
    q = quantize(x, fmt, axis=axis, block=block, tensor_amax=amax)
    scale = q.scale.repeat_interleave(q.tile[0], 0)[: x.shape[0]].repeat_interleave(q.tile[1], 1)[:, : x.shape[1]]
    element = SPECS[resolve(fmt)].element
    y = x.float() / scale
    inside = y.clamp(-element.maximum, element.maximum)
    # Between two neighbours s apart, one of them d away: (1 − d/s)·d² + (d/s)·(s − d)².
    distance = (q.values - inside).abs()
    error = distance * (_spacing(inside, element) - distance) + (inside - y).square()
    # A tile whose stored scale underflows becomes zero.
    return torch.where(scale == 0, x.float().square(), error * scale.square())


def _spacing(y: Tensor, element: Element) -> Tensor:
    """The distance between neighbours in ``element`` at each FP32 y: a power of two."""
    exponent = torch.frexp(y.abs().clamp(min=2.0**element.min_exponent)).exponent - 1 - element.mantissa_bits
    return torch.ldexp(torch.ones_like(y), exponent)
