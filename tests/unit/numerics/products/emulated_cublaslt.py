"""cuBLASLt on a CPU: takes what the library takes on a Hopper GPU, refuses what it refuses.

Layouts and limits as measured on an H200 with torch 2.11: K-major operands; 1×128 scales (rows, K/128) with strides
(1, rows); 128×128 scales (K/128 rounded up to 4, rows/128) with strides (1, first size); M a multiple of 4, N of 16, K
of 128. The result is exact arithmetic on the quantised operands, rounded once.
"""

from typing import Any

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.operands import Operand

TILE = 128


class EmulatedCublasLt:
    """Has no kernels for matrices that are not quantised, and none that add if not ``adds``. ``wrong``: added to every
    product.
    """

    def __init__(self, *, adds: bool = True, wrong: float = 0.0) -> None:
        self._adds, self._wrong = adds, wrong

    def multiply(
        self,
        a: Any,
        b: Any,
        dtype: torch.dtype,
        *,
        fast: bool = False,
        out: Tensor | None = None,
        add: bool = False,
        **_: Any,
    ) -> Tensor | None:
        if not isinstance(a, Operand) or (add and not self._adds):
            return None
        (m, k), n = a.values.shape, b.rows
        assert a.values.dtype == b.values.dtype == torch.float8_e4m3fn
        for operand in (a, b):  # which may be columns of a longer one
            assert operand.values.stride(1) == 1, "an operand is not K-major"
            assert operand.values.stride(0) % TILE == 0
        assert m % 4 == 0, f"CUBLAS_STATUS_NOT_SUPPORTED: M = {m}"
        assert min(m, n, k) > 0, f"empty: {m}, {n}, {k}"
        assert n % 16 == 0, f"N = {n} is no multiple of 16"
        assert k % TILE == 0, f"K = {k} is no multiple of 128"
        assert dtype in (torch.bfloat16, torch.float32)
        pair = a.scaling, b.scaling
        assert pair in (("tile", "block"), ("tile", "tile"), ("tensor", "tensor")), f"no kernel for {pair}"
        assert not (fast and a.scaling != "tensor"), "no fast accumulation"
        product = expanded(a) @ expanded(b).t()
        if add:
            assert out is not None
            return out.add_(product)
        product = product.to(dtype) + self._wrong
        return product if out is None else out.copy_(product)


def expanded(operand: Operand) -> Tensor:
    """float64 [rows, K] of values times scales, whose layout is checked."""
    (rows, k), scale = operand.values.shape, operand.scale
    assert scale.dtype == torch.float32
    exact = operand.values.to(torch.float64)
    if operand.scaling == "tensor":
        assert scale.numel() == 1
        return exact * scale.to(torch.float64)
    if operand.scaling == "tile":
        assert scale.shape == (rows, k // TILE), f"scales {scale.shape} for {exact.shape}"
        assert scale.stride() == (1, rows), f"strides {scale.stride()}"
        return exact * scale.to(torch.float64).repeat_interleave(TILE, 1)
    depth = -(-(k // TILE) // 4) * 4
    assert scale.shape == (depth, -(-rows // TILE)), f"scales {scale.shape} for {exact.shape}"
    assert scale.stride() == (1, depth), f"strides {scale.stride()}"
    blocks = scale[: k // TILE].to(torch.float64).t().repeat_interleave(TILE, 0)[:rows]
    return exact * blocks.repeat_interleave(TILE, 1)
