"""The sums of ``errors.py`` as Triton kernels: same names, arguments and results, one read of the tensor.

If one of the formats has no kernel (nvfp4, mxfp4, mxfp8 and variants), the reference sums all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.formats import TILE, resolve
from snip_megatron.numerics.quantize.hadamard import Rotation
from snip_megatron.numerics.quantize.kernels.launch import launch
from snip_megatron.precision import Format
from snip_megatron.sensitivity import errors
from snip_megatron.sensitivity.errors import TensorSums
from snip_megatron.sensitivity.kernels.sums_programs import (
    dots_kernel,
    output_kernel,
    squares_kernel,
    tensor_kernel,
    weight_kernel,
)

_PLACES = {Format.FP8: "PLACE_8", Format.FP4: "PLACE_4", Format.FP8_TENSOR: "PLACE_WHOLE"}
_BLOCK = 8192
_ROW_BLOCK = 4096
_ROWS = 32
LAUNCH: dict[str, dict[str, int]] = {
    "tensor": {"num_warps": 4, "maxnreg": 168},
    "dots": {"num_warps": 4},
    "weight": {"num_warps": 8, "maxnreg": 128},
    "sums": {"num_warps": 8},
}
"""Launch options of the kernels over parts of a matrix, and of those over blocks of a row or of a flat tensor."""


def tensor_sums(
    x: Tensor,
    formats: Sequence[str],
    *,
    stochastic: bool = False,
    amax: Tensor | None = None,
    rotations: Mapping[str, Rotation] | None = None,
    d: Tensor | None = None,
) -> TensorSums:
    """See :func:`snip_megatron.sensitivity.errors.tensor_sums`."""
    places = _places(formats)
    if places is None:
        return errors.tensor_sums(x, formats, stochastic=stochastic, amax=amax, rotations=rotations, d=d)
    M, K = x.shape
    x = _row_major(x)
    k_parts, m_parts = _parts(K), _parts(M)
    rows = torch.empty(k_parts, M, dtype=torch.float32, device=x.device)
    cols = torch.empty(1 + len(formats), m_parts, K, dtype=torch.float32, device=x.device)
    error = torch.empty(len(formats), m_parts * k_parts, dtype=torch.float32, device=x.device)
    largest = _amax(x, places, amax)
    if x.numel():
        launch(
            tensor_kernel, (k_parts, m_parts), (x, rows, cols, error, largest), (K, x.stride(0)), (M,),
            {**places, "RANDOM": stochastic}, LAUNCH["tensor"],
        )  # fmt: skip
    of_cols = cols.sum(1, dtype=torch.float64)
    dots = None if d is None else _dots(x, _row_major(d), places, largest, 1 + len(formats))
    of_rows, errors_of_rows = rows.sum(0, dtype=torch.float64), error.sum(1, dtype=torch.float64)
    return TensorSums(of_rows, of_cols[0], errors_of_rows, of_cols[1:], dots)


def _dots(x: Tensor, d: Tensor, places: dict[str, int], largest: Tensor, count: int) -> Tensor:
    M, K = x.shape
    found = torch.empty(count, _parts(K), M, dtype=torch.float32, device=x.device)
    if x.numel():
        launch(
            dots_kernel, (_parts(K), -(-M // _ROWS)), (x, d, found, largest), (K, x.stride(0), d.stride(0)), (M,),
            {**places, "ROWS": _ROWS}, LAUNCH["dots"],
        )  # fmt: skip
    return found.sum(1, dtype=torch.float64)


def weight_sums(w: Tensor, formats: Sequence[str], *, amax: Tensor | None = None) -> Tensor:
    """See :func:`snip_megatron.sensitivity.errors.weight_sums`."""
    places = _places(formats)
    if places is None:
        return errors.weight_sums(w, formats, amax=amax)
    w = _row_major(w)
    N, K = w.shape
    sums = torch.empty(1 + len(formats), _parts(N) * _parts(K), dtype=torch.float32, device=w.device)
    if w.numel():
        tensors = (w, sums, _amax(w, places, amax))
        launch(weight_kernel, (_parts(K), _parts(N)), tensors, (N, K, w.stride(0)), (), places, LAUNCH["weight"])
    return sums.sum(1, dtype=torch.float64)


def output_sums(quantised: Tensor, exact: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`snip_megatron.sensitivity.errors.output_sums`."""
    R, N = quantised.shape
    g = _row_major(g)
    blocks = -(-N // _ROW_BLOCK)
    sums = torch.empty(2, blocks, R, dtype=torch.float32, device=g.device)
    if quantised.numel():
        tensors = (quantised.contiguous(), exact.contiguous(), g, sums)
        launch(output_kernel, (R, blocks), tensors, (N, g.stride(0)), (), {"BLOCK": _ROW_BLOCK}, LAUNCH["sums"])
    return sums[0].sum(0, dtype=torch.float64), sums[1].sum(dtype=torch.float64)


def sum_squares(x: Tensor) -> Tensor:
    """Return Σ x² in one read, float64 0-dim: in FP32 within blocks of 8192 elements, in float64 over blocks."""
    x = x.reshape(-1)
    blocks = -(-x.numel() // _BLOCK)
    sums = torch.empty(blocks, dtype=torch.float32, device=x.device)
    if blocks:
        group = 1 if x.numel() % 16 else 16
        constants = {"BLOCK": _BLOCK, "GROUP": group}
        launch(squares_kernel, (blocks, 1), (x, sums), (), (x.numel() // group,), constants, LAUNCH["sums"])
    return sums.sum(dtype=torch.float64)


def _places(formats: Sequence[str]) -> dict[str, int] | None:
    """Return the place of each kernel's format among ``formats``, −1 if it is not there. None if one has no kernel."""
    known = [resolve(fmt) for fmt in formats]
    if not _PLACES.keys() >= set(known):
        return None
    return {name: known.index(fmt) if fmt in known else -1 for fmt, name in _PLACES.items()}


def _amax(x: Tensor, places: dict[str, int], amax: Tensor | None) -> Tensor:
    """Return the amax of the whole tensor, FP32 [1]. If no format needs it, returns x, an unused pointer."""
    if places["PLACE_WHOLE"] < 0:
        return x
    return (torch.linalg.vector_norm(x, float("inf")) if amax is None else amax).to(torch.float32).reshape(1)


def _row_major(x: Tensor) -> Tensor:
    x = x.detach()
    return x if x.stride(1) == 1 else x.contiguous()


def _parts(size: int) -> int:
    return -(-size // TILE)
