"""The quantised weight of one linear, or of all experts, computed once per optimizer step for all its microbatches.

:class:`WeightCache` keeps the operands in a Python object. :class:`GraphedWeight` keeps them at fixed addresses for
CUDA graphs.
"""

import operator
from collections.abc import Callable, Sequence

from torch import Tensor

from snip_megatron.numerics.quantize.operands import CachedPair, OperandPair, OperandSpec
from snip_megatron.precision import Format

Spec = Callable[[], OperandSpec]
"""Returns how the weight is quantised. It may be a collective of the ranks that share the weight, which must therefore
all quantise their shards in the same calls."""
Quantizer = Callable[[OperandSpec, CachedPair | None], OperandPair]


class WeightCache:
    """The operands of a weight, cached until step, formats, backend or weight change.

    The registry clears the cache at the end of a step and when a map is adopted. The cache also compares the tensor's
    version counter, which detects other changes such as the loading of a checkpoint. The counter alone is not enough:
    Megatron's distributed optimizer writes weights through a buffer, which does not increase it, and neither does a
    write to ``weight.data``.
    """

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._weights: Sequence[Tensor] = ()  # another tensor may get the address of one that was freed
        self._pair: OperandPair | None = None

    def get(
        self,
        backend: object,
        weights: Sequence[Tensor],
        formats: tuple[Format, Format],
        quantize: Callable[[], OperandPair],
    ) -> OperandPair:
        """Return the local shards of ``weights`` [N, K] as the operands of fprop and of dgrad in ``formats``.

        ``quantize`` makes them, for ``backend``. It may be a collective of the ranks that share the weights.
        """
        # Lists and maps, because there may be hundreds of weights, and their GEMMs wait for the host.
        key = (backend, formats, [w.data_ptr() for w in weights], [w._version for w in weights])
        same = len(self._weights) == len(weights) and all(map(operator.is_, self._weights, weights))
        if self._pair is None or not same or key != self._key:
            self.clear()
            pair = quantize()
            self._key, self._weights, self._pair = key, weights, pair
        assert self._pair is not None
        return self._pair

    def clear(self) -> None:
        """Discard the operands and free their memory."""
        self._key = self._pair = None
        self._weights = ()


class GraphedWeight:
    """The operands of a weight, in the same memory while the formats stay the same.

    Every forward launches the quantisation kernels. They write only if ``current`` is zero, as it is in the first
    microbatch of a step; the step hooks set it. One captured forward therefore serves all microbatches. ``current`` is
    int32 [1] on the weight's device, shared by the linears of a model chunk.
    """

    def __init__(self, current: Tensor) -> None:
        self._current = current
        self._key: tuple[object, ...] | None = None
        self._cached: CachedPair | None = None
        self._amax: Tensor | None = None

    def refresh(self, key: tuple[object, ...], quantize: Quantizer, spec: Spec) -> OperandPair:
        """Return the weight as :meth:`WeightCache.get` does, and quantise it unless ``current`` is set.

        ``quantize`` makes the operands, or writes them to the pair that it is given. ``spec`` is called in every
        forward. Operands are made anew where ``key`` is another one.
        """
        if key != self._key:
            self.clear()
        weight_spec = spec()
        if weight_spec.amax is not None:  # captured kernels read it at one address
            amax = weight_spec.amax
            self._amax = amax.clone() if self._amax is None else self._amax.copy_(amax)
            weight_spec = weight_spec._replace(amax=self._amax)
        if self._cached is None:
            self._key, self._cached = key, CachedPair(quantize(weight_spec, None), self._current)
        # This also runs when the operands are new, so that the kernel is compiled before a graph captures it.
        quantize(weight_spec, self._cached)
        return self._cached.operands

    @property
    def operands(self) -> OperandPair:
        """The operands that the latest forward returned."""
        assert self._cached is not None, "a backward without a forward"
        return self._cached.operands

    def clear(self) -> None:
        """Free the memory. Graphs that were captured with it must not run afterwards."""
        self._key = self._cached = self._amax = None
