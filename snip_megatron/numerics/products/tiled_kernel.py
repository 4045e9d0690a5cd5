# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""A GEMM of bf16 matrices whose 128-long tiles along the reduction have FP32 scales, in Triton.

The emulated backend uses it for fp8 and fp4. Their scales are arbitrary FP32 numbers, so that a scaled element is not
exact in bf16. The elements alone are exact. The tensor cores multiply them, and the sum of each tile is scaled in FP32.
"""

import triton
import triton.language as tl

from snip_megatron.numerics.quantize.kernels.launch import launch

_TILE = 128
_BLOCK, _DEPTH, _GROUP = 128, 64, 8


@triton.jit
def _add_tile(
    total, a, b, left_scale, right_scale, columns, a_depth, b_depth, row_mask, col_mask,
    DEPTH: tl.constexpr, TILE: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Add the scaled product of one tile of at least ``columns`` columns, and return the pointers of the next tile."""
    depth, part = tl.arange(0, DEPTH), tl.zeros(total.shape, tl.float32)
    for step in tl.static_range(0, TILE, DEPTH):
        inside = step + depth < columns
        left = tl.load(a, mask=row_mask[:, None] & inside[None, :], other=0.0)
        right = tl.load(b, mask=inside[:, None] & col_mask[None, :], other=0.0)
        if not GPU:  # the interpreter would multiply the bits of bf16 numbers
            left, right = left.to(tl.float32), right.to(tl.float32)
        part = tl.dot(left, right, part)
        a += DEPTH * a_depth
        b += DEPTH * b_depth
    left, right = tl.load(left_scale, mask=row_mask, other=0.0), tl.load(right_scale, mask=col_mask, other=0.0)
    return total + part * left[:, None] * right[None, :], a, b


@triton.jit(do_not_specialize=["tiles"])  # the rows of experts, over which wgrad reduces, differ from step to step
def tiled_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr,
    M, N, K, a_row, a_depth, b_row, b_depth, a_scale_row, a_scale_depth, b_scale_row, b_scale_depth, tiles,
    A_TILE: tl.constexpr, B_TILE: tl.constexpr, ADD: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Compute C = A·Bᵀ, or add it to C, over ``tiles`` tiles. ``A_TILE`` and ``B_TILE`` rows share a scale."""
    program = tl.program_id(0)
    down, across = tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK)
    group = program // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    m = group * GROUP + (program % (GROUP * across)) % height
    n = (program % (GROUP * across)) // height
    rows, cols, depth = m * BLOCK + tl.arange(0, BLOCK), n * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DEPTH)
    row_mask, col_mask = rows < M, cols < N
    a = a_ptr + rows.to(tl.int64)[:, None] * a_row + depth.to(tl.int64)[None, :] * a_depth
    b = b_ptr + cols.to(tl.int64)[None, :] * b_row + depth.to(tl.int64)[:, None] * b_depth
    a_scale = a_scale_ptr + (rows // A_TILE).to(tl.int64) * a_scale_row
    b_scale = b_scale_ptr + (cols // B_TILE).to(tl.int64) * b_scale_row
    total, tile = tl.zeros((BLOCK, BLOCK), tl.float32), 0
    if GPU:
        for tile in range(tiles):
            total, a, b = _add_tile(
                total, a, b, a_scale + tile * a_scale_depth, b_scale + tile * b_scale_depth, K - tile * TILE,
                a_depth, b_depth, row_mask, col_mask, DEPTH, TILE, GPU,
            )  # fmt: skip
    else:  # the interpreter has no range of tensors
        while tile < tiles:
            total, a, b = _add_tile(
                total, a, b, a_scale + tile * a_scale_depth, b_scale + tile * b_scale_depth, K - tile * TILE,
                a_depth, b_depth, row_mask, col_mask, DEPTH, TILE, GPU,
            )  # fmt: skip
            tile += 1
    c = c_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
    mask = row_mask[:, None] & col_mask[None, :]
    if ADD:
        total += tl.load(c, mask=mask, other=0.0).to(tl.float32)
    tl.store(c, total.to(c_ptr.dtype.element_ty), mask=mask)


def multiply(a, a_scale, a_tile, b, b_scale, b_tile, out, *, add=False):
    """Compute out = a·bᵀ, or out += a·bᵀ.

    Args:
        a, b: bf16 [M, K] and [N, K], any strides.
        a_scale, b_scale: FP32 [ceil(M/a_tile), ceil(K/128)] and [ceil(N/b_tile), ceil(K/128)], any strides.
        a_tile, b_tile: rows that share a scale.
        out: FP32, bf16 or fp16 [M, N], contiguous.
    """
    (m, k), n = a.shape, b.shape[0]
    launch(
        tiled_kernel, (-(-m // _BLOCK) * -(-n // _BLOCK), 1), (a, a_scale, b, b_scale, out),
        (m, n, k, *a.stride(), *b.stride(), *a_scale.stride(), *b_scale.stride()), (-(-k // _TILE),),
        {
            "A_TILE": a_tile, "B_TILE": b_tile, "ADD": add,
            "BLOCK": _BLOCK, "DEPTH": _DEPTH, "TILE": _TILE, "GROUP": _GROUP,
            "GPU": a.is_cuda and not triton.knobs.runtime.interpret,
        },
        {"num_warps": 8, "num_stages": 3},
    )  # fmt: skip
