"""The passes of ``--snip-blame``: what was wrong with one training step, a bug or rounding, and in which GEMM.

Nothing is trained. All passes run on the microbatches of the step with the same random states: in bf16, in the job's
formats by the reference's exact numerics, and by the job's own kernels. Every product of these kernels is compared with
that of the reference on the same inputs. All ranks return the same verdict.

The effect of a format on one GEMM is measured on the inputs of the bf16 pass, which hold no errors of other GEMMs. If
the loss rose, sets of suspects are restored to bf16, by halves. The part of the rise that disappears was caused by the
restored set. Gradients of whole passes are not compared: after a few layers their errors depend on rounding alone, in
healthy steps too.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from snip_megatron.precision import Format, Gemm, PrecisionMap
from snip_megatron.runtime.blame_passes import Passes, PassResult, RoundingRise
from snip_megatron.runtime.gemm_check import (
    Effect,
    KernelCheck,
    Key,
    Part,
    RoundingEffects,
)
from snip_megatron.runtime.watched import watched
from snip_megatron.sensitivity.blame import (
    BUG,
    EXPLAINED,
    LIMIT,
    NOT_PRECISION,
    PASSES,
    RATIO,
    ROUNDING,
    UNFINISHED,
    Blame,
    Culprit,
    Harm,
    Trial,
    outliers,
    smallest_set,
    worst_part,
)

SINGLES = 4
"""Number of suspects that are restored one by one."""


StateCheck = Callable[[KernelCheck], AbstractContextManager[None]]
"""Returns a context that checks what the host does beside GEMMs, and notes faults."""

_KERNELS_END, _EFFECTS_END = 0.4, 0.7
"""Shares of a bounded time after which no more kernels are compared, and no more effects of rounding measured."""


def blame_step(passes: Passes, blame: Blame, folder: Path, state: StateCheck = lambda _: nullcontext()) -> Blame:
    """Return the verdict about the step of ``passes``. Random states, gradients and data order are restored.

    ``blame`` is the verdict so far, which says of which step and weights it is. ``folder`` is that of files. If the
    time of the passes ends before a verdict is certain, the verdict is ``unfinished``. Collective.
    """
    started, step = time.perf_counter(), passes.step
    with step.undisturbed():
        try:
            blame = _blame(passes, blame, folder, state)
        finally:
            passes.registry.start_step(step.step)
    blame = dataclasses.replace(blame, microbatches=passes.microbatches, step_microbatches=step.microbatches)
    return dataclasses.replace(blame, seconds=round(time.perf_counter() - started, 3))


def _blame(passes: Passes, blame: Blame, folder: Path, state: StateCheck) -> Blame:
    job, context = passes.job, passes.registry.context
    # The job's own kernels run first, as a training's first step does after loading.
    check = KernelCheck(job.formats_of, job.numerics, job.bound)
    effects = RoundingEffects(job.formats_of, job.numerics)
    check.end, effects.end = passes.end(_KERNELS_END), passes.end(_EFFECTS_END)
    with state(check), job.watch(context, check):
        gradients = passes.gradients()
    results = {"kernels": PassResult(passes.losses(), gradients)}
    if not passes.is_late:
        with passes.forced(PrecisionMap({})):
            losses = passes.losses()
            with watched(context, effects):
                results["bf16"] = PassResult(losses, passes.gradients())
        if not passes.is_late:
            with passes.forced(job.formats):
                results["reference"] = PassResult(passes.losses(), passes.gradients())
    is_late = passes.on_any_rank("reference" not in results or check.is_late or effects.is_late)
    figures = {name: passes.figures(results[name]) for name in PASSES if name in results}
    fault, is_local, sqnr = check.of_all_ranks()
    blame = dataclasses.replace(blame, passes=figures)
    if "bf16" in results:  # kernels without a fault compute what the reference does
        plain, rounded = results["bf16"], results.get("reference", results["kernels"])
        rise = passes.rise(rounded.losses, plain.losses)
        parts = effects.of_all_ranks()
        harms = harm_of_gemms(passes, parts, sqnr)
        limits = {f"error_of_{bits}_bits": limit for bits, limit in LIMIT.items()} | {"ratio": RATIO}
        measured = {"rise": rise.mean if math.isfinite(rise.mean) else 1e3, "rise_error": rise.error}
        blame = dataclasses.replace(blame, harm=harms, thresholds=measured | {"healthy_rise": rise.healthy} | limits)
    if fault is not None:
        gemm = "" if fault.gemm is None else f":{fault.gemm}"
        reason = f"{fault.linear}{gemm} on rank {fault.rank} is not what its inputs give: {fault.where}"
        if fault.shape:
            path = folder / f"blame_{blame.step}_inputs.pt"
            fault = dataclasses.replace(fault, inputs=str(path))
            if is_local:
                _save(check.tensors, path)
        return dataclasses.replace(blame, verdict=BUG, reason=reason, bug=fault)
    if "bf16" not in results:
        return dataclasses.replace(blame, reason=f"the time of {passes.seconds:g} s ended before the pass in bf16")
    harmed = outliers(harms)
    verdict, reason = _verdict(blame, rise, harmed)
    if verdict == NOT_PRECISION and figures["bf16"].finite and is_late:
        verdict, reason = UNFINISHED, f"the time of {passes.seconds:g} s ended, and until then {reason}"
    blame = dataclasses.replace(blame, verdict=verdict, reason=reason)
    if verdict != ROUNDING:
        return blame
    culprits, trials = find_culprits(passes, harms, harmed, plain, rounded, rise)
    for index, culprit in enumerate(culprits):
        if culprit.confirmed:
            of_culprit = parts[culprit.linear, culprit.gemm]
            expert, shard = worst_part({part: _squared_error(effect) for part, effect in of_culprit.items()})
            culprits[index] = dataclasses.replace(culprit, expert=expert, shard=shard)
    return dataclasses.replace(blame, culprits=tuple(culprits), bisection=tuple(trials))


def _verdict(blame: Blame, rise: RoundingRise, harmed: Mapping[Harm, float]) -> tuple[str, str]:
    """Return the verdict about a step whose kernels have no fault, and the reason."""
    figures = blame.passes
    if not figures["bf16"].finite:
        return NOT_PRECISION, "the loss or the gradients are not finite in bf16 either"
    if not figures["reference" if "reference" in figures else "kernels"].finite:
        return ROUNDING, "the loss or the gradients are not finite in the job's formats, and they are in bf16"
    if not rise.is_healthy:
        return ROUNDING, (
            f"rounding raises the loss by {rise.mean:.4g} nats; {rise.healthy:.2g} is healthy in these formats"
        )
    if harmed:
        worst = max(harmed, key=lambda harm: harmed[harm])
        return ROUNDING, (
            f"{worst.linear}:{worst.gemm} has a relative error of {worst.error:.1%}, more than is healthy beside the"
            " others"
        )
    uncompared = sorted({each.linear for each in blame.harm if each.bits < 16 and each.sqnr_of_kernel is None})
    kernels = "kernels are correct"
    if uncompared:
        kernels += f", but for {len(uncompared)} linears that were not compared ({uncompared[0]})"
    return NOT_PRECISION, (
        f"rounding changes the loss by {rise.mean:.2g} nats, which is healthy in these formats, and {kernels}: look at"
        " the data, the learning rate and the model"
    )


def _save(tensors: Mapping[str, Any], path: Path) -> None:
    """Write the inputs and results of a GEMM."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: each.cpu() if isinstance(each, torch.Tensor) else each for name, each in tensors.items()}, path)


