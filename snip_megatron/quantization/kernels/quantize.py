"""The quantisers of ``packed.py`` as Triton kernels: same names, arguments and results, one read of the matrix.

Import this module only where Triton can run: on CUDA, or on a CPU with ``TRITON_INTERPRET=1`` (slow; for tests).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format
from snip_megatron.quantization import packed
from snip_megatron.quantization.formats import TILE
from snip_megatron.quantization.kernels.fours import pack_fours as pack_fours
from snip_megatron.quantization.kernels.fours import unpack_fours as unpack_fours
from snip_megatron.quantization.kernels.launch import launch
from snip_megatron.quantization.kernels.programs import amax_kernel, block_kernel, tensor_kernel, tile_kernel
from snip_megatron.quantization.packed import Held, Operand, Operands, stored_format
from snip_megatron.quantization.rounding import Key, key_words

_AMAX_PARTS = 4
_SCALE = 4  # place of the scale behind the amax: 16 bytes away, the alignment that cuBLASLt wants
LAUNCH: dict[str, dict[str, int]] = {
    "tiles": {"num_warps": 8, "maxnreg": 64},
    "fp8 rows": {"num_warps": 8, "maxnreg": 72},  # fp8 along rows and either format along columns
    "stochastic": {"num_warps": 8, "maxnreg": 72},
    "sums": {"num_warps": 8, "maxnreg": 128},
    "blocks": {"num_warps": 8, "maxnreg": 64},
    "tensor": {"num_warps": 16, "maxnreg": 40},
    "amax": {"num_warps": 8, "maxnreg": 64},
}
"""Launch options of each kind of kernel (``benchmarks/quantize.py --sweep`` tries others): tiles do not cross warps, so
that many warps with few registers each hide each other's latency."""
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_WIDTH = {Format.FP8: 8, Format.FP4: 4}
# Of values and scales: a kernel writes values along rows as pairs of bytes.
_ROW, _COL = (torch.int16, torch.float32), (torch.uint8, torch.float32)
_PAIRED: dict[int, tuple[weakref.ref[Tensor], int, bool]] = {}
"""id(ids of columns) → (the ids, their version, whether they are pairs (2i, 2i + 1)).

It is looked up for every gradient. torch's ``WeakIdKeyDictionary`` would create three weak references for that.
"""


def quantize_tiles(
    x: Tensor,
    row_format: Format | str | None,
    col_format: Format | str | None,
    *,
    row_seed: Key | None = None,
    col_seed: Key | None = None,
    offset: tuple[int, int] = (0, 0),
    rows: Tensor | None = None,
    cols: Tensor | None = None,
    candidates: Sequence[Format | str] = (),
) -> Operands:
    """See :func:`snip_megatron.quantization.packed.quantize_tiles`. The first call
    with given ``cols`` waits for the device to look at them."""
    x = _checked(x)
    if _wants_reference(x, stochastic=row_seed is not None or col_seed is not None, sums=bool(candidates)):
        return packed.quantize_tiles(
            x, row_format, col_format,
            row_seed=row_seed, col_seed=col_seed, offset=offset, rows=rows, cols=cols, candidates=candidates,
        )  # fmt: skip
    M, K = x.shape
    row, row_width = _tile_output(x, row_format, M, K)
    col, col_width = _tile_output(x, col_format, K, M)
    places = {stored_format(candidate): 1 + 2 * i for i, candidate in enumerate(candidates)}
    row_random, col_random = row_seed is not None, col_seed is not None
    if not (row_random or col_random):
        rows = cols = None  # one kernel with and without them
    row_key, col_key = _loaded(row_seed, x), _loaded(col_seed, x)
    partial = x.new_zeros((1 + 2 * len(places), _parts(M), K), dtype=torch.float32) if places else x
    if x.numel():
        source = _source(x)
        random = (row_random and row_width == 4) or (col_random and col_width == 4)
        row_ids, col_ids = x if rows is None else rows, x if cols is None else cols
        launch(
            tile_kernel, (_parts(K), _parts(M)),
            (x, *_memory(row, x), *_memory(col, x), partial, row_ids, col_ids, row_key, col_key),
            (
                source.dtype, *_types(row, _ROW, x), *_types(col, _COL, x), partial.dtype, row_ids.dtype, col_ids.dtype,
                row_key.dtype, col_key.dtype,
            ),
            (M, K, source.width, _stride(col)), (*offset, *_words(row_seed), *_words(col_seed)),
            {
                "x_stride": source.stride, "row_stride": _stride(row) // 2,
                "ROW": row_width, "COL": col_width, "ROW_RANDOM": row_random, "COL_RANDOM": col_random,
                "LOADED": row_key is not x or col_key is not x,
                "SUMS": bool(places), "SUM_8": places.get(Format.FP8, 0), "SUM_4": places.get(Format.FP4, 0),
                "GIVEN_ROWS": rows is not None, "GIVEN_COLS": cols is not None,
                "PAIRED": _paired(cols, offset[1]) if row_random or col_random else True, **source.options,
            },
            LAUNCH["sums" if places else "stochastic" if random else "fp8 rows" if row_width == 8 and col else "tiles"],
        )  # fmt: skip
    return Operands(row, col, partial.sum(1, dtype=torch.float64) if places else None)


