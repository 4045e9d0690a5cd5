"""The products of one linear of all experts of a layer, expert by expert: any format, any device, any rows.

They are the reference of the grouped products of libraries, and what runs where these have no kernel.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from snip_megatron.numerics.products.group_rows import GroupRows
from snip_megatron.numerics.quantize.operands import OperandPair, OperandSpec
from snip_megatron.numerics.quantize.rounding import derive_seed
from snip_megatron.precision import Format, Gemm


class GroupLoop:
    """Products of the rows of all experts, ordered by expert, with one weight [N, K] an expert.

    Both functions are methods of a :class:`snip_megatron.numerics.products.backend.GemmBackend`.

    Attributes:
        pads: whether the number of rows of every expert must be a multiple of the width of a tile.
        in_one_launch: formats whose fprop and dgrad of all experts are one launch.
    """

    pads = False
    in_one_launch: frozenset[Format] = frozenset()

    def __init__(self, quantize: Callable[..., OperandPair], multiply: Callable[..., Tensor]) -> None:
        self._quantize = quantize
        self._multiply = multiply

    def quantize_rows(self, x: Tensor, splits: Sequence[int], spec: OperandSpec) -> OperandPair:
        """Return X [rows, K] or G [rows, N] as the operands of two products.

        Args:
            x: the rows of all experts, in the training dtype.
            splits: number of rows of each expert; they add up to the rows of ``x``, and may be 0.
            spec: how each expert's rows are quantised. Every expert gets keys of stochastic rounding of its own, made
                of these.
        """
        rows = torch.split(x, list(splits))
        return _by_side([self._quantize(own, _of_expert(spec, e)) for e, own in enumerate(rows)], spec)

    def quantize_unpadded(self, x: Tensor, rows: GroupRows, spec: OperandSpec) -> OperandPair:
        """Do the same for the padded rows of x, which has no padding."""
        return self.quantize_rows(rows.pad(x), rows, spec)

    def quantize_weights(self, weights: Sequence[Tensor], spec: OperandSpec) -> OperandPair:
        """Return the weights [N, K] of all experts as the operands of fprop and of dgrad."""
        return _by_side([self._quantize(weight, spec) for weight in weights], spec)

    def fuses_swiglu(self, formats: tuple[Format | None, Format | None]) -> bool:
        """Return whether :meth:`swiglu` and :meth:`swiglu_gradient` make operands in these formats."""
        return False

    def swiglu(self, y: Tensor, probs: Tensor, splits: Sequence[int], spec: OperandSpec) -> OperandPair:
        """Return SwiGLU of y [rows, 2K] times ``probs``, FP32 [rows], as :meth:`quantize_rows` makes it."""
        raise NotImplementedError

    def swiglu_gradient(
        self, d: Tensor, y: Tensor, probs: Tensor, splits: Sequence[int], spec: OperandSpec
    ) -> tuple[OperandPair, Tensor]:
        """Return the gradient of y as :meth:`quantize_rows` makes it, and that of ``probs``, from that of the result of
        :meth:`swiglu`, d [rows, K]. ``spec`` says how the gradient of y is quantised.
        """
        raise NotImplementedError

    def multiply(self, gemm: Gemm, a: Any, b: Any, dtype: torch.dtype) -> Tensor:
        """Compute fprop or dgrad of every expert: Y [rows, N] or ∂L/∂X [rows, K] in ``dtype``.

        ``a`` is X or G, as :meth:`quantize_rows` made it, ``b`` the weights, as :meth:`quantize_weights` made them.
        """
        return torch.cat([self._multiply(gemm, *each, dtype) for each in zip(a, b, strict=True)])

    def accumulate(self, g: Any, x: Any, out: Sequence[Tensor] | None) -> Sequence[Tensor]:
        """Compute wgrad of every expert, FP32 [N, K] each. They are added to ``out`` if given, which is returned."""
        outs = [None] * len(g) if out is None else out
        products = zip(g, x, outs, strict=True)
        multiply = self._multiply
        return [multiply(Gemm.WGRAD, of_g, of_x, torch.float32, own) for of_g, of_x, own in products]


def _by_side(pairs: Sequence[OperandPair], spec: OperandSpec) -> OperandPair:
    """Return the rowwise operands of all experts, and the columnwise ones; None for a GEMM that does not run."""
    rowwise, columnwise = zip(*pairs, strict=True)
    return None if spec.rowwise is None else rowwise, None if spec.columnwise is None else columnwise


def _of_expert(spec: OperandSpec, expert: int) -> OperandSpec:
    """Return how the rows of one expert are quantised."""
    keys = spec.keys
    if keys is None or not isinstance(keys.dgrad, int) or not isinstance(keys.wgrad, int):
        return spec
    own = keys._replace(dgrad=derive_seed(keys.dgrad, expert), wgrad=derive_seed(keys.wgrad, expert))
    return spec._replace(keys=own)
