# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Wgrad of all experts in bf16, or in fp8 and fp4, added to FP32 gradients in one launch, in Triton.

Experts have few rows, so that the traffic between the multiprocessors and the L2 cache takes most of the time. In bf16,
a program has a large part of a gradient, so that operands are read less often, and sends its sums to the L2 cache,
which adds them. Pointers need no descriptors of matrices, which a program would wait for. On an H200, wgrads of 16 to
128 experts took .90 to .98 of the time that smaller parts and descriptors take
(``experts-wgrad-parts_h200_2026-11-30.json``). :mod:`snip_megatron.numerics.products.grouped_hopper` has the
references.

In fp8 and fp4, tiles of 128 rows belong to one expert, because its rows are padded to a multiple of 128. The tensor
cores add the products of a tile, and FP32 units scale and add the sums of tiles.
"""

import torch
import triton
import triton.language as tl

from snip_megatron.numerics.quantize.kernels.launch import launch
from snip_megatron.numerics.quantize.operands import Operand

_DEPTH, _GROUP, _TILE = 64, 8, 128
_FEW = 1024
"""Rows an expert, on average, from which on products take longer than gradients."""
_PART = 64, 128, 4, 4
"""Of a wgrad in tiles: rows and columns of the part of a program, warps, stages. Two programs fit a multiprocessor."""


@triton.jit
def _place(N, K, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """Return the expert of this program, and the first row and column of its part of the gradient."""
    program = tl.program_id(0)
    down, across = N // BN, K // BK
    expert, tile = program // (down * across), program % (down * across)
    group = tile // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    return expert, (group * GROUP + (tile % (GROUP * across)) % height) * BN, ((tile % (GROUP * across)) // height) * BK


@triton.jit
def _gradient(grad_ptr, expert, n, k, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """Return the addresses of this program's part of the gradient, [BN, BK]."""
    rows, cols = n + tl.arange(0, BN), k + tl.arange(0, BK)
    return grad_ptr + expert.to(tl.int64) * N * K + rows[:, None] * K + cols[None, :]


@triton.jit
def _add(out, total):
    # One program adds to an element, so that the sum has one order. Nothing waits for what was there.
    tl.atomic_add(out, total, sem="relaxed")


@triton.jit
def _product(g, x, inside, total, GPU: tl.constexpr):
    left, right = tl.load(g, inside[:, None], 0.0), tl.load(x, inside[:, None], 0.0)
    if not GPU:  # the interpreter would multiply the bits of bf16 numbers
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(tl.trans(left), right, total)


@triton.jit(do_not_specialize=["experts", "g_unpadded", "x_unpadded"])
def grouped_wgrad_kernel(
    g_ptr, x_ptr, table_ptr, grad_ptr, N, K, experts, g_unpadded, x_unpadded,
    BN: tl.constexpr, BK: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, GPU: tl.constexpr,
):  # fmt: skip
    """Add Gᵀ·X of one expert to its gradient [N, K].

    ``table`` has the first row, padded and not, and the number of rows of each expert. Rows beyond those of the expert
    of a program count as zeros.
    """
    expert, n, k = _place(N, K, BN, BK, GROUP)
    g_first = tl.load(table_ptr + g_unpadded * experts + expert)
    x_first = tl.load(table_ptr + x_unpadded * experts + expert)
    count = tl.load(table_ptr + 2 * experts + expert)
    if count > 0:
        depth = tl.arange(0, DEPTH)
        g = g_ptr + (g_first + depth).to(tl.int64)[:, None] * N + (n + tl.arange(0, BN))[None, :]
        x = x_ptr + (x_first + depth).to(tl.int64)[:, None] * K + (k + tl.arange(0, BK))[None, :]
        total = tl.zeros((BN, BK), tl.float32)
        if GPU:
            for step in range(tl.cdiv(count, DEPTH)):
                total = _product(g, x, step * DEPTH + depth < count, total, GPU)
                g += DEPTH * N
                x += DEPTH * K
        else:  # the interpreter counts to no number that it loaded
            while count > 0:
                total = _product(g, x, depth < count, total, GPU)
                g += DEPTH * N
                x += DEPTH * K
                count -= DEPTH
        _add(_gradient(grad_ptr, expert, n, k, N, K, BN, BK), total)


