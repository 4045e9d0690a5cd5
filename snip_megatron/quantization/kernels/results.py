# mypy: ignore-errors
# Device code: Triton's values have no static types.
"""Device code that rounds what a kernel computes to bf16, and quantises it with tiles along both dimensions."""

import triton
import triton.language as tl

from snip_megatron.quantization.kernels.pairs import EDGE, HALF, PAIRS, amax_pairs, load_pairs, numbers
from snip_megatron.quantization.kernels.programs import global_ids, quantize_side


@triton.jit
def _bf16_bits(x):
    """Return FP32 x rounded to bf16, to nearest even, in the upper half of int32; the lower half has no meaning."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, rounded)


@triton.jit
def rounded_words(lo, hi, HARDWARE: tl.constexpr):
    """Round FP32 pairs to bf16, and return them as the int32 words that a load of a bf16 matrix gives."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [lo, hi], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return ((_bf16_bits(lo) >> 16) & 0xFFFF) | (_bf16_bits(hi) & -65536)


@triton.jit
def load_numbers(ptr, stride, M, width, m, k):
    """Return FP32 of the even and of the odd columns of part (m, k) of a bf16 matrix, [128, 64] each."""
    return numbers(load_pairs(ptr, stride, M, width, m, k, False), "bf16")


@triton.jit
def store_both(
    words, rows_ptr, cols_ptr, row_key_ptr, col_key_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr,
    M, K, m, k, row_stride, col_stride, row_word_0, row_word_1, col_word_0, col_word_1,
    ROW: tl.constexpr, COL: tl.constexpr, ROW_RANDOM: tl.constexpr, COL_RANDOM: tl.constexpr, LOADED: tl.constexpr,
    PAIRED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Quantise part (m, k), int32 [128, 64] of bf16 pairs, of a matrix [M, K] with tiles along K and along M."""
    rows, cols = m * EDGE + tl.arange(0, EDGE), k * EDGE + 2 * tl.arange(0, PAIRS)
    row_mask, all_cols = rows < M, cols < K
    lo_ids, hi_ids = cols, cols
    if ROW_RANDOM or COL_RANDOM:
        lo_ids, hi_ids = global_ids(cols_ptr, cols, all_cols, all_cols, PAIRED)
    if LOADED:
        if ROW_RANDOM:
            row_word_0, row_word_1 = tl.load(row_key_ptr), tl.load(row_key_ptr + 1)
        if COL_RANDOM:
            col_word_0, col_word_1 = tl.load(col_key_ptr), tl.load(col_key_ptr + 1)
    if ROW:
        lo_amax, hi_amax = amax_pairs(words, False, "bf16", HARDWARE)
        amax = tl.maximum(lo_amax, hi_amax)
        quantize_side(
            words, amax, amax, rows, lo_ids, hi_ids, row_word_0, row_word_1,
            row_ptr, row_stride, row_scale_ptr + k.to(tl.int64) * M + m * EDGE, m, k,
            row_mask, all_cols, all_cols, 1, ROW, ROW_RANDOM, PAIRED, "bf16", HARDWARE,
        )  # fmt: skip
    if COL:  # as load_pairs gives a part with DOWN
        words = tl.permute(tl.reshape(words, (2, HALF, PAIRS)), (1, 2, 0))
        lo_amax, hi_amax = amax_pairs(words, True, "bf16", HARDWARE)
        quantize_side(
            words, lo_amax, hi_amax, rows, lo_ids, hi_ids, col_word_0, col_word_1,
            col_ptr, col_stride, col_scale_ptr + m.to(tl.int64) * K + k * EDGE, m, k,
            row_mask, all_cols, all_cols, 0, COL, COL_RANDOM, PAIRED, "bf16", HARDWARE,
        )  # fmt: skip
