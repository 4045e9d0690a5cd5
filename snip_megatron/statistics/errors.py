"""Sums over one operand of a linear: its squares and the squared errors of candidate formats, in plain torch.

``kernels/sums.py`` has Triton kernels with the same names and results. Where training rounds stochastically, a squared
error is its expectation over the draws. It depends on the values alone, so all layouts find the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snip_megatron.precision import Gemm
from snip_megatron.quantization import Quantized, fake_quantize, quantize
from snip_megatron.quantization.formats import E4M3, SPECS, STOCHASTIC, resolve
from snip_megatron.quantization.hadamard import Rotation, turned
from snip_megatron.quantization.rounding import spacing
from snip_megatron.statistics.squares import squares


@dataclass(frozen=True)
class TensorSums:
    """Sums of x [R, C] and F formats, float64.

    Attributes:
        rows, cols: Σ_c x² [R] and Σ_r x² [C].
        row_errors: Σ (Q(x) − x)² with tiles along C, [F].
        col_errors: Σ_r (Q(x) − x)² with tiles along R, [F, C]; of the transformed x where the format transforms it.
        dots: Σ_c d·x, then Σ_c d·(Q(x) − x) of each format with tiles along C, [1 + F, R]. None without d.
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
    rotations: Mapping[str, Rotation] | None = None,
    d: Tensor | None = None,
) -> TensorSums:
    """Sum over an activation or a gradient.

    Args:
        x: fp32, bf16 or fp16 [R, C], tokens by features.
        formats: names of candidate formats. A variant gets zeros for a GEMM that cannot run in it.
        stochastic: whether x is a gradient, which some formats round stochastically.
        amax: max|·| (0-dim) of the tensor that x is a shard of, for formats with one scale per tensor. Default: that of
            x.
        rotations: how formats with a Hadamard transform transform x; None: with the key 0. Their errors are those of
            the transformed tensor, whose norms are the same.
        d: any floating dtype [R, C]. If given, the inner products of its rows with x and with errors of x, rounded to
            nearest, are summed as well.

    Raises:
        SnipError: a format, the dtype or the number of dimensions is not supported.
    """
    known = rotations or {}
    of_rows = torch.stack([_row_error(x, fmt, stochastic, amax, known.get(fmt)) for fmt in formats])
    of_cols = torch.stack([_col_errors(x, fmt, stochastic, amax, known.get(fmt)) for fmt in formats])
    dots = None
    if d is not None:
        dots = torch.stack([_dots(d, x.float()), *(_error_dots(d, x, fmt, stochastic, amax) for fmt in formats)])
    return TensorSums(squares(x, 1), squares(x, 0), of_rows, of_cols, dots)


def _takes(fmt: str, *gemms: Gemm) -> bool:
    """Whether one of ``gemms`` may run in a format."""
    return not set(gemms).isdisjoint(resolve(fmt).gemms)


def _takes_rows(fmt: str, gradient: bool) -> bool:
    return _takes(fmt, Gemm.DGRAD if gradient else Gemm.FPROP)


def _row_error(x: Tensor, fmt: str, stochastic: bool, amax: Tensor | None, rotation: Rotation | None) -> Tensor:
    if not _takes_rows(fmt, stochastic):
        return torch.zeros((), dtype=torch.float64, device=x.device)
    return _turned_errors(x, fmt, 1, rotation, amax, stochastic=stochastic).sum(dtype=torch.float64)


def _col_errors(x: Tensor, fmt: str, stochastic: bool, amax: Tensor | None, rotation: Rotation | None) -> Tensor:
    if not _takes(fmt, Gemm.WGRAD):
        return torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    return _turned_errors(x, fmt, 0, rotation, amax, stochastic=stochastic).sum(0, dtype=torch.float64)


def _error_dots(d: Tensor, x: Tensor, fmt: str, stochastic: bool, amax: Tensor | None) -> Tensor:
    if not _takes_rows(fmt, stochastic):
        return torch.zeros(x.shape[0], dtype=torch.float64, device=x.device)
    return _dots(d, fake_quantize(x, fmt, tensor_amax=amax) - x.float())


def _dots(d: Tensor, x: Tensor) -> Tensor:
    return (d * x).sum(1, dtype=torch.float64)