# -- culprits ----------------------------------------------------------------------------------------------------------
def harm_of_gemms(
    passes: Passes, parts: Mapping[Key, Mapping[Part, Effect]], sqnr: Mapping[Key, float]
) -> tuple[Harm, ...]:
    """Return the figures of all GEMMs of the model, of which ``parts`` has those that are quantised.

    ``sqnr`` has the ratios of those that were compared.
    """
    keys = [(name, gemm.value) for name in passes.registry.names for gemm in Gemm]
    effects = {key: Effect(*map(sum, zip(Effect(), *parts.get(key, {}).values(), strict=True))) for key in keys}
    errors = {key: min(math.sqrt(_squared_error(effect)), 1e3) for key, effect in effects.items()}
    total = sum(error**2 for error in errors.values()) or 1.0
    # The rise of the loss by the error of one fprop, to second order by the Fisher information.
    first, second = passes.scale, 0.5 * passes.tokens * passes.scale**2
    return tuple(
        Harm(
            linear,
            gemm,
            format=passes.job.formats.format_of(linear, Gemm(gemm)).value,
            share=errors[linear, gemm] ** 2 / total,
            sqnr_of_kernel=sqnr.get((linear, gemm)),
            operand_mse=_finite(effect.mse / max(effect.products, 1.0)),
            underflow=_finite(effect.underflow / max(effect.products, 1.0)),
            loss_rise=_finite(first * effect.loss + second * effect.fisher),
            error=errors[linear, gemm],
        )
        for (linear, gemm), effect in effects.items()
    )


