"""How a matrix is quantised for the two GEMMs that read it.

A linear reads each of its matrices for two GEMMs. The *rowwise* operand is that of the GEMM that reduces over the
columns of the matrix, the *columnwise* operand that of the one that reduces over its rows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snip_megatron.numerics.quantize.formats import STOCHASTIC
from snip_megatron.numerics.quantize.hadamard import Rotation, turned
from snip_megatron.numerics.quantize.rounding import Key
from snip_megatron.precision import Format

OperandPair = tuple[Any, Any]
"""The rowwise and the columnwise operand of a matrix; None for a GEMM that does not run."""


class GradientKeys(NamedTuple):
    """Keys of the stochastic rounding of G. Every backward makes one, and a tuple is made faster than a dataclass.

    The random bits are a function of the key and of the global position of an element. Recomputation and other parallel
    layouts therefore draw the same bits.

    Attributes:
        dgrad, wgrad: keys of the two GEMMs that read G. A key is a 64-bit seed, or key words on the device. None: the
            GEMM does not round stochastically.
        cols: integer [N local], global indices of G's columns. None: 0, 1, …
        first_row: global index of G's first row. It is 0 unless G is a token shard.
        paired: whether neighbouring columns are pairs (2i, 2i + 1), for which kernels are others.
    """

    dgrad: Key | None
    wgrad: Key | None
    cols: Tensor | None = None
    first_row: int = 0
    paired: bool = False


class OperandSpec(NamedTuple):
    """How a matrix is quantised for the two GEMMs that read it.

    Attributes:
        rowwise, columnwise: formats of the two GEMMs; None if a GEMM does not run.
        weight: whether the matrix is a weight, which is quantised in blocks instead of tiles.
        amax: max|·| of the unsharded matrix, 0-dim FP32. It is required if the matrix is a shard and a format has one
            scale for the whole tensor.
        keys: keys of stochastic rounding; None unless the matrix is G.
        rotation: how the columnwise operand is transformed if its format has a Hadamard transform; None: with key 0.
    """

    rowwise: Format | None
    columnwise: Format | None
    weight: bool = False
    amax: Tensor | None = None
    keys: GradientKeys | None = None
    rotation: Rotation | None = None

    @property
    def formats(self) -> tuple[Format | None, Format | None]:
        """The formats of the rowwise and of the columnwise operand."""
        return self.rowwise, self.columnwise

    @property
    def seeds(self) -> tuple[Key | None, Key | None]:
        """The keys of stochastic rounding of the rowwise and of the columnwise operand; None: to nearest."""
        if self.keys is None:
            return None, None
        dgrad, wgrad = (fmt in STOCHASTIC for fmt in self.formats)
        return self.keys.dgrad if dgrad else None, self.keys.wgrad if wgrad else None

    def only(self, formats: Collection[Format]) -> OperandSpec:
        """Return the spec without the operands in other formats than ``formats``."""
        row, col = (fmt if fmt in formats else None for fmt in self.formats)
        return self._replace(rowwise=row, columnwise=col)

    def of(self, x: Tensor, axis: int) -> tuple[Tensor, dict[str, Any]]:
        """Return what is quantised of x [rows, cols] for the GEMM that reduces over ``axis`` (0 or 1), and how."""
        fmt, seed = self.formats[1 - axis], self.seeds[1 - axis]
        assert fmt is not None
        x, amax = turned(x, fmt, axis, self.rotation, self.amax, weight=self.weight)
        options: dict[str, Any] = {"format": fmt, "axis": axis, "block": self.weight, "tensor_amax": amax}
        if seed is not None and self.keys is not None:
            first, cols = self.keys.first_row, self.keys.cols
            options |= {"rounding": "stochastic", "seed": seed, "offset": (first, 0), "cols": cols}
        return x, options


@dataclass(frozen=True)
class CachedPair:
    """The two operands of a weight, which stay at the same addresses from step to step for CUDA graphs.

    Attributes:
        operands: what an earlier call returned for the same weight and formats. They are overwritten.
        current: int32 [1] on the device. If it is not zero, the operands are up to date and are not written.
    """

    operands: OperandPair
    current: Tensor

    def renew(self, made: OperandPair) -> OperandPair:
        """Copy the tensors of ``made`` into those of ``operands``, unless they are up to date, and return these."""
        for old, new in zip(self.operands, made, strict=True):
            if old is not None and new is not None:
                for kept, fresh in ((old.values, new.values), (old.scale, new.scale)):
                    if kept is not None:
                        kept, fresh = (t.view(torch.uint8) if t.itemsize == 1 else t for t in (kept, fresh))
                        kept.copy_(torch.where(self.current != 0, kept, fresh))
        return self.operands
