"""The rows of all experts of a layer and their padding, and the products of one linear of them, expert by expert.

The products run any format on any device for any rows. They are the reference of the grouped products of libraries, and
what runs where these have no kernel. Grouped products need a multiple of 128 rows of every expert. Padding stands at
the two ends of an MLP of experts: whatever lies between reads and writes padded rows. Where an MLP is fused and formats
allow it, X and G are quantised into padded rows, and wgrad reads them as they are: only results are copied.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snip_megatron.numerics.quantize.formats import TILE
from snip_megatron.numerics.quantize.kernels import has_kernels
from snip_megatron.numerics.quantize.operands import CachedPair, OperandPair, OperandSpec, RowMap
from snip_megatron.numerics.quantize.rounding import derive_seed
from snip_megatron.precision import Format, FormatPair, Formats, Gemm


class _PaddedRows:
    """The rows of the experts of a layer, with padding and without.

    Attributes:
        backwards: whether the last expert comes first. Megatron lays parameters and gradients of a model out from the
            last one on, so that rows in this order meet weights in the order of their memory.
        unpadded: number of rows without padding.
        moves: whether padding changes anything.
        map: where the rows are, on the device.
    """

    backwards: bool
    unpadded: int
    moves: bool
    map: RowMap

    def pad(self, x: Tensor) -> Tensor:
        """Return x [rows, ...] with zero rows after those of each expert. Autograd does not see it."""
        return _functions(x).pad(self.map, x) if self.moves else x

    def unpad(self, x: Tensor) -> Tensor:
        """Return the rows of x without the padding of :meth:`pad`. Autograd does not see it."""
        return _functions(x).unpad(self.map, x, self.unpadded) if self.moves else x


class GroupRows(list[int], _PaddedRows):
    """Numbers of rows of the experts with their padding, as a linear of experts takes them."""

    def __init__(self, counts: Sequence[int], device: torch.device, *, backwards: bool) -> None:
        unpadded = np.array(counts, dtype=np.int64)  # faster than torch and than Python
        padded, firsts = unpadded + TILE - 1 & -TILE, unpadded.cumsum() - unpadded
        if backwards:
            unpadded, padded, firsts = unpadded[::-1], padded[::-1], firsts[::-1]
        bounds = padded.cumsum()
        super().__init__(padded.tolist())
        self.backwards = backwards
        self.unpadded = sum(counts)
        self.moves = backwards or self.unpadded != sum(self)
        self._table, self._device = np.array((bounds - padded, firsts, unpadded, bounds), dtype=np.int32), device

    def tolist(self) -> "GroupRows":
        """Return this list. Megatron's experts call this method of a tensor."""
        return self

    @functools.cached_property
    def map(self) -> RowMap:  # type: ignore[override]
        """Where the rows are, on the device: one copy to it and one launch."""
        table = torch.from_numpy(self._table).to(self._device, non_blocking=True)
        rows = sum(self)
        numbers = _numbers(1 << rows.bit_length(), self._device)[:rows]
        return RowMap(torch.searchsorted(table[3], numbers, right=True, out_int32=True), table)


class DeviceRows(_PaddedRows):
    """Rows of experts whose numbers only the device knows, so that the host need not wait for them.

    The padded rows are as many as they can be at most. The last ones may belong to no expert: grouped products leave
    them as they are, and nothing reads them.

    Args:
        counts: number of rows of each expert, integers [experts] on the device.
        unpadded: their sum.
        backwards: see :class:`_PaddedRows`.
    """

    moves = True

    def __init__(self, counts: Tensor, unpadded: int, *, backwards: bool) -> None:
        self.backwards, self.unpadded, self._experts = backwards, unpadded, len(counts)
        rows = (unpadded + (TILE - 1) * len(counts)) // TILE * TILE
        self.map = _functions(counts).of_counts(counts, rows, backwards=backwards)

    def __len__(self) -> int:
        return self._experts


Rows = GroupRows | DeviceRows


def _functions(x: Tensor) -> Any:
    """Return what moves rows on the device of x."""
    if not has_kernels(x):
        return RowMap
    from snip_megatron.numerics.quantize.kernels import quantize

    return quantize


@functools.lru_cache(maxsize=16)  # a forward that is computed again has the same rows
def group_rows(counts: tuple[int, ...], device: torch.device, *, backwards: bool = False) -> GroupRows:
    """Return the rows of experts that have ``counts`` rows without padding."""
    return GroupRows(counts, device, backwards=backwards)


def rows_of(splits: Sequence[int] | Rows, device: torch.device) -> Rows:
    """Return ``splits`` as the rows of experts. Numbers of rows become rows that need no padding."""
    return splits if isinstance(splits, Rows) else group_rows(tuple(splits), device)


@functools.lru_cache(maxsize=4)
def _numbers(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, dtype=torch.int32, device=device)


