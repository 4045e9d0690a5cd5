"""The measured rise of the loss: what each new map does to the loss of a step's own tokens, before one is adopted.

A forward in bf16 and one under each map run on the same microbatches of a training step, those of a probe. The rise of
a map is the mean over tokens of the difference of their losses. It is the effect of rounded fprops alone. What rounded
dgrads and wgrads do to later losses cannot be measured in one step, so that maps are compared by the measured rise plus
what their scores predict for dgrads and wgrads. Of a plan of several phases the map of the first one is measured.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from snip_megatron.layers.context import Override
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.precision import Format, Gemm, PrecisionMap
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.exchange import Transaction, UpdateDroppedError, all_reduced
from snip_megatron.runtime.host import Host, HostStep
from snip_megatron.runtime.solving import Candidate
from snip_megatron.sensitivity.policies import in_nats

ERRORS = 2
"""Number of standard errors by which a measured rise must exceed the bound before a map is rejected."""

ENOUGH_TOKENS = 8192
"""Number of tokens of a microbatch that a rank measures on, at most."""


@dataclass(frozen=True)
class Rise:
    """The measured rise of the loss under a map, in nats."""

    mean: float  # mean over tokens of the loss under the map minus that in bf16
    error: float | None  # standard error of ``mean``. None with fewer than two tokens
    tokens: int

    @classmethod
    def of(cls, tokens: float, total: float, squares: float) -> "Rise":
        """Return the rise from sums over tokens: their number, which is not 0, Σd and Σd²."""
        mean = total / tokens
        variance = max(0.0, squares - total * mean) / (tokens - 1) if tokens > 1 else None
        return cls(mean, None if variance is None else math.sqrt(variance / tokens), round(tokens))


@dataclass(frozen=True)
class Comparison:
    """The candidates of an update and their measured rises, equal on all ranks."""

    candidates: Sequence[Candidate]
    rises: Sequence[Rise]
    bound: float | None  # the largest loss that the budget allows. None if it allows any

    def _loss(self, index: int, errors: float = 0.0) -> float:
        """Return the loss that the budget bounds, with the rise measured and ``errors`` standard errors added."""
        candidate, rise = self.candidates[index], self.rises[index]
        return candidate.weight * (rise.mean + errors * (rise.error or 0.0) + candidate.backward)

    def breaks_bound(self, index: int) -> bool:
        """Whether a candidate is above the bound by more than the error of its measurement."""
        return self.bound is not None and self._loss(index, -ERRORS) > self.bound

    @property
    def best(self) -> int:
        """Index of the candidate with the smallest loss, preferably one within the bound. Ties go to the first."""
        return min(range(len(self.rises)), key=lambda i: (self.breaks_bound(i), self._loss(i)))

    def corrected(self, correction: float) -> float:
        """Return the factor of later predictions, if these were predicted with the factor ``correction``.

        Predictions are multiplied by measured / predicted if the map of the update's own policy, which is the first
        candidate, breaks the bound. If its rise is below the prediction by more than the error, the factor falls in the
        same proportion, but not below 1.
        """
        rise, predicted = self.rises[0], self.candidates[0].predicted
        if self.bound is None or not predicted:
            return correction
        if self.breaks_bound(0) or rise.mean + ERRORS * (rise.error or 0.0) < predicted:
            return max(1.0, float(f"{correction * rise.mean / predicted:.3e}"))
        return correction

    def fields(self, index: int) -> dict[str, Any]:
        """Return the fields of events about a candidate."""
        candidate, rise = self.candidates[index], self.rises[index]
        return {
            "policy": candidate.policy,
            "predicted_rise": candidate.predicted,
            "predicted_backward": candidate.backward,
            "measured_rise": rise.mean,
            "measured_error": rise.error,
            "measured_tokens": rise.tokens,
        }

    def line(self, index: int) -> str:
        """Return what the log says about a candidate."""
        candidate, rise = self.candidates[index], self.rises[index]
        error = " nats" if rise.error is None else f" ± {rise.error:.1g} nats on {rise.tokens} tokens"
        predicted = "" if candidate.predicted is None else f", predicted {candidate.predicted:.3g}"
        return f"raises the loss by {rise.mean:.3g}{error}{predicted}"


def bound_of(config: SnipConfig) -> float | None:
    """Return the largest loss in nats that a run's budget allows. None if it bounds none."""
    bounded = config.budget.kind == "loss" and in_nats(config.policy, config.q)
    return config.budget.value if bounded else None