def quantize_blocks(
    w: Tensor, row_format: Format | str | None, col_format: Format | str | None, *, held: Held | None = None
) -> Operands:
    """See :func:`snip_megatron.quantization.packed.quantize_blocks`."""
    w = _checked(w)
    N, K = w.shape
    row, row_width = _block_output(w, row_format, N, K, None if held is None else held.operands.row)
    col, col_width = _block_output(w, col_format, K, N, None if held is None else held.operands.col)
    if w.numel():
        source = _source(w)
        current = w if held is None else held.current
        launch(
            block_kernel, (_parts(K), _parts(N)), (w, *_memory(row, w), *_memory(col, w), current),
            (source.dtype, *_types(row, _ROW, w), *_types(col, _COL, w), current.dtype),
            (N, K, source.width, _stride(col), _scale_stride(row), _scale_stride(col)), (),
            {
                "x_stride": source.stride, "row_stride": _stride(row) // 2, "ROW": row_width, "COL": col_width,
                "GUARDED": held is not None, **source.options,
            },
            LAUNCH["blocks"],
        )  # fmt: skip
    return Operands(row, col)


def quantize_tensor(
    x: Tensor, *, row: bool = True, col: bool = False, amax: Tensor | None = None, held: Held | None = None
) -> Operands:
    """See :func:`snip_megatron.quantization.packed.quantize_tensor`; without ``amax`` the matrix is read twice."""
    x = _checked(x)
    M, K = x.shape
    current = None if held is None else held.current
    bits = _amax_bits(x, amax, current)
    row_side, col_side = _tensor_outputs(x, bits, row, col) if held is None else (held.operands.row, held.operands.col)
    written = row_side or col_side
    if bits is not None and written is not None:
        source, scale = _source(x), written.scale
        flag = bits if current is None else current
        launch(
            tensor_kernel, (_parts(K), _parts(M)),
            (x, bits, _memory(row_side, x)[0], _memory(col_side, x)[0], scale, flag),
            (
                source.dtype, bits.dtype, _types(row_side, _ROW, x)[0], _types(col_side, _COL, x)[0], scale.dtype,
                flag.dtype,
            ),
            (M, K, source.width, _stride(col_side)), (),
            {
                "x_stride": source.stride, "row_stride": _stride(row_side) // 2, "ROW": row, "COL": col,
                "GUARDED": current is not None, **source.options,
            },
            LAUNCH["tensor"],
        )  # fmt: skip
    return Operands(row_side, col_side)


def _tensor_outputs(x: Tensor, bits: Tensor | None, row: bool, col: bool) -> tuple[Operand | None, Operand | None]:
    """Allocate both operands with one scale, which lies behind the bits of the amax, so that one fill serves both."""
    M, K = x.shape
    scale = torch.ones(1, device=x.device) if bits is None else bits[_SCALE:].view(torch.float32)
    row_side = Operand(_values(x, M, K), scale, "tensor", K) if row else None
    return row_side, Operand(_values(x, K, M), scale, "tensor", M) if col else None


