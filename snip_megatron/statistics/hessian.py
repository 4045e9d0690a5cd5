"""Trace of the loss's Hessian with respect to each linear's weight, by Hutchinson's estimator on gradients.

For random signs v, E[vᵀHv] = Tr(H). All linears are moved at once, W_j ± ε_j·v_j, and each reads its own part of the
change of the gradient: v_j·(g_j⁺ − g_j⁻) = 2 Σ_k ε_k v_jᵀH_jk v_k, whose mean is 2 ε_j Tr(H_jj): cross terms vanish on
average. So a probe vector costs two passes however many linears there are. HAWQ-V2 (Dong et al. 2020) takes Hv from a
second backward; central differences need none, and run through any schedule and layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from snip_megatron.layers.context import LinearHandle
from snip_megatron.quantization import derive_seed, random_signs

STEP = {torch.bfloat16: 2.0**-5}
"""ε over the root mean square of W, by dtype. In bf16 it must stand above the spacing of the numbers (2⁻⁸ to 2⁻⁷ of an
element) and its effect above the rounding noise of bf16 activations."""

FINE_STEP = 2.0**-9
"""The same for every other dtype: truncation and rounding of float32 gradients are then alike."""


class HutchinsonTrace:
    """Moves this rank's weights, reads gradients, puts the weights back bit by bit.

    Args:
        handles: this rank's linears; their weights have DDP's ``main_grad``.
        w2: ‖W‖² of every one, unsharded.
        seed: of the probe vectors, whose signs belong to global elements: all layouts draw the same.
        probes: how many vectors.
    """

    def __init__(self, handles: Sequence[LinearHandle], w2: Mapping[str, float], seed: int, probes: int) -> None:
        self._handles = list(handles)
        self._w2 = w2
        self._seed = seed
        self._probes = probes

    def measure(self, run_pass: Callable[[], None]) -> torch.Tensor:
        """This rank's additive share of :func:`traces`' input, float64 [linears, 2, probes] on the weights' device.

        ``run_pass`` runs the forward and backward of the same microbatches with zeroed gradients. The first row holds
        v·(g⁺ − g⁻) of this rank's tokens and shard, the second v·(W⁺ − W⁻) of its shard.
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
        """A copy of the weights, which are put back whatever happens."""
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
    """Tr(H) of each linear by each probe vector, float64 [linears, probes]; their mean is the estimate.

    The step that was taken, v·(W⁺ − W⁻)/2N on average, is used rather than the one that was meant: bf16 rounds it.

    Args:
        sums: of :meth:`HutchinsonTrace.measure`, added up over ranks, [linears, 2, probes]; the first row in units of
            the mean token loss, the second counted once per element of the weight.
        elements: N of each linear's unsharded weight.
    """
    moved = sums[:, 1] / elements[:, None]
    return torch.where(moved > 0, sums[:, 0] / torch.where(moved > 0, moved, 1.0), 0.0)