def enough_sequences(sequences: int, tokens: int) -> int:
    """Return how many of ``sequences``, with so many ``tokens`` each, a rank measures on: half, until they are few.

    More tokens reduce the standard error, but not the effect that all tokens share: one rounding of the weights, whose
    effect of first order has either sign (``rises_1b_h200_2026-11-29.json``: ±.6 mnat, of which tokens are .3).
    """
    while sequences % 2 == 0 and sequences * tokens > ENOUGH_TOKENS:
        sequences //= 2
    return sequences


def measure_rises(
    maps: Sequence[PrecisionMap],
    host: Host,
    registry: LinearRegistry,
    step: HostStep,
    microbatches: int,
    sequences: int,
    update: Transaction,
) -> list[Rise]:
    """Return the rise of each map, from forwards on the first microbatches of ``step``. Collective.

    Maps with the same formats of fprop share one forward. Linears multiply as in probes: outside of CUDA graphs, with
    quantised weights that are dropped afterwards.

    Raises UpdateDroppedError on all ranks if a forward fails on a rank, or if the loss leaves out all tokens or is not
    finite at one.
    """
    context = registry.context
    sums = torch.zeros(1 + 2 * len(maps), dtype=torch.float64, device=host.device)

    def forward(precision_map: PrecisionMap) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Return the losses of this rank. None if it has failed."""
        overrides = {name: Override(precision_map.formats_of(name)) for name in registry.names}

        def prepare() -> None:
            registry.start_step(step.step)  # frees the weights of the forward before
            step.prepare(microbatches, sequences)
            context.override = lambda handle: overrides[handle.name]

        update.together("rise", prepare)
        return update.attempt(step.losses) if host.passes_alone else step.losses()

    def add() -> None:
        reference, *of_maps = (forwards[key] or [] for key in fprops)
        sums[0] = sum(weight.double().sum() for _, weight in reference)
        for index, losses in enumerate(of_maps):
            for (loss, weight), (plain, _) in zip(losses, reference, strict=True):
                rise = loss.double() - plain.double()
                sums[1 + 2 * index] += (weight * rise).sum()
                sums[2 + 2 * index] += (weight * rise.square()).sum()
        if host.groups.tp_rank:  # the ranks of a tensor parallel group have the same losses
            sums.zero_()

    bf16_and_maps = (PrecisionMap({}), *maps)
    fprops = [tuple(each.format_of(name, Gemm.FPROP) for name in registry.names) for each in bf16_and_maps]
    forwards: dict[tuple[Format, ...], list[tuple[torch.Tensor, torch.Tensor]] | None] = {}
    with ExitStack() as stack:
        stack.enter_context(step.undisturbed())
        stack.callback(registry.start_step, step.step)
        stack.callback(setattr, context, "override", None)
        for key, precision_map in zip(fprops, bf16_and_maps, strict=True):
            if key not in forwards:
                forwards[key] = forward(precision_map)
        update.together("rise", add)
    tokens, *of_maps = all_reduced(sums).tolist()
    if not tokens or not all(map(math.isfinite, of_maps)):
        what = "the loss under a map is not finite" if tokens else "the loss leaves out all tokens"
        raise UpdateDroppedError(f"rise: {what}", {"part": "rise"})
    return [Rise.of(tokens, *of_maps[2 * i : 2 * i + 2]) for i in range(len(maps))]