@triton.jit
def _tile_product(g, x, g_scale, x_scale, tile, n, k, N, K, total, TILE: tl.constexpr, GPU: tl.constexpr):
    left, right = g.load([n, tile * TILE]), x.load([k, tile * TILE])
    if not GPU:  # the interpreter would multiply the bits of E4M3 numbers
        left, right = left.to(tl.float32), right.to(tl.float32)
    left_scale, right_scale = tl.load(g_scale + tile * N), tl.load(x_scale + tile * K)
    return total + tl.dot(left, tl.trans(right)) * (left_scale[:, None] * right_scale[None, :])


@triton.jit(do_not_specialize=["experts", "tiles"])
def grouped_tiled_wgrad_kernel(
    g_ptr, g_scale_ptr, x_ptr, x_scale_ptr, table_ptr, grad_ptr, N, K, experts, tiles,
    BN: tl.constexpr, BK: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, FIRST: tl.constexpr,
    GPU: tl.constexpr,
):  # fmt: skip
    """Add G·Xᵀ of one expert to its gradient [N, K], which is read before the products (``FIRST``) or after them.

    G [N, tiles · TILE] and X [K, tiles · TILE] are in E4M3, with scales [tiles, N] and [tiles, K] in memory. An expert
    has whole tiles.
    """
    expert, n, k = _place(N, K, BN, BK, GROUP)
    first = tl.load(table_ptr + expert) // TILE
    steps = tl.cdiv(tl.load(table_ptr + 2 * experts + expert), TILE)
    if steps > 0:
        depth = tiles * TILE
        g = tl.make_tensor_descriptor(g_ptr, [N, depth], [depth, 1], [BN, TILE])
        x = tl.make_tensor_descriptor(x_ptr, [K, depth], [depth, 1], [BK, TILE])
        g_scale, x_scale = g_scale_ptr + n + tl.arange(0, BN), x_scale_ptr + k + tl.arange(0, BK)
        out = _gradient(grad_ptr, expert, n, k, N, K, BN, BK)
        total = tl.load(out) if FIRST else tl.zeros((BN, BK), tl.float32)
        if GPU:
            for step in range(steps):
                total = _tile_product(g, x, g_scale, x_scale, first + step, n, k, N, K, total, TILE, GPU)
        else:  # the interpreter counts to no number that it loaded
            while steps > 0:
                steps -= 1
                total = _tile_product(g, x, g_scale, x_scale, first + steps, n, k, N, K, total, TILE, GPU)
        if FIRST:
            tl.store(out, total)
        else:
            _add(out, total)


def add_wgrad(g, x, table, unpadded, out):
    """Add Gᵀ·X of every expert to ``out``.

    Args:
        g, x: bf16 [rows, N] and [rows, K], contiguous, or operands of wgrad in tiles, whose depth is the number of
            padded rows. N and K are multiples of 128.
        table: that of a :class:`snip_megatron.numerics.quantize.operands.RowMap`.
        unpadded: which of two matrices in bf16 has no padding.
        out: FP32 [experts, N, K], contiguous.
    """
    if isinstance(g, Operand):
        _add_tiled_wgrad(g, x, table, out)
        return
    n, k, experts = g.shape[1], x.shape[1], len(out)
    bn, bk, warps, stages = (128, 256, 8, 4) if k % 256 == 0 else (128, 128, 4, 3)
    launch(
        grouped_wgrad_kernel, (experts * (n // bn) * (k // bk), 1), (g, x, table, out), (n, k),
        (experts, *map(int, unpadded)),
        {
            "BN": bn, "BK": bk, "DEPTH": _DEPTH, "GROUP": _GROUP,
            "GPU": g.is_cuda and not triton.knobs.runtime.interpret,
        },
        {"num_warps": warps, "num_stages": stages},
    )  # fmt: skip


def _add_tiled_wgrad(g, x, table, out):
    triton.set_allocator(_scratch)  # of this thread: autograd has its own
    (n, depth), k, experts = g.values.shape, x.rows, len(out)
    bn, bk, warps, stages = _PART
    launch(
        grouped_tiled_wgrad_kernel, (experts * (n // bn) * (k // bk), 1),
        (g.values, g.scale, x.values, x.scale, table, out), (n, k), (experts, depth // _TILE),
        {
            "BN": bn, "BK": bk, "TILE": _TILE, "GROUP": _GROUP, "FIRST": depth < _FEW * experts,
            "GPU": out.is_cuda and not triton.knobs.runtime.interpret,
        },
        {"num_warps": warps, "num_stages": stages},
    )  # fmt: skip


def _scratch(size, alignment, stream):
    """Allocate the memory in which a kernel describes its matrices."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