def _squared_error(effect: Effect) -> float:
    """Return the squared error of a result relative to the result. Infinite if one of both is not finite."""
    if not math.isfinite(effect.error) or not math.isfinite(effect.signal):
        return math.inf
    return effect.error / effect.signal if effect.signal else 0.0


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def find_culprits(
    passes: Passes,
    harms: Sequence[Harm],
    harmed: Mapping[Harm, float],
    plain: PassResult,
    rounded: PassResult,
    rise: RoundingRise,
) -> tuple[list[Culprit], list[Trial]]:
    """Return the suspects, the worst first, and the passes that confirmed them. Collective.

    ``harms`` has the figures of all GEMMs, and ``harmed`` the :func:`outliers` among them.
    """
    by_loss = not rise.is_healthy
    # No other GEMM than fprop changes the loss of its own step.
    ranked = [harm for harm in harms if harm.bits < 16 and (harm.gemm == Gemm.FPROP.value or not by_loss)]
    ranked.sort(key=lambda harm: (-harmed.get(harm, 0.0), -(harm.loss_rise if by_loss else harm.error)))
    if not by_loss:
        total = sum(harmed.values()) or 1.0
        shares = {harm: harmed.get(harm, 0.0) / total for harm in ranked}
        confirmed = [harm for harm in ranked if harm in harmed]
        trials = [] if passes.is_late else [_trial_of_gradients(passes, confirmed, plain, rounded)]
    else:
        of_sets = dict[frozenset[Harm], float]()  # set of GEMMs → share of the unhealthy rise that it explains

        def explained(restored: Sequence[Harm]) -> float:
            """Return the share of a set, which takes one pass. 0 if no time is left for it. Collective."""
            gemms = frozenset(restored)
            if gemms not in of_sets and not passes.is_late:
                of_sets[gemms] = _explained_share(passes, restored, plain, rise)
            return of_sets.get(gemms, 0.0)

        shares = {harm: explained([harm]) for harm in ranked[:SINGLES]}
        ranked.sort(key=lambda harm: -shares.get(harm, -math.inf))
        confirmed = smallest_set(ranked, explained)
        if passes.is_late and of_sets.get(frozenset(confirmed), 0.0) < EXPLAINED:  # passes were left out
            enough = [restored for restored, share in of_sets.items() if share >= EXPLAINED]
            smallest = min(enough, key=len, default=frozenset[Harm]())
            confirmed = [harm for harm in ranked if harm in smallest]
        shares |= {harm: explained([harm]) for harm in confirmed[:SINGLES]}
        ranked.sort(key=lambda harm: (harm not in confirmed, -shares.get(harm, -math.inf)))
        trials = [Trial(len(restored), share) for restored, share in of_sets.items()]
    culprits = [
        Culprit(
            harm.linear, harm.gemm, None, None, harm.format, harm.loss_rise, harm.error, harm.share,
            shares.get(harm), harm in confirmed,
        )
        for harm in ranked
    ]  # fmt: skip
    return culprits, trials


def _explained_share(passes: Passes, restored: Sequence[Harm], plain: PassResult, rise: RoundingRise) -> float:
    """Return the share of the unhealthy rise of the loss that disappears if these GEMMs run in bf16. Collective."""
    with _restored(passes, restored):
        remaining = passes.rise(passes.losses(), plain.losses).mean
    if not math.isfinite(rise.mean):
        return float(math.isfinite(remaining))
    healthy = min(rise.healthy, rise.mean / 2)
    return min(1.0, (rise.mean - remaining) / (rise.mean - healthy))


def _trial_of_gradients(passes: Passes, restored: Sequence[Harm], plain: PassResult, rounded: PassResult) -> Trial:
    """Return the share of the error of all gradients that disappears if these GEMMs run in bf16. Collective."""
    with _restored(passes, restored):
        after = passes.gradient_error(passes.gradients(), plain.gradients)
    before = passes.gradient_error(rounded.gradients, plain.gradients)
    return Trial(len(restored), 1.0 - after / before if math.isfinite(after) and 0.0 < before < math.inf else 0.0)


def _restored(passes: Passes, restored: Sequence[Harm]) -> AbstractContextManager[None]:
    """Return a context in which these GEMMs run in bf16, and all others in the job's formats."""
    bf16 = {f"{harm.linear}:{harm.gemm}": Format.BF16 for harm in restored}
    return passes.forced(PrecisionMap({**passes.job.formats.choices, **bf16}))