def weight_sums(
    w: Tensor,
    formats: Sequence[str],
    *,
    amax: Tensor | None = None,
    rotations: Mapping[str, Rotation] | None = None,
) -> Tensor:
    """Return ‖W‖² and ‖Q(W) − W‖² of each format in blocks, float64 [1 + F]. Arguments as of :func:`tensor_sums`.

    A format that fprop cannot run in has tiles along the rows, over which dgrad reduces.
    """
    known = rotations or {}
    errors = [_weight_error(w, fmt, amax, known.get(fmt)) for fmt in formats]
    return torch.stack([squares(w), *errors])


def _weight_error(w: Tensor, fmt: str, amax: Tensor | None, rotation: Rotation | None) -> Tensor:
    if not _takes(fmt, Gemm.FPROP, Gemm.DGRAD):
        return torch.zeros((), dtype=torch.float64, device=w.device)
    axis = 1 if _takes(fmt, Gemm.FPROP) else 0
    return _turned_errors(w, fmt, axis, rotation, amax, weight=True).sum(dtype=torch.float64)


def _turned_errors(
    x: Tensor,
    fmt: str,
    axis: int,
    rotation: Rotation | None,
    amax: Tensor | None,
    *,
    stochastic: bool = False,
    weight: bool = False,
) -> Tensor:
    """Return the squared errors of the operand, transformed if its format does so, of a GEMM that reduces over
    ``axis``.
    """
    operand, options = turned(x, fmt, axis, rotation and rotation.of(axis), amax, weight=weight)
    whole = options["tensor_amax"]
    return squared_errors(operand, fmt, axis=axis, block=weight, stochastic=stochastic, amax=whole)


def output_sums(quantised: Tensor, exact: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return G_t·E_t of every row [R] and ‖E‖² (0-dim), float64, where E = ``quantised`` − ``exact``.

    Args:
        quantised, exact: FP32 [R, N].
        g: any floating dtype [R, N].
    """
    error = quantised - exact
    return (error * g).sum(1, dtype=torch.float64), squares(error)


def squared_errors(
    x: Tensor,
    fmt: str,
    *,
    axis: int = -1,
    block: bool = False,
    stochastic: bool = False,
    amax: Tensor | None = None,
) -> Tensor:
    """Return (Q(x) − x)² of every element, FP32 [R, C]; its expectation if rounding is stochastic.

    ``axis`` and ``block`` are those of :func:`snip_megatron.quantization.fake_quantize`, ``amax`` is its
    ``tensor_amax``. In formats with a Hadamard transform ``x`` is transformed already. nvfp4_eden rounds the scales of
    every operand stochastically.
    """
    if SPECS[resolve(fmt)].eden:
        return _eden_errors(x, quantize(x, fmt, axis=axis, block=block, rounding="mean", tensor_amax=amax))
    if not (stochastic and resolve(fmt) in STOCHASTIC):
        return (fake_quantize(x, fmt, axis=axis, block=block, tensor_amax=amax) - x.float()).square()
    q = quantize(x, fmt, axis=axis, block=block, tensor_amax=amax)
    scale = _of_elements(q.scale, q)
    element = SPECS[resolve(fmt)].element
    y = x.float() / scale
    inside = y.clamp(-element.maximum, element.maximum)
    # With neighbours at distances d and s − d, the expectation is (1 − d/s)·d² + (d/s)·(s − d)² = d·(s − d).
    distance = (q.values - inside).abs()
    error = distance * (spacing(inside, element) - distance) + (inside - y).square()
    # A tile whose stored scale underflows becomes zero.
    return torch.where(scale == 0, x.float().square(), error * scale.square())


def _eden_errors(x: Tensor, q: Quantized) -> Tensor:
    """Return the expectation of (Q(x) − x)² over the roundings of scales. ``q`` has the mean scales.

    A scale s between neighbours at distances d and h − d has the variance d·(h − d).
    """
    assert q.factors is not None
    scale, whole = q.factors
    inside = scale.clamp(max=E4M3.maximum)
    step = spacing(inside, E4M3)
    above = inside % step
    of_scale, variance = (_of_elements(each, q) for each in (inside * whole, above * (step - above) * whole.square()))
    return (q.values * of_scale - x.float()).square() + q.values.square() * variance


def _of_elements(tiles: Tensor, q: Quantized) -> Tensor:
    """Return the number of each element's tile, in the shape of ``q.values``."""
    rows, cols = q.values.shape
    return tiles.repeat_interleave(q.tile[0], 0)[:rows].repeat_interleave(q.tile[1], 1)[:, :cols]
