"""Sums over the operands of a linear: the Triton kernels where they run, plain torch elsewhere.

A kernel reads its tensor once. Formats without a kernel (nvfp4, mxfp4, mxfp8 and variants) are summed by
:mod:`snip_megatron.sensitivity.quantization_error`, which is the kernels' reference. Triton is imported only where a
kernel is launched.
"""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.formats import TILE, resolve
from snip_megatron.numerics.quantize.kernels import has_kernels
from snip_megatron.numerics.quantize.kernels.launch import launch
from snip_megatron.numerics.quantize.reference import Rotation
from snip_megatron.precision import Format
from snip_megatron.sensitivity import quantization_error as reference
from snip_megatron.sensitivity.quantization_error import TensorSums

_PLACE_NAMES = {Format.FP8: "PLACE_8", Format.FP4: "PLACE_4", Format.FP8_TENSOR: "PLACE_WHOLE"}
_ROWS = 32
LAUNCH: dict[str, dict[str, int]] = {
    "tensor": {"num_warps": 4, "maxnreg": 168},
    "dots": {"num_warps": 4},
    "weight": {"num_warps": 8, "maxnreg": 128},
}
"""Launch options of the kernels."""


def tensor_sums(
    x: Tensor,
    formats: Sequence[str],
    *,
    stochastic: bool = False,
    amax: Tensor | None = None,
    rotations: Mapping[str, Rotation] | None = None,
    d: Tensor | None = None,
) -> TensorSums:
    """See :func:`snip_megatron.sensitivity.quantization_error.tensor_sums`."""
    places = _places(x, formats)
    if places is None:
        return reference.tensor_sums(x, formats, stochastic=stochastic, amax=amax, rotations=rotations, d=d)
    from snip_megatron.sensitivity.sums_programs import tensor_kernel

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
    from snip_megatron.sensitivity.sums_programs import dots_kernel

    M, K = x.shape
    dots = torch.empty(count, _parts(K), M, dtype=torch.float32, device=x.device)
    if x.numel():
        launch(
            dots_kernel, (_parts(K), -(-M // _ROWS)), (x, d, dots, largest), (K, x.stride(0), d.stride(0)), (M,),
            {**places, "ROWS": _ROWS}, LAUNCH["dots"],
        )  # fmt: skip
    return dots.sum(1, dtype=torch.float64)


def weight_sums(w: Tensor, formats: Sequence[str], *, amax: Tensor | None = None) -> Tensor:
    """See :func:`snip_megatron.sensitivity.quantization_error.weight_sums`."""
    places = _places(w, formats)
    if places is None:
        return reference.weight_sums(w, formats, amax=amax)
    from snip_megatron.sensitivity.sums_programs import weight_kernel

    w = _row_major(w)
    N, K = w.shape
    sums = torch.empty(1 + len(formats), _parts(N) * _parts(K), dtype=torch.float32, device=w.device)
    if w.numel():
        tensors = (w, sums, _amax(w, places, amax))
        launch(weight_kernel, (_parts(K), _parts(N)), tensors, (N, K, w.stride(0)), (), places, LAUNCH["weight"])
    return sums.sum(1, dtype=torch.float64)


def sum_squares(x: Tensor) -> Tensor:
    """Return Σ x², 0-dim float64 on the device of ``x``. A GPU adds in FP32, and makes no copy of ``x``."""
    if not x.is_cuda:
        return reference.sum_squares(x)
    norm: Tensor = torch.linalg.vector_norm(x.detach(), dtype=torch.float32)
    return norm.double().square()


@functools.lru_cache(maxsize=64)
def sample_rows(total: int, count: int, device: torch.device | None = None) -> Tensor:
    """Return evenly spread row indices, int64 [min(total, count)]. Every layout of the same tokens gets the same ones.

    The result is cached on ``device``, because a copy to a GPU waits for all work that runs there. Do not write to it.
    """
    count = min(total, count)
    return torch.arange(count, device=device) * total // max(count, 1)


def _places(x: Tensor, formats: Sequence[str]) -> dict[str, int] | None:
    """Return the index of each kernel's format in ``formats``, −1 if it is absent.

    None if torch sums instead, because no kernel runs on the device of ``x``, or a format has none.
    """
    candidates = [resolve(fmt) for fmt in formats]
    if not has_kernels(x) or not _PLACE_NAMES.keys() >= set(candidates):
        return None
    return {name: candidates.index(fmt) if fmt in candidates else -1 for fmt, name in _PLACE_NAMES.items()}


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
