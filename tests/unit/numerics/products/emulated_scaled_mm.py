"""``torch.nn.functional.scaled_mm`` on a CPU: takes what cuBLAS takes on a Hopper GPU, refuses what it refuses.

Layouts and limits as measured on an H200 with torch 2.11: K-major operands; 1×128 scales (rows, K/128) with strides
(1, rows); 128×128 scales (K/128 rounded up to 4, rows/128) with strides (1, first size); M a multiple of 4, N of 16, K
of 128. The result is exact arithmetic on the quantised operands, rounded once.
"""

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

TILE = 128


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    recipe_a: ScalingType,
    scale_b: Tensor,
    recipe_b: ScalingType,
    *,
    output_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> Tensor:
    """a [M, K] row-major, b [K, N] column-major, both float8_e4m3fn; returns [M, N]."""
    (m, k), n = a.shape, b.shape[1]
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert a.stride() == (k, 1), f"A is not K-major: {a.stride()}"
    assert b.shape[0] == k, f"shapes {a.shape} and {b.shape}"
    assert b.stride() == (1, k), f"B is not K-major: {b.stride()}"
    assert m % 4 == 0, f"CUBLAS_STATUS_NOT_SUPPORTED: M = {m}"
    assert min(m, n, k) > 0, f"empty: {m}, {n}, {k}"
    assert n % 16 == 0, f"N = {n} is no multiple of 16"
    assert k % TILE == 0, f"K = {k} is no multiple of 128"
    assert output_dtype in (torch.bfloat16, torch.float32)
    pair = (recipe_a, recipe_b)
    blocks = (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
    tiles = (ScalingType.BlockWise1x128, ScalingType.BlockWise1x128)
    assert pair in (blocks, tiles, (ScalingType.TensorWise, ScalingType.TensorWise)), f"no kernel for {pair}"
    assert not (use_fast_accum and pair != (ScalingType.TensorWise, ScalingType.TensorWise)), "no fast accumulation"
    left, right = expanded(a, scale_a, recipe_a), expanded(b.t(), scale_b, recipe_b)
    return (left @ right.t()).to(output_dtype)


def expanded(values: Tensor, scale: Tensor, recipe: ScalingType) -> Tensor:
    """float64 [rows, K] of values times scales, whose layout is checked."""
    rows, k = values.shape
    assert scale.dtype == torch.float32
    exact = values.to(torch.float64)
    if recipe == ScalingType.TensorWise:
        assert scale.numel() == 1
        return exact * scale.to(torch.float64)
    if recipe == ScalingType.BlockWise1x128:
        assert scale.shape == (rows, k // TILE), f"scales {scale.shape} for {values.shape}"
        assert scale.stride() == (1, rows), f"strides {scale.stride()}"
        return exact * scale.to(torch.float64).repeat_interleave(TILE, 1)
    depth = -(-(k // TILE) // 4) * 4
    assert scale.shape == (depth, -(-rows // TILE)), f"scales {scale.shape} for {values.shape}"
    assert scale.stride() == (1, depth), f"strides {scale.stride()}"
    blocks = scale[: k // TILE].to(torch.float64).t().repeat_interleave(TILE, 0)[:rows]
    return exact * blocks.repeat_interleave(TILE, 1)
