"""Trace of the loss's Hessian with respect to each linear's weight: Hutchinson's estimator on differences of gradients.

For random signs v, E[vᵀHv] = Tr(H). All linears are moved at once, W_j ± ε_j·v_j, and each reads its own part of the
change of the gradient: v_j·(g_j⁺ − g_j⁻) = 2 Σ_k ε_k v_jᵀH_jk v_k. The mean of this is 2 ε_j Tr(H_jj), because cross
terms vanish on average. So a probe vector costs two passes, whatever the number of linears. HAWQ-V2 (Dong et al. 2020)
computes Hv by a second backward. Central differences need no second backward, and run through any schedule and layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from snip_megatron.layers.context import LinearHandle
from snip_megatron.quantization import derive_seed, random_signs

STEP = {torch.bfloat16: 2.0**-5}
"""ε divided by the root mean square of W, by dtype.

In bf16 the step must be larger than the spacing of the numbers (2⁻⁸ to 2⁻⁷ of an element), and its effect larger than
the rounding noise of bf16 activations.
"""

FINE_STEP = 2.0**-9
"""The same for every other dtype. At this step the truncation error and the rounding error of float32 gradients are of
one size.
"""


class HutchinsonTrace:
    """Moves this rank's weights along probe vectors, reads gradients, and restores the weights bit for bit.

    Args:
        handles: this rank's linears. Their weights have DDP's ``main_grad``.
        w2: ‖W‖² of every unsharded weight, by name.
        seed: seed of the probe vectors. Signs belong to global elements, so all layouts draw the same.
        probes: number of probe vectors.
    """

    def __init__(self, handles: Sequence[LinearHandle], w2: Mapping[str, float], seed: int, probes: int) -> None:
        self._handles = list(handles)
        self._w2 = w2
        self._seed = seed
        self._probes = probes

    def measure(self, run_pass: Callable[[], None]) -> torch.Tensor:
        """Return this rank's share of the input of :func:`traces`, float64 [linears, 2, probes] on the weights' device.

        Row 0 holds v·(g⁺ − g⁻) of this rank's tokens and shard, row 1 holds v·(W⁺ − W⁻) of its shard.

        Args:
            run_pass: runs forward and backward of the same microbatches, from zeroed gradients.
        """
        sums = [torch.zeros(2, self._probes, dtype=torch.float64, device=h.weight.device) for h in self._handles]
        with self._restored() as kept:
            for probe in range(self._probes):
                for sign in (1.0, -1.0):
                    for handle, weight in zip(self._handles, kept, strict=True):
                        self._move(handle, weight, probe, sign)
                    run_pass()
                    for handle, share in zip(self._handles, sums, strict=True):
                        share[:, probe] += sign * self._read(handle, probe)
        return torch.stack(sums) if sums else torch.zeros(0, 2, self._probes, dtype=torch.float64)

    @contextmanager
    def _restored(self) -> Iterator[list[torch.Tensor]]:
        """Yield copies of the weights, and restore the weights at exit, after an exception too."""
        kept = [handle.weight.detach().clone() for handle in self._handles]
        try:
            yield kept
        finally:
            with torch.no_grad():
                for handle, weight in zip(self._handles, kept, strict=True):
                    handle.weight.copy_(weight)

    def _vector(self, handle: LinearHandle, probe: int) -> torch.Tensor:
        handle.to(handle.weight.device)
        return random_signs(derive_seed(self._seed, probe, handle.index), handle.out_features, handle.in_features)

    @torch.no_grad()
    def _move(self, handle: LinearHandle, weight: torch.Tensor, probe: int, sign: float) -> None:
        rms = (self._w2[handle.name] / (handle.n * handle.k)) ** 0.5
        step = sign * rms * STEP.get(weight.dtype, FINE_STEP)
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        handle.weight.copy_(wide + step * self._vector(handle, probe))

    def _read(self, handle: LinearHandle, probe: int) -> torch.Tensor:
        v = self._vector(handle, probe)
        gradient: torch.Tensor = handle.weight.main_grad  # type: ignore[attr-defined]
        return torch.stack([(v * t).sum(dtype=torch.float64) for t in (gradient, handle.weight.detach())])


def traces(sums: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
    """Return Tr(H) of each linear by each probe vector, float64 [linears, probes]. Their mean is the estimate.

    The step is the one that was taken, v·(W⁺ − W⁻)/2N on average. It differs from the intended one, because bf16 rounds
    it.

    Args:
        sums: :meth:`HutchinsonTrace.measure` summed over ranks, [linears, 2, probes]. Row 0 is in units of the mean
            token loss, row 1 counts each element of the weight once.
        elements: N, elements of each linear's unsharded weight.
    """
    moved = sums[:, 1] / elements[:, None]
    return torch.where(moved > 0, sums[:, 0] / torch.where(moved > 0, moved, 1.0), 0.0)