class GroupLoop:
    """Products of the rows of all experts, ordered by expert, with one weight [N, K] an expert.

    Both functions are methods of a :class:`snip_megatron.numerics.products.backend.GemmBackend`.

    Attributes:
        pads: whether the number of rows of every expert must be a multiple of the width of a tile.
        in_one_launch: formats whose fprop and dgrad of all experts are one launch.
        wgrad_in_one_launch: formats whose wgrad of all experts is one launch.
    """

    pads = False
    in_one_launch: frozenset[Format] = frozenset()
    wgrad_in_one_launch: frozenset[Format] = frozenset()

    def __init__(self, quantize: Callable[..., OperandPair], multiply: Callable[..., Tensor]) -> None:
        self._quantize = quantize
        self._multiply = multiply

    def quantize_rows(self, x: Tensor, splits: Sequence[int] | Rows, spec: OperandSpec) -> OperandPair:
        """Return X [rows, K] or G [rows, N] as the operands of two products.

        ``splits`` are the rows of each expert, and may be 0. Every expert's keys are derived from those of ``spec``.
        """
        assert not isinstance(splits, DeviceRows)
        rows = torch.split(x, list(splits))
        return by_side([self.quantize_expert(e, part, of_expert(spec, e)) for e, part in enumerate(rows)], spec)

    def quantize_unpadded(self, x: Tensor, rows: Rows, spec: OperandSpec) -> OperandPair:
        """Do the same for the padded rows of x, which has no padding."""
        return self.quantize_rows(rows.pad(x), rows, spec)

    def takes_device_rows(self, formats: Formats) -> bool:
        """Return whether the three GEMMs of a linear in ``formats`` take :class:`DeviceRows`: each is one launch."""
        *input_formats, wgrad = formats
        return wgrad in self.wgrad_in_one_launch and self.in_one_launch.issuperset(input_formats)

    def quantize_weights(
        self, weights: Sequence[Tensor], spec: OperandSpec, cached: CachedPair | None = None
    ) -> OperandPair:
        """Return the weights [N, K] of all experts as the operands of fprop and of dgrad.

        Where the GEMMs are one launch each, what is quantised is written to ``cached``, an earlier result for the same
        weights and formats, if that is given.
        """
        assert cached is None
        return by_side([self.quantize_expert(e, weight, spec) for e, weight in enumerate(weights)], spec)

    def quantize_expert(self, expert: int, x: Tensor, spec: OperandSpec) -> OperandPair:
        """Return a matrix of one expert as the operands of its two products."""
        return self._quantize(x, spec)

    def fuses_swiglu(self, formats: FormatPair) -> bool:
        """Return whether :meth:`swiglu` and :meth:`swiglu_gradient` make operands in these formats."""
        return False

    def swiglu(self, y: Tensor, probs: Tensor, splits: Sequence[int] | Rows, spec: OperandSpec) -> OperandPair:
        """Return SwiGLU of y [rows, 2K] times ``probs``, FP32 [rows], as :meth:`quantize_rows` makes it."""
        raise NotImplementedError

    def swiglu_gradient(
        self, d: Tensor, y: Tensor, probs: Tensor, splits: Sequence[int] | Rows, spec: OperandSpec
    ) -> tuple[OperandPair, Tensor]:
        """Return the gradient of y as :meth:`quantize_rows` makes it, and that of ``probs``, from that of the result of
        :meth:`swiglu`, d [rows, K].
        """
        raise NotImplementedError

    def multiply(self, gemm: Gemm, a: Any, b: Any, dtype: torch.dtype) -> Tensor:
        """Compute fprop or dgrad of every expert: Y [rows, N] or ∂L/∂X [rows, K] in ``dtype``.

        ``a`` is X or G, as :meth:`quantize_rows` made it, ``b`` the weights, as :meth:`quantize_weights` made them.
        """
        return torch.cat([self._multiply(gemm, *each, dtype) for each in zip(a, b, strict=True)])

    def accumulate(self, g: Any, x: Any, out: Sequence[Tensor] | None) -> Sequence[Tensor]:
        """Compute wgrad of every expert, FP32 [N, K] each. They are added to ``out`` if given, which is returned."""
        operands = zip(g, x, [None] * len(g) if out is None else out, strict=True)
        return [self._multiply(Gemm.WGRAD, left, right, torch.float32, grad) for left, right, grad in operands]


def by_side(pairs: Sequence[OperandPair], spec: OperandSpec) -> OperandPair:
    """Return the rowwise operands of all experts, and the columnwise ones. None stands for a GEMM that does not run."""
    rowwise, columnwise = zip(*pairs, strict=True)
    return None if spec.rowwise is None else rowwise, None if spec.columnwise is None else columnwise


def of_expert(spec: OperandSpec, expert: int) -> OperandSpec:
    """Return how the rows of one expert are quantised."""
    keys = spec.keys
    if keys is None or not isinstance(keys.dgrad, int) or not isinstance(keys.wgrad, int):
        return spec
    expert_keys = keys._replace(dgrad=derive_seed(keys.dgrad, expert), wgrad=derive_seed(keys.wgrad, expert))
    return spec._replace(keys=expert_keys)
