"""The quantised weight of one linear, made once an optimizer step and used by all of its microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from snip_megatron.gemm.backend import GemmBackend
from snip_megatron.gemm.operands import Side
from snip_megatron.precision import Format


class WeightCache:
    """Holds what a backend made of a weight until the step, the formats, the backend or the weight change.

    The registry clears it where weights change (a step's end) and where maps do. A tensor's own version is watched as
    well, for changes that nobody announces, such as the loading of a checkpoint; it would not do alone, because
    Megatron's distributed optimizer writes weights through a buffer that does not touch it.
    """

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._sides: tuple[Side, Side] | None = None

    def get(
        self,
        backend: GemmBackend,
        weight: Tensor,
        fprop: Format,
        dgrad: Format,
        shared_amax: Callable[[Tensor, Iterable[Format]], Tensor | None] | None = None,
    ) -> tuple[Side, Side]:
        """The weight [N, K] as fprop and as dgrad take it.

        ``shared_amax`` gives the amax of the whole of a sharded weight, when that is quantised: a collective, so tensor
        parallel ranks must change their weights alike.
        """
        key = (backend, fprop, dgrad, weight.data_ptr(), weight._version)
        if self._sides is None or key != self._key:
            amax = None if shared_amax is None else shared_amax(weight, (fprop, dgrad))
            row, col = backend.quantize_weight(weight, fprop, dgrad, amax=amax)
            self._key, self._sides = key, (row, col)
        return self._sides

    def clear(self) -> None:
        """Forget it, and free its memory."""
        self._key = self._sides = None
