"""The quantised weight of one linear, made once per optimizer step and used by all of its microbatches.

:class:`WeightCache` keeps the operands in a Python object. :class:`HeldWeight` keeps them at fixed addresses for CUDA
graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from torch import Tensor

from snip_megatron.gemm.backend import GemmBackend
from snip_megatron.gemm.operands import HeldSides, Side
from snip_megatron.precision import Format


class WeightCache:
    """The operands that a backend made of a weight, kept until step, formats, backend or weight change.

    The registry clears the cache at the end of a step and when a map is adopted. The cache also compares the tensor's
    version counter, which detects other changes such as the loading of a checkpoint. The counter alone is not enough:
    Megatron's distributed optimizer writes weights through a buffer, which does not increase it, and neither does a
    write to ``weight.data``.
    """

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._weight: weakref.ref[Tensor] | None = None  # another tensor may get the address of one that was freed
        self._sides: tuple[Side, Side] | None = None

    def get(
        self,
        backend: GemmBackend,
        weight: Tensor,
        fprop: Format,
        dgrad: Format,
        shared_amax: Callable[[Tensor, Iterable[Format]], Tensor | None] | None = None,
    ) -> tuple[Side, Side]:
        """Return the weight [N, K] as the operands of fprop and of dgrad.

        Args:
            backend: the backend that quantises the weight.
            weight: the local shard.
            fprop, dgrad: formats of the two GEMMs.
            shared_amax: returns the amax of the unsharded weight. It is called whenever the weight is quantised and may
                be a collective, so that all tensor parallel ranks must quantise their shards in the same calls. None:
                the amax of ``weight`` is used.
        """
        key = (backend, fprop, dgrad, weight.data_ptr(), weight._version)
        if self._sides is not None and self._weight is not None and self._weight() is weight and key == self._key:
            return self._sides
        self.clear()
        amax = None if shared_amax is None else shared_amax(weight, (fprop, dgrad))
        row, col = backend.quantize_weight(weight, fprop, dgrad, amax=amax)
        self._key, self._weight, self._sides = key, weakref.ref(weight), (row, col)
        return row, col

    def clear(self) -> None:
        """Discard the operands and free their memory."""
        self._key = self._weight = self._sides = None


class HeldWeight:
    """The operands that a backend made of a weight, kept in the same memory while the formats stay the same.

    Every forward launches the quantisation kernels. They write only if ``current`` is zero, as it is in the first
    microbatch of a step; the step hooks set it. One captured forward therefore serves all microbatches.

    Args:
        current: int32 [1] on the weight's device, shared by the linears of a model chunk.
    """

    def __init__(self, current: Tensor) -> None:
        self._current = current
        self._key: tuple[object, ...] | None = None
        self._held: HeldSides | None = None
        self._amax: Tensor | None = None

    def refresh(
        self,
        backend: GemmBackend,
        weight: Tensor,
        fprop: Format,
        dgrad: Format,
        shared_amax: Callable[[Tensor, Iterable[Format]], Tensor | None],
    ) -> tuple[Side, Side]:
        """Return the weight [N, K] as the operands of fprop and of dgrad, and quantise it unless ``current`` is set.

        The arguments are those of :meth:`WeightCache.get`. ``shared_amax`` is called in every forward.
        """
        key = (backend, fprop, dgrad, weight.data_ptr())
        if key != self._key:
            self.clear()
        amax = shared_amax(weight, (fprop, dgrad))
        if amax is not None:
            self._amax = _in_place(self._amax, amax)
        if self._held is None:
            row, col = backend.quantize_weight(weight, fprop, dgrad, amax=self._amax)
            self._key, self._held = key, HeldSides((row, col), self._current)
        # This also runs when the operands are new, so that the kernel is compiled before a graph captures it.
        backend.quantize_weight(weight, fprop, dgrad, amax=self._amax, held=self._held)
        return self._held.sides

    @property
    def sides(self) -> tuple[Side, Side]:
        """The operands that the latest forward returned."""
        assert self._held is not None, "a backward without a forward"
        return self._held.sides

    def clear(self) -> None:
        """Free the memory. Graphs that were captured with it must not run afterwards."""
        self._key = self._held = self._amax = None


def _in_place(kept: Tensor | None, amax: Tensor) -> Tensor:
    """Return ``kept`` with the value of ``amax``, or a copy at the first call. Captured kernels read it there."""
    return amax.clone() if kept is None else kept.copy_(amax)
