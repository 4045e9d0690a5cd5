# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Wgrad of all experts in bf16, added to FP32 gradients in one launch, in Triton.

Experts have few rows, so that reading and writing FP32 gradients takes most of the time. Libraries run one program on
each multiprocessor, which multiplies nothing while it adds. Here two run on each, and one multiplies while the other
adds. :func:`snip_megatron.gemm.grouped_hopper.add_wgrad` is the reference.
"""

import torch
import triton
import triton.language as tl

from snip_megatron.quantization.kernels.launch import launch

_DEPTH, _GROUP = 64, 8
_FEW = 1024
"""Rows an expert, on average, from which on products take longer than gradients."""


@triton.jit
def _product(g, x, row, n, k, total, GPU: tl.constexpr):
    left, right = g.load([row, n]), x.load([row, k])
    if not GPU:  # the interpreter would multiply the bits of bf16 numbers
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(tl.trans(left), right, total)


@triton.jit(do_not_specialize=["ROWS"])
def grouped_wgrad_kernel(
    g_ptr, x_ptr, ends_ptr, grad_ptr, N, K, ROWS,
    BN: tl.constexpr, BK: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, FIRST: tl.constexpr,
    GPU: tl.constexpr,
):  # fmt: skip
    """Add Gᵀ·X of one expert to its gradient [N, K], which is read before the products (``FIRST``) or after them."""
    program = tl.program_id(0)
    down, across = N // BN, K // BK
    expert, tile = program // (down * across), program % (down * across)
    group = tile // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    n = (group * GROUP + (tile % (GROUP * across)) % height) * BN
    k = ((tile % (GROUP * across)) // height) * BK
    first = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    steps = (tl.load(ends_ptr + expert) - first) // DEPTH
    if steps > 0:
        g = tl.make_tensor_descriptor(g_ptr, [ROWS, N], [N, 1], [DEPTH, BN])
        x = tl.make_tensor_descriptor(x_ptr, [ROWS, K], [K, 1], [DEPTH, BK])
        rows, cols = n + tl.arange(0, BN), k + tl.arange(0, BK)
        out = grad_ptr + expert.to(tl.int64) * N * K + rows[:, None] * K + cols[None, :]
        total = tl.load(out) if FIRST else tl.zeros((BN, BK), tl.float32)
        if GPU:
            for step in range(steps):
                total = _product(g, x, first + step * DEPTH, n, k, total, GPU)
        else:  # the interpreter counts to no number that it loaded
            while steps > 0:
                steps -= 1
                total = _product(g, x, first + steps * DEPTH, n, k, total, GPU)
        if FIRST:
            tl.store(out, total)
        else:  # one program adds to an element, so that the sum has one order; nothing waits for what was there
            tl.atomic_add(out, total, sem="relaxed")


def add_wgrad(g, x, ends, out):
    """Add Gᵀ·X of every expert to ``out``.

    Args:
        g, x: bf16 [rows, N] and [rows, K], contiguous, rows ordered by expert; N is a multiple of 128, K of 128.
        ends: int32 [experts], the row after the last one of each expert, multiples of 64.
        out: FP32 [experts, N, K], contiguous.
    """
    (rows, n), k, experts = g.shape, x.shape[1], len(out)
    few = rows < _FEW * experts or k % 256
    tiles = (128, 128) if few else (128, 256)
    triton.set_allocator(_scratch)  # of this thread: autograd has its own
    launch(
        grouped_wgrad_kernel, (experts * (n // tiles[0]) * (k // tiles[1]), 1), (g, x, ends, out), (n, k), (rows,),
        {
            "BN": tiles[0], "BK": tiles[1], "DEPTH": _DEPTH, "GROUP": _GROUP, "FIRST": few,
            "GPU": g.is_cuda and not triton.knobs.runtime.interpret,
        },
        {"num_warps": 4 if few else 8, "num_stages": 3},
    )  # fmt: skip


def _scratch(size, alignment, stream):
    """Allocate the memory in which a kernel describes its matrices."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
