"""Which GEMMs are to blame for what rounding did to a step: a ranking, confirmed by restoring suspects to bf16.

Suspects are ranked by what the formats do to each GEMM alone, on the inputs of the bf16 pass. The worst of them are
restored one by one, and then sets of them by halves. What disappears with a set was caused by it, whatever the ranking
says.
"""

import math
from collections.abc import Mapping, Sequence

from snip_megatron.layers.context import LinearHandle
from snip_megatron.precision import Format, Formats, Gemm
from snip_megatron.runtime.blame_passes import Harmed, Passes, PassResult
from snip_megatron.runtime.gemm_check import Effect
from snip_megatron.sensitivity.blame import Culprit, Harm, Trial, smallest_set

Choice = tuple[str, Gemm]

SINGLES = 4
"""Number of suspects that are restored one by one."""


def harm_of_gemms(
    passes: Passes, table: Sequence[Sequence[Effect]], harmed: Harmed, sqnr: Mapping[Choice, float]
) -> tuple[Harm, ...]:
    """Return the figures of all GEMMs."""
    names, scale, tokens = passes.registry.names, passes.scale, passes.tokens
    scores = {
        (name, gemm): _score(effect, gemm, harmed, scale, tokens)
        for name, row in zip(names, table, strict=True)
        for gemm, effect in zip(Gemm, row, strict=True)
    }
    total = sum(scores.values()) or 1.0
    harms = []
    for name, row in zip(names, table, strict=True):
        for gemm, effect in zip(Gemm, row, strict=True):
            count = max(effect.count, 1.0)
            harms.append(
                Harm(
                    name, gemm.value, passes.job.formats.format_of(name, gemm).value,
                    _finite(scores[name, gemm] / total), sqnr.get((name, gemm)), _finite(effect.mse / count),
                    _finite(effect.underflow / count), _finite(rise_of(effect, scale, tokens)),
                    _finite(math.sqrt(_relative(effect))),
                )
            )  # fmt: skip
    return tuple(harms)


def rise_of(effect: Effect, scale: float, tokens: float) -> float:
    """Return the rise of the loss by the error of one fprop, to second order by the Fisher information."""
    return scale * effect.loss + 0.5 * tokens * scale**2 * effect.fisher


def _relative(effect: Effect) -> float:
    return effect.error / effect.signal if effect.signal else 0.0


def _score(effect: Effect, gemm: Gemm, harmed: Harmed, scale: float, tokens: float) -> float:
    """Return what ranks the suspects: the rise of the loss if that is what is unhealthy, otherwise the error."""
    if not math.isfinite(harmed.rise) or not harmed.by_loss > 0.0:
        return _finite(_relative(effect), 1e3)
    if gemm is not Gemm.FPROP:
        return 0.0
    second = 0.5 * tokens * scale**2 * effect.fisher
    return _finite(max(0.0, scale * effect.loss) + second, 1e3)


def _finite(value: float, otherwise: float = 0.0) -> float:
    return value if math.isfinite(value) else otherwise


def find_culprits(
    passes: Passes, harm: Sequence[Harm], table: Sequence[Sequence[Effect]], plain: PassResult, harmed: Harmed
) -> tuple[list[Culprit], list[Trial]]:
    """Return the suspects, the worst first, and the passes that confirmed them. Collective."""
    of_choice = {(each.linear, Gemm(each.gemm)): each for each in harm if each.format != Format.BF16.value}
    ranked = sorted(of_choice, key=lambda choice: -of_choice[choice].share)
    with_loss = not math.isfinite(harmed.rise) or harmed.by_loss > 0.0
    if with_loss:  # no other GEMM changes the loss of its own step
        ranked = [choice for choice in ranked if choice[1] is Gemm.FPROP]
    trials: list[Trial] = []
    known: dict[frozenset[Choice], float] = {}

    def explained(restored: Sequence[Choice]) -> float:
        key = frozenset(restored)
        if key not in known:
            known[key] = _explained(passes, key, plain, harmed, with_loss=with_loss)
            trials.append(Trial(len(key), known[key]))
        return known[key]

    shares = {choice: explained([choice]) for choice in ranked[:SINGLES]}
    ranked = sorted(shares, key=lambda choice: -shares[choice]) + [each for each in ranked if each not in shares]
    chosen = smallest_set(ranked, explained)
    if len(chosen) > 1:
        shares |= {choice: explained([choice]) for choice in chosen[:SINGLES]}
    order = sorted(chosen, key=lambda choice: -shares.get(choice, 0.0))
    culprits = []
    for choice in order + [each for each in ranked if each not in chosen]:
        figures = of_choice[choice]
        culprits.append(
            Culprit(
                figures.linear, figures.gemm, None, None, figures.format, figures.loss_rise, figures.error,
                figures.share, shares.get(choice), choice in chosen,
            )
        )  # fmt: skip
    return culprits, trials


def _explained(
    passes: Passes, restored: frozenset[Choice], plain: PassResult, harmed: Harmed, *, with_loss: bool
) -> float:
    """Return the share of the harm that disappears if these GEMMs run in bf16. Collective."""

    def formats_of(handle: LinearHandle) -> Formats:
        fprop, dgrad, wgrad = (
            Format.BF16 if (handle.name, gemm) in restored else fmt
            for gemm, fmt in zip(Gemm, passes.job.formats_of(handle), strict=True)
        )
        return fprop, dgrad, wgrad

    with passes.forced(formats_of):
        if with_loss:
            rise, _ = passes.rise(passes.losses(), plain.losses)
            if not math.isfinite(harmed.rise):
                return float(math.isfinite(rise))
            return min(1.0, (harmed.rise - rise) / (harmed.rise - min(harmed.healthy_rise, harmed.rise / 2)))
        result = PassResult(plain.losses, passes.gradients())
    rest = passes.compare(result, plain).by_gradient
    return 1.0 - rest / harmed.by_gradient
