"""Sums over one operand of a linear: its squares and the squared errors of candidate formats, in plain torch.

``sums.py`` has Triton kernels of some, with the same names and results. Where training rounds stochastically, a squared
error is its expectation over the draws. It depends on the values alone, so all layouts find the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snip_megatron.numerics.quantize import fake_quantize, quantize
from snip_megatron.numerics.quantize.formats import SPECS, STOCHASTIC, resolve
from snip_megatron.numerics.quantize.reference import Rotation, of_elements, rotate_operand
from snip_megatron.numerics.quantize.rounding import spacing
from snip_megatron.precision import Gemm


@dataclass(frozen=True)
class TensorSums:
    """Sums of x [R, C] and F formats, float64."""

    # rows, cols: Σ_c x² [R] and Σ_r x² [C]
    rows: Tensor
    cols: Tensor
    row_errors: Tensor  # Σ (Q(x) − x)² with tiles along C, [F]
    # Σ_r (Q(x) − x)² with tiles along R, [F, C]; of the transformed x where the format transforms it
    col_errors: Tensor
    # Σ_c d·x, then Σ_c d·(Q(x) − x) of each format with tiles along C, [1 + F, R]. None without d
    dots: Tensor | None = None


def tensor_sums(
    x: Tensor,
    formats: Sequence[str],
    *,
    stochastic: bool = False,
    amax: Tensor | None = None,
    rotations: Mapping[str, Rotation] | None = None,
    d: Tensor | None = None,
) -> TensorSums:
    """Sum over an activation or a gradient x, FP32, bf16 or fp16 [R, C], tokens by features.

    Args:
        formats: candidate formats. A variant gets zeros for a GEMM that cannot run in it.
        stochastic: whether x is a gradient, which some formats round stochastically.
        amax: max|·| (0-dim) of the tensor that x is a shard of, for formats with one scale per tensor. Default: that of
            x.
        rotations: how formats with a Hadamard transform transform x, by default without sign changes. Their errors are
            those of the transformed tensor, whose norms are the same.
        d: any floating dtype [R, C]. The inner products of its rows with x and with errors of x, rounded to nearest,
            are summed as well if d is given.

    Raises SnipError if a format, the dtype or the number of dimensions is not supported.
    """
    first = Gemm.DGRAD if stochastic else Gemm.FPROP
    none = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    rows, cols, dots = [], [], [] if d is None else [(d * x.float()).sum(1, dtype=torch.float64)]
    for fmt in formats:
        row = col = none
        if first in resolve(fmt).gemms:
            row = squared_errors(x, fmt, stochastic=stochastic, amax=amax)
        if Gemm.WGRAD in resolve(fmt).gemms:
            operand, whole = rotate_operand(x, fmt, 0, (rotations or {}).get(fmt), amax)
            col = squared_errors(operand, fmt, axis=0, stochastic=stochastic, amax=whole)
        rows.append(row.sum(dtype=torch.float64))
        cols.append(col.sum(0, dtype=torch.float64))
        if d is not None:
            error = fake_quantize(x, fmt, tensor_amax=amax) - x.float() if first in resolve(fmt).gemms else none
            dots.append((d * error).sum(1, dtype=torch.float64))
    products = None if d is None else torch.stack(dots)
    return TensorSums(sum_squares(x, 1), sum_squares(x, 0), torch.stack(rows), torch.stack(cols), products)


def weight_sums(w: Tensor, formats: Sequence[str], *, amax: Tensor | None = None) -> Tensor:
    """Return ‖W‖² and ‖Q(W) − W‖² of each format in blocks, float64 [1 + F]. Arguments as of :func:`tensor_sums`."""
    sums = [sum_squares(w)]
    for fmt in formats:
        if Gemm.FPROP in resolve(fmt).gemms:
            sums.append(squared_errors(w, fmt, block=True, amax=amax).sum(dtype=torch.float64))
        else:  # a format of wgrad alone, which reads no weight
            sums.append(torch.zeros_like(sums[0]))
    return torch.stack(sums)


def sum_squares(x: Tensor, dim: int | None = None) -> Tensor:
    """Return Σ x², accumulated in float64, over everything or over ``dim``; float64, on the device of ``x``."""
    return x.float().square().sum(dim, dtype=torch.float64)


def output_sums(quantised: Tensor, exact: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return G_t·E_t of every row [R] and ‖E‖² (0-dim), float64, where E = ``quantised`` − ``exact``, FP32 [R, N]."""
    error = quantised - exact
    return (error * g).sum(1, dtype=torch.float64), sum_squares(error)


def squared_errors(
    x: Tensor, fmt: str, *, axis: int = -1, block: bool = False, stochastic: bool = False, amax: Tensor | None = None
) -> Tensor:
    """Return (Q(x) − x)² of every element, FP32 [R, C]; its expectation if rounding is stochastic.

    ``axis`` and ``block`` are those of :func:`snip_megatron.numerics.quantize.fake_quantize`, ``amax`` is its
    ``tensor_amax``. In formats with a Hadamard transform ``x`` is transformed already.
    """
    if not (stochastic and resolve(fmt) in STOCHASTIC):
        return (fake_quantize(x, fmt, axis=axis, block=block, tensor_amax=amax) - x.float()).square()
    q = quantize(x, fmt, axis=axis, block=block, tensor_amax=amax)
    scale = of_elements(q.scale, q.tile, q.values.shape)
    element = SPECS[resolve(fmt)].element
    y = x.float() / scale
    inside = y.clamp(-element.maximum, element.maximum)
    # With neighbours at distances d and s − d, the expectation is (1 − d/s)·d² + (d/s)·(s − d)² = d·(s − d).
    distance = (q.values - inside).abs()
    error = distance * (spacing(inside, element) - distance) + (inside - y).square()
    # A tile whose stored scale underflows becomes zero.
    return torch.where(scale == 0, x.float().square(), error * scale.square())