def largest_magnitude(x: Tensor, current: Tensor | None = None) -> Tensor:
    """Return the FP32 bits of max|x|, and room for a scale behind them, int32 [5]. The maximum is NaN if x holds a NaN.

    Args:
        x: [M, K], not empty.
        current: int32 on the device. If it is not zero, the result is not needed and x is not read.
    """
    M, K = x.shape
    bits = torch.zeros(_SCALE + 1, dtype=torch.int32, device=x.device)  # one fill for both
    source, flag = _source(x), bits if current is None else current
    launch(
        amax_kernel, (-(-K // (TILE * _AMAX_PARTS)), _parts(M)), (x, bits, flag),
        (source.dtype, bits.dtype, flag.dtype), (M, source.width), (),
        {"x_stride": source.stride, "PARTS": _AMAX_PARTS, "GUARDED": current is not None, **source.options},
        LAUNCH["amax"],
    )  # fmt: skip
    return bits


def _amax_bits(x: Tensor, amax: Tensor | None, current: Tensor | None = None) -> Tensor | None:
    """Return the bits of ``amax`` if it is given, otherwise :func:`largest_magnitude`. None for an empty matrix."""
    if not x.numel():
        return None
    if amax is None:
        return largest_magnitude(x, current)
    return amax.detach().to(torch.float32).reshape(1).expand(_SCALE + 1).contiguous().view(torch.int32)


def _checked(x: Tensor) -> Tensor:
    if x.dim() != 2:
        raise SnipError(f"quantisation takes a 2-D tensor [rows, cols], not shape {tuple(x.shape)}: flatten it first")
    if x.dtype not in _DTYPES:
        raise SnipError(f"quantisation takes fp32, bf16 or fp16, not {x.dtype}")
    x = x.detach()
    return x if x.stride(1) == 1 else x.contiguous()


def _parts(size: int) -> int:
    return -(-size // TILE)


def _values(x: Tensor, rows: int, depth: int) -> Tensor:
    return torch.empty(rows, _parts(depth) * TILE, dtype=torch.float8_e4m3fn, device=x.device)


def _tile_output(x: Tensor, format: Format | str | None, rows: int, depth: int) -> tuple[Operand | None, int]:
    if format is None:
        return None, 0
    width = _WIDTH.get(format) or _WIDTH[stored_format(format)]  # type: ignore[call-overload]
    scale = torch.empty_strided((rows, _parts(depth)), (1, rows), dtype=torch.float32, device=x.device)
    return Operand(_values(x, rows, depth), scale, "tile", depth), width


def _block_output(
    w: Tensor, format: Format | str | None, rows: int, depth: int, held: Operand | None
) -> tuple[Operand | None, int]:
    if format is None:
        return None, 0
    width = _WIDTH.get(format) or _WIDTH[stored_format(format)]  # type: ignore[call-overload]
    if held is not None:
        return held, width
    padded = -(-_parts(depth) // 4) * 4
    create = torch.empty if padded == _parts(depth) else torch.ones
    scale = create(_parts(rows), padded, dtype=torch.float32, device=w.device)
    return Operand(_values(w, rows, depth), scale.t(), "block", depth), width


def _memory(side: Operand | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for values and scales. It is arbitrary memory if the operand is not requested."""
    return (unused, unused) if side is None else (side.values, side.scale)


def _types(side: Operand | None, types: tuple[torch.dtype, torch.dtype], unused: Tensor) -> tuple[torch.dtype, ...]:
    return (unused.dtype, unused.dtype) if side is None else types


def _stride(side: Operand | None) -> int:
    return 0 if side is None else side.values.stride(0)


def _scale_stride(side: Operand | None) -> int:
    return 0 if side is None else side.scale.stride(1)


def _words(seed: Key | None) -> list[int]:
    """Return the seed's key words as signed 32-bit numbers, so that all seeds have one kernel signature."""
    if seed is None or isinstance(seed, Tensor):
        return [0, 0]
    return [word - (word >> 31 << 32) for word in key_words(seed)]


def _loaded(seed: Key | None, unused: Tensor) -> Tensor:
    """Return the key words on the device, or arbitrary memory if they are passed as arguments."""
    return seed if isinstance(seed, Tensor) else unused


def _paired(cols: Tensor | None, start: int) -> bool:
    """Return whether neighbouring columns are pairs (2i, 2i + 1). Given ids are inspected on the device once."""
    if cols is None:
        return start % 2 == 0
    known = _PAIRED.get(id(cols))
    if known is None or known[0]() is not cols or known[1] != cols._version:
        even, odd = cols[: cols.numel() // 2 * 2].view(-1, 2).unbind(1)
        paired = bool(((cols[::2] % 2 == 0).all() & (odd == even + 1).all()).item())
        key = id(cols)
        known = _PAIRED[key] = (weakref.ref(cols, lambda _: _PAIRED.pop(key, None)), cols._version, paired)
    return known[2]


class _Source(NamedTuple):
    """The dtype, width and stride with which a kernel reads a matrix: numbers, or words of two 16-bit numbers where the
    layout allows it.
    """

    dtype: torch.dtype
    width: int
    stride: int
    options: dict[str, object]


def _source(x: Tensor) -> _Source:
    (_, width), stride, size = x.shape, x.stride(0), x.element_size()
    words = size == 2 and stride % 2 == 0 and width % 2 == 0 and x.storage_offset() % 2 == 0
    options = {"DTYPE": _DTYPES[x.dtype], "WORDS": words, "HARDWARE": _hardware(x)}
    return _Source(torch.int32, width // 2, stride // 2, options) if words else _Source(x.dtype, width, stride, options)


def _wants_reference(x: Tensor, *, stochastic: bool, sums: bool) -> bool:
    """Return whether torch's functions must replace the kernels.

    For a matrix of 777 columns, which is not read as words of two numbers, the kernels on an H200 drew other bits than
    the reference along rows, and summed other errors. No linear of a model has such a shape.
    """
    return (stochastic or sums) and _hardware(x) and not _source(x).options["WORDS"]


def _hardware(x: Tensor) -> bool:
    """Return whether the device has Hopper's instructions on pairs.

    Without them (Triton's interpreter, older GPUs) the kernels build bytes from FP32 bits.
    """
    return x.is_cuda and not triton.knobs.runtime.interpret and _has_hopper_instructions(x.device)


@functools.cache
def _has_hopper_instructions(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
