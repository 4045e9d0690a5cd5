"""Grouped products of all experts on a Hopper GPU: one launch for each product.

DeepGEMM multiplies fp8 and fp4 in tiles and blocks. Triton kernels (:mod:`numerics.products.grouped_wgrad`) add wgrads
of bf16, fp8 and fp4 to the FP32 gradients of all experts, which follow each other in Megatron's buffers. If experts
have many rows, cuBLASLt adds wgrads in fp8 and fp4, expert by expert. torch multiplies bf16 otherwise: DeepGEMM was 3
to 18 % faster in fprop and dgrad of four models on an H100 (``experts_h100_2026-11-26.json``), of which maps of the
solver keep one at most in bf16, but compiles each kernel with nvcc for ten seconds, before a training's first step.

Other formats run expert by expert. ``k_grouped_fp8_gemm_nt_contiguous`` of DeepGEMM 0.1.4, a wgrad in fp8, gave other
sums in every run on an H100 where some experts had no or few rows. It overwrites the one tensor map of a multiprocessor
at the next expert while loads of the expert before may still read it (deepseek-ai/DeepGEMM, issue 365 and pull request
343).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snip_megatron.numerics.products.deepgemm import run
from snip_megatron.numerics.products.grouped import GroupLoop, GroupRows, Rows, rows_of
from snip_megatron.numerics.quantize.formats import TILE
from snip_megatron.numerics.quantize.operands import TILED, CachedPair, Operand, OperandPair, OperandSpec
from snip_megatron.precision import Format, FormatPair, Gemm

grouped_mm: Callable[..., Tensor] = torch._grouped_mm
_MANY = 4096
"""Rows an expert, on average, from which on cuBLASLt adds wgrads in fp8 and fp4, expert by expert."""


class RowsOperand(NamedTuple):
    """X or G of all experts as an operand of one product.

    Attributes:
        matrix: the quantised matrix; in bf16, and for wgrad, the matrix itself.
        rows: where the rows of each expert are.
        unpadded: whether the matrix, an operand of wgrad, has no padding.
    """

    matrix: Operand | Tensor
    rows: Rows
    unpadded: bool = False


class HopperGroups(GroupLoop):
    """Grouped products of bf16 weights [N, K] whose two dimensions are multiples of 128.

    ``backend`` is the :class:`snip_megatron.numerics.products.hopper.HopperBackend`. Without DeepGEMM, formats other
    than bf16 run expert by expert.
    """

    pads = True

    def __init__(self, backend: Any) -> None:
        super().__init__(backend.quantize, backend.multiply)
        self._backend = backend
        self._tiled = frozenset(() if backend.groups is None else TILED)
        self.in_one_launch = self._tiled | {Format.BF16}
        self.wgrad_in_one_launch = frozenset((*TILED, Format.BF16))

    def quantize_rows(self, x: Tensor, splits: Sequence[int] | Rows, spec: OperandSpec) -> OperandPair:
        """See the base class. A tile is of one expert: all rows are one matrix with one key for each GEMM."""
        x, tiled = x.contiguous(), self._in_tiles(spec)
        row, col = (None, None) if tiled.formats == (None, None) else self._quantize(x, tiled)
        pair = _plain(x, spec.rowwise, row), _plain(x, spec.columnwise, col)
        operands = _of_experts(pair, splits, x.device)
        remaining = [fmt if operand is None else None for fmt, operand in zip(spec.formats, operands, strict=True)]
        if remaining == [None, None]:
            return operands
        by_expert = spec._replace(rowwise=remaining[0], columnwise=remaining[1])
        return _either(operands, super().quantize_rows(x, splits, by_expert))

    def _in_tiles(self, spec: OperandSpec) -> OperandSpec:
        """Return the spec without the operands that products of all experts do not read in tiles."""
        return spec.only(TILED)._replace(rowwise=spec.rowwise if spec.rowwise in self._tiled else None)

    def quantize_unpadded(self, x: Tensor, rows: Rows, spec: OperandSpec) -> OperandPair:
        """See the base class. Where formats allow it, no padded copy is made: kernels find the rows of each expert."""
        first, second = spec.formats
        if first not in self._tiled or not (second is None or second in self.wgrad_in_one_launch):
            return super().quantize_unpadded(x, rows, spec)
        x = x.contiguous()
        row, col = self._quantize(x, self._in_tiles(spec), None, rows.map)
        plain = second is Format.BF16
        of_wgrad = None if second is None else RowsOperand(x if plain else col, rows, unpadded=plain)
        return RowsOperand(row, rows), of_wgrad

    def fuses_swiglu(self, formats: FormatPair) -> bool:
        first, second = formats
        one_launch = first in self.in_one_launch and (second is None or second in self.wgrad_in_one_launch)
        return self._backend.fuses_swiglu and one_launch

    def swiglu(self, y: Tensor, probs: Tensor, splits: Sequence[int] | Rows, spec: OperandSpec) -> OperandPair:
        return _of_experts(self._backend.swiglu(y, None, spec, probs), splits, y.device)

    def swiglu_gradient(
        self, d: Tensor, y: Tensor, probs: Tensor, splits: Sequence[int] | Rows, spec: OperandSpec
    ) -> tuple[OperandPair, Tensor]:
        *pair, of_probs = self._backend.swiglu(y, d, spec, probs)
        return _of_experts(pair, splits, y.device), of_probs

    def quantize_weights(
        self, weights: Sequence[Tensor], spec: OperandSpec, cached: CachedPair | None = None
    ) -> OperandPair:
        formats = spec.formats
        operands: OperandPair = (None, None)
        if not self.in_one_launch.isdisjoint(formats):
            stack = stacked(weights)
            stack = torch.stack(list(weights)) if stack is None else stack
            tiled = spec.only(self._tiled)
            blocks: OperandPair = (None, None)
            if tiled.formats != (None, None):
                blocks = self._backend.quantizers.quantize_group_blocks(stack, tiled, cached)
            sides = zip(formats, blocks, strict=True)
            rowwise, columnwise = (stack if fmt is Format.BF16 else operand for fmt, operand in sides)
            operands = rowwise, columnwise
        by_expert = spec.only(frozenset(Format) - self.in_one_launch)
        if by_expert.formats == (None, None):
            return operands
        return _either(operands, super().quantize_weights(weights, by_expert))

    def multiply(self, gemm: Gemm, a: Any, b: Any, dtype: torch.dtype) -> Tensor:
        if not isinstance(a, RowsOperand):
            return self._multiply_each(gemm, a, b, dtype)
        left, right, rows = a.matrix, b, a.rows
        if isinstance(left, Operand):
            out = left.scale.new_empty(left.values.shape[0], right.values.shape[1], dtype=dtype)
            run(self._backend.groups.m_grouped_fp8_fp4_gemm_nt_contiguous, left[:2], right[:2], out, rows.map.experts)
            return out
        if not len(left):
            return left.new_empty(0, right.shape[1 if gemm is Gemm.FPROP else 2])
        return grouped_mm(left, right.transpose(1, 2) if gemm is Gemm.FPROP else right, offs=rows.map.table[3])

    def _multiply_each(self, gemm: Gemm, a: Any, b: Any, dtype: torch.dtype) -> Tensor:
        """Compute fprop or dgrad expert by expert, each into its rows of one result."""
        if not all(isinstance(each, Operand) for each in a):
            return super().multiply(gemm, a, b, dtype)
        counts = [each.rows for each in a]
        out = torch.empty(sum(counts), b[0].rows, dtype=dtype, device=a[0].scale.device)
        for left, right, part in zip(a, b, torch.split(out, counts), strict=True):
            product = self._multiply(gemm, left, right, dtype, part)
            if product.data_ptr() != part.data_ptr():
                part.copy_(product)
        return out

    def accumulate(self, g: Any, x: Any, out: Sequence[Tensor] | None) -> Sequence[Tensor]:
        if not isinstance(g, RowsOperand):
            return super().accumulate(g, x, out)
        left, right, rows, stack = g.matrix, x.matrix, g.rows, None if out is None else stacked(out)
        if isinstance(left, Operand) and isinstance(rows, GroupRows) and rows.unpadded >= _MANY * len(rows):
            return super().accumulate(_experts_apart(left, rows), _experts_apart(right, rows), out)
        in_place, table = stack is not None and stack.dtype is torch.float32, rows.map.table
        if stack is None or not in_place:
            n, k = (each.rows if isinstance(each, Operand) else each.shape[1] for each in (left, right))
            stack = torch.zeros(len(rows), n, k, device=table.device)
        self._backend.add_wgrad(left, right, table, (g.unpadded, x.unpadded), stack)
        if out is not None and not in_place:
            torch._foreach_add_(list(out), list(stack.unbind(0)))
        return stack.unbind(0) if out is None else out


def add_wgrad(
    g: Tensor | Operand, x: Tensor | Operand, table: Tensor, unpadded: tuple[bool, bool], out: Tensor
) -> None:
    """Add Gᵀ·X of every expert to ``out``: the reference of :func:`.grouped_wgrad.add_wgrad`, with its arguments."""
    matrices = [each.dequantize().t() if isinstance(each, Operand) else each.float() for each in (g, x)]
    for *first, count, _, grad in zip(*table.tolist(), out, strict=True):
        left, right = (t[first[side] :][:count] for t, side in zip(matrices, unpadded, strict=True))
        grad += left.t() @ right


def stacked(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return equal contiguous matrices that follow each other in memory as one tensor [count, rows, cols], or None."""
    first, last = tensors[0], tensors[-1]
    start, size = first.data_ptr(), first.numel() * first.element_size()
    follows = [each.data_ptr() for each in tensors] == list(range(start, start + len(tensors) * size, size))
    if not follows or first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return None
    if not all(map(Tensor.is_contiguous, tensors)):
        return None
    shape = (len(tensors), *first.shape)
    return first.detach().as_strided(shape, (first.numel(), *first.stride()))


def _plain(x: Tensor, fmt: Format | None, operand: Any) -> Any:
    """Return the matrix itself as an operand in bf16, else ``operand``."""
    return x if fmt is Format.BF16 else operand


def _experts_apart(operand: Operand, rows: Sequence[int]) -> list[Operand]:
    """Return the parts of an operand of wgrad that belong to each expert, as views."""
    values = torch.split(operand.values, list(rows), 1)
    scales = torch.split(operand.scale, [count // TILE for count in rows], 1)
    return [Operand(part, scale, "tile", count) for part, scale, count in zip(values, scales, rows, strict=True)]


def _either(pair: OperandPair, by_expert: OperandPair) -> OperandPair:
    return by_expert[0] if pair[0] is None else pair[0], by_expert[1] if pair[1] is None else pair[1]


def _of_experts(pair: Sequence[Any], splits: Sequence[int] | Rows, device: torch.device) -> OperandPair:
    """Return the operands of a matrix with the rows of all experts as grouped products take them."""
    rows = rows_of(splits, device)
    row, col = pair
    return None if row is None else RowsOperand(row, rows), None if col is None else RowsOperand(col, rows)
