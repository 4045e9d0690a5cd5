"""The functions of ``quantization/swiglu.py`` as Triton kernels, which spare the bf16 result ways through memory."""

from typing import Any

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.formats import TILE
from snip_megatron.numerics.quantize.kernels.arguments import (
    draws_of,
    has_hopper_instructions,
    memory_of,
    parts_of,
    reads_words,
    stride_of,
    tile_output,
    widths_of,
)
from snip_megatron.numerics.quantize.kernels.launch import Seen, launch
from snip_megatron.numerics.quantize.kernels.swiglu_programs import (
    swiglu_amax_kernel,
    swiglu_gradient_amax_kernel,
    swiglu_gradient_kernel,
    swiglu_kernel,
)
from snip_megatron.numerics.quantize.operands import OperandPair, OperandSpec
from snip_megatron.precision import Format

LAUNCH: dict[str, dict[str, int]] = {
    "swiglu": {"num_warps": 8, "maxnreg": 80},
    "gradient": {"num_warps": 8, "maxnreg": 128},  # holds parts of three matrices
    "gradient of experts": {"num_warps": 16, "maxnreg": 128},  # swiglu_experts_h100_2026-11-26.txt: 17 % faster
    "swiglu, amax": {"num_warps": 16, "maxnreg": 40},
    "gradient, amax": {"num_warps": 8, "maxnreg": 128},
}
"""Launch options: the fewest registers with which the assembler spills nothing, or (gradient) little."""
_WORD = torch.int32


def fits(y: Tensor) -> bool:
    """Return whether the kernels take y [M, 2K]: bf16 that is read as words of two numbers, and whole tiles along K."""
    whole = y.stride(1) == 1 and y.shape[1] % (2 * TILE) == 0
    return y.dtype is torch.bfloat16 and whole and reads_words(y)


def quantize_swiglu(y: Tensor, spec: OperandSpec, probs: Tensor | None = None) -> OperandPair:
    """See :func:`snip_megatron.numerics.quantize.swiglu.quantize_swiglu`. Requires :func:`fits`."""
    M, K = y.shape[0], y.shape[1] // 2
    row, col = tile_output(y, spec.rowwise, M, K), tile_output(y, spec.columnwise, K, M)
    kept = y.new_empty(M, K) if Format.BF16 in spec.formats else None
    if y.numel():
        launch(
            swiglu_kernel, (parts_of(K), parts_of(M)),
            [(y, _WORD), *memory_of(row, col, y), y if probs is None else probs, _words(kept, y)],
            (M, K, stride_of(col)), (),
            {
                "y_stride": y.stride(0) // 2, "row_stride": stride_of(row) // 2, **widths_of(spec),
                "PROBS": probs is not None, "KEPT": kept is not None, "HARDWARE": has_hopper_instructions(y),
            },
            LAUNCH["swiglu"],
        )  # fmt: skip
    return kept if spec.rowwise is Format.BF16 else row, kept if spec.columnwise is Format.BF16 else col


def quantize_swiglu_gradient(
    d: Tensor, y: Tensor, spec: OperandSpec, probs: Tensor | None = None
) -> tuple[Any, Any, Tensor | None]:
    """See :func:`snip_megatron.numerics.quantize.swiglu.quantize_swiglu_gradient`. Requires :func:`fits`."""
    M, K = d.shape
    row, col = tile_output(y, spec.rowwise, M, 2 * K), tile_output(y, spec.columnwise, 2 * K, M)
    kept = y.new_empty(M, 2 * K) if Format.BF16 in spec.formats else None
    of_probs = None if probs is None else torch.empty(parts_of(K), M, dtype=torch.float32, device=y.device)
    if y.numel():
        draws = draws_of(spec, 2 * K, y)
        launch(
            swiglu_gradient_kernel, (2 * parts_of(K), parts_of(M)),
            [
                (d, _WORD), (y, _WORD), *memory_of(row, col, y), *draws.memory, y if probs is None else probs,
                y if of_probs is None else of_probs, _words(kept, y),
            ],
            (M, K, stride_of(col)), draws.words,
            {
                "d_stride": d.stride(0) // 2, "y_stride": y.stride(0) // 2, "row_stride": stride_of(row) // 2,
                **widths_of(spec), **draws.constants, "PROBS": probs is not None, "KEPT": kept is not None,
                "HARDWARE": has_hopper_instructions(y),
            },
            LAUNCH["gradient" if probs is None else "gradient of experts"],
        )  # fmt: skip
    first, second = (kept if fmt is Format.BF16 else side for fmt, side in zip(spec.formats, (row, col), strict=True))
    return first, second, None if of_probs is None else of_probs.sum(0)


def _words(matrix: Tensor | None, unused: Tensor) -> Tensor | Seen:
    """Return where a bf16 matrix is stored as words of two numbers; arbitrary memory if it is not."""
    return unused if matrix is None else (matrix, _WORD)


def swiglu_with_amax(y: Tensor, d: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See :func:`snip_megatron.numerics.quantize.swiglu.swiglu_with_amax`. Requires :func:`fits`."""
    M, K = y.shape[0], y.shape[1] // 2
    found, amax = y.new_empty(M, K if d is None else 2 * K), torch.zeros((), dtype=torch.int32, device=y.device)
    if y.numel():
        kernel, kind = (swiglu_amax_kernel, "swiglu") if d is None else (swiglu_gradient_amax_kernel, "gradient")
        given, stride = ([], {}) if d is None else ([(d, _WORD)], {"d_stride": d.stride(0) // 2})
        launch(
            kernel, (parts_of(K), parts_of(M)), [*given, (y, _WORD), (found, _WORD), amax], (M, K), (),
            {**stride, "y_stride": y.stride(0) // 2, "HARDWARE": has_hopper_instructions(y)}, LAUNCH[f"{kind}, amax"],
        )  # fmt: skip
    return found, amax.view(torch.float32)
