"""Which GEMMs are to blame for what rounding did to a step: a ranking, confirmed by restoring suspects to bf16.

What a format does to a GEMM alone is measured on the inputs of the bf16 pass, where no other GEMM's errors are. If the
loss rose, sets of suspects are restored to bf16, by halves: what disappears with a set was caused by it. Errors of
gradients are not compared between whole passes: after a few layers they depend on rounding alone, healthy or not.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from snip_megatron.layers.context import LinearHandle
from snip_megatron.precision import Format, Formats, Gemm
from snip_megatron.runtime.blame_passes import Passes, PassResult, Rise
from snip_megatron.runtime.gemm_check import Effect
from snip_megatron.sensitivity.blame import EXPLAINED, Culprit, Harm, Trial, smallest_set
from snip_megatron.sensitivity.outliers import outliers

Key = tuple[str, str]

SINGLES = 4
"""Number of suspects that are restored one by one."""


class Suspects:
    """What the job's formats do to each GEMM of the model.

    Attributes:
        harm: Figures of all GEMMs.
        harmed: Linear and GEMM → how far its error is above what is healthy. Empty in a healthy step.
    """

    def __init__(self, passes: Passes, table: Sequence[Sequence[Effect]], sqnr: Mapping[tuple[str, Gemm], float]):
        names, formats = passes.registry.names, passes.job.formats
        effects = {
            (name, gemm.value): effect
            for name, row in zip(names, table, strict=True)
            for gemm, effect in zip(Gemm, row, strict=True)
        }
        format_of = {(name, gemm): formats.format_of(name, Gemm(gemm)) for name, gemm in effects}
        errors = {key: _error(effects[key]) for key, fmt in format_of.items() if fmt is not Format.BF16}
        operands = {key: effects[key].mse / max(effects[key].count, 1.0) for key in errors}
        self.harmed = outliers(errors, {key: format_of[key].bits for key in errors}, operands)
        energy = {key: min(errors.get(key, 0.0), 1e3) ** 2 for key in effects}
        total = sum(energy.values()) or 1.0
        self.harm = tuple(
            Harm(
                *key, format_of[key].value, energy[key] / total, sqnr.get((key[0], Gemm(key[1]))),
                _finite(effect.mse / max(effect.count, 1.0)), _finite(effect.underflow / max(effect.count, 1.0)),
                _finite(_rise_of(effect, passes)), min(errors.get(key, 0.0), 1e3),
            )
            for key, effect in effects.items()
        )  # fmt: skip

    @property
    def uncompared(self) -> list[str]:
        """Linears with a quantised GEMM whose kernels no rank has compared with the reference."""
        missing = (each for each in self.harm if each.format != Format.BF16.value and each.sqnr_of_kernel is None)
        return sorted({each.linear for each in missing})

    @property
    def reason(self) -> str | None:
        """What is unhealthy, in words. None if nothing is."""
        if not self.harmed:
            return None
        worst = max(self.harmed, key=lambda key: self.harmed[key])
        error = next(each.error for each in self.harm if (each.linear, each.gemm) == worst)
        return f"{worst[0]}:{worst[1]} has a relative error of {error:.1%}, more than is healthy beside the others"

    def ranked(self, *, by_loss: bool) -> list[Harm]:
        """Return the quantised GEMMs, the worst first: by their errors, or by what they add to the loss."""

        def worst_first(harm: Harm) -> tuple[float, float]:
            return -self.harmed.get((harm.linear, harm.gemm), 0.0), -(harm.loss_rise if by_loss else harm.error)

        quantised = [harm for harm in self.harm if harm.format != Format.BF16.value]
        if by_loss:  # no other GEMM changes the loss of its own step
            quantised = [harm for harm in quantised if harm.gemm == Gemm.FPROP.value]
        return sorted(quantised, key=worst_first)


def _rise_of(effect: Effect, passes: Passes) -> float:
    """Return the rise of the loss by the error of one fprop, to second order by the Fisher information."""
    return passes.scale * effect.loss + 0.5 * passes.tokens * passes.scale**2 * effect.fisher


def _error(effect: Effect) -> float:
    if not math.isfinite(effect.error) or not math.isfinite(effect.signal):
        return math.inf
    return math.sqrt(effect.error / effect.signal) if effect.signal else 0.0


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def find_culprits(
    passes: Passes, suspects: Suspects, plain: PassResult, rounded: PassResult, rise: Rise
) -> tuple[list[Culprit], list[Trial]]:
    """Return the suspects, the worst first, and the passes that confirmed them. Collective."""
    ranked = suspects.ranked(by_loss=not rise.is_healthy)
    if rise.is_healthy:
        total = sum(suspects.harmed.values()) or 1.0
        shares = {harm: suspects.harmed.get((harm.linear, harm.gemm), 0.0) / total for harm in ranked}
        confirmed = [harm for harm in ranked if shares[harm] > 0.0]
        trials = [] if passes.is_late else [_trial_of_gradients(passes, confirmed, plain, rounded)]
    else:
        explained = _ExplainedRise(passes, plain, rise)
        shares = {harm: explained([harm]) for harm in ranked[:SINGLES]}
        ranked.sort(key=lambda harm: -shares.get(harm, -math.inf))
        confirmed = smallest_set(ranked, explained)
        if passes.is_late and explained.shares.get(frozenset(confirmed), 0.0) < EXPLAINED:  # passes were left out
            enough = [restored for restored, share in explained.shares.items() if share >= EXPLAINED]
            smallest = min(enough, key=len, default=frozenset[Harm]())
            confirmed = [harm for harm in ranked if harm in smallest]
        shares |= {harm: explained([harm]) for harm in confirmed[:SINGLES]}
        ranked.sort(key=lambda harm: (harm not in confirmed, -shares.get(harm, -math.inf)))
        trials = [Trial(len(restored), share) for restored, share in explained.shares.items()]
    culprits = [
        Culprit(
            harm.linear, harm.gemm, None, None, harm.format, harm.loss_rise, harm.error, harm.share,
            shares.get(harm), harm in confirmed,
        )
        for harm in ranked
    ]  # fmt: skip
    return culprits, trials


class _ExplainedRise:
    """Returns the share of the unhealthy rise of the loss that disappears if GEMMs run in bf16. Calls are collective.

    Each set of GEMMs takes one pass. When no time is left for it, the share is 0.

    Attributes:
        shares: The sets so far.
    """

    def __init__(self, passes: Passes, plain: PassResult, rise: Rise) -> None:
        self._passes, self._plain, self._rise = passes, plain, rise
        self.shares: dict[frozenset[Harm], float] = {}

    def __call__(self, restored: Sequence[Harm]) -> float:
        gemms = frozenset(restored)
        if gemms not in self.shares and self._passes.is_late:
            return 0.0
        if gemms not in self.shares:
            self.shares[gemms] = self._measure(restored)
        return self.shares[gemms]

    def _measure(self, restored: Sequence[Harm]) -> float:
        passes, rise = self._passes, self._rise
        with _restored(passes, restored):
            rest = passes.rise(passes.losses(), self._plain.losses).mean
        if not math.isfinite(rise.mean):
            return float(math.isfinite(rest))
        healthy = min(rise.healthy, rise.mean / 2)
        return min(1.0, (rise.mean - rest) / (rise.mean - healthy))


def _trial_of_gradients(passes: Passes, restored: Sequence[Harm], plain: PassResult, rounded: PassResult) -> Trial:
    """Return the share of the error of all gradients that disappears if these GEMMs run in bf16. Collective."""
    with _restored(passes, restored):
        rest = passes.gradient_error(passes.gradients(), plain.gradients)
    before = passes.gradient_error(rounded.gradients, plain.gradients)
    return Trial(len(restored), 1.0 - rest / before if math.isfinite(rest) and 0.0 < before < math.inf else 0.0)


def _restored(passes: Passes, restored: Sequence[Harm]) -> AbstractContextManager[None]:
    """Return a context in which these GEMMs run in bf16, and all others in the job's formats."""
    keys = {(harm.linear, harm.gemm) for harm in restored}

    def formats_of(handle: LinearHandle) -> Formats:
        fprop, dgrad, wgrad = (
            Format.BF16 if (handle.name, gemm.value) in keys else fmt
            for gemm, fmt in zip(Gemm, passes.job.formats_of(handle), strict=True)
        )
        return fprop, dgrad, wgrad

    return passes.forced(formats_of)
