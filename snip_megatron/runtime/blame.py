"""The passes of ``--snip-blame``: what was wrong with one training step, a bug or rounding, and in which GEMM.

Nothing is trained. All passes run on the microbatches of the step with the same random states: in bf16, in the job's
formats by the reference's exact numerics, and by the job's own kernels, whose every product is compared with the
reference's of the same inputs. All ranks return the same verdict.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.precision import ALL_BF16
from snip_megatron.runtime.blame_passes import Job, Passes, PassResult, Rise
from snip_megatron.runtime.culprits import Suspects, find_culprits
from snip_megatron.runtime.gemm_check import KernelCheck, LocalFault, RoundingEffects, first_of_ranks, sqnr_over_ranks
from snip_megatron.runtime.host import Host, HostStep
from snip_megatron.runtime.watched import watched
from snip_megatron.sensitivity.blame import (
    BUG,
    NOT_PRECISION,
    PASSES,
    ROUNDING,
    UNFINISHED,
    Blame,
    Checkpoint,
    Fault,
    PassFigures,
    Weights,
)
from snip_megatron.sensitivity.outliers import LIMIT, RATIO, worst_part


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a verdict stands: the step as the host counts it, its checkpoint, the folder of files, and the weights."""

    step: int
    checkpoint: Checkpoint | None
    folder: Path
    weights: Weights | None = None


StateCheck = Callable[[KernelCheck], AbstractContextManager[None]]
"""Returns a context that checks what the host does beside GEMMs, and notes faults."""

_KERNELS_END, _EFFECTS_END = 0.4, 0.7
"""Shares of a bounded time after which no more kernels are compared, and no more effects of rounding measured."""


def blame_step(
    job: Job,
    host: Host,
    registry: LinearRegistry,
    step: HostStep,
    place: Place,
    state: StateCheck = lambda _: nullcontext(),
    *,
    microbatches: int | None = None,
    seconds: float = math.inf,
) -> Blame:
    """Return the verdict about ``step``. Random states, gradients and data order are restored. Collective.

    ``microbatches`` and ``seconds`` are those of :class:`Passes`. Where the time ends before a verdict is certain, the
    verdict is ``unfinished``.
    """
    started = time.perf_counter()
    passes = Passes(job, host, registry, step, microbatches, seconds)
    with step.undisturbed():
        try:
            blame = _blame(passes, place, state)
        finally:
            registry.start_step(step.step)
    return dataclasses.replace(
        blame,
        microbatches=passes.microbatches,
        step_microbatches=step.microbatches,
        seconds=round(time.perf_counter() - started, 3),
    )


def _blame(passes: Passes, place: Place, state: StateCheck) -> Blame:
    job, context = passes.job, passes.registry.context
    # The job's own kernels run first, as a training's first step does after loading.
    check = KernelCheck(job.formats_of, job.numerics, job.bound)
    effects = RoundingEffects(job.formats_of, job.numerics, len(passes.registry.names), passes.host.device)
    timed_check, timed_effects = passes.until(_KERNELS_END, check), passes.until(_EFFECTS_END, effects)
    with state(check), job.watch(context, timed_check):
        gradients = passes.gradients()
    results = {"kernels": PassResult(passes.losses(), gradients)}
    if not (is_late := passes.is_late):
        with passes.forced(lambda _: ALL_BF16):
            losses = passes.losses()
            with watched(context, timed_effects):
                results["bf16"] = PassResult(losses, passes.gradients())
        is_late = passes.is_late
    if not is_late:
        with passes.forced(job.formats_of):
            results["reference"] = PassResult(passes.losses(), passes.gradients())
    is_late = passes.on_any_rank(is_late or timed_check.is_late or timed_effects.is_late)
    figures = {name: passes.figures(results[name]) for name in PASSES if name in results}
    fault, is_local = first_of_ranks(check.first)
    blame = Blame(
        place.step, place.checkpoint, job.kind, job.description, UNFINISHED, "", figures, weights=place.weights
    )
    if "bf16" not in results:
        suspects, rise = None, None
    else:  # kernels without a fault compute what the reference does
        plain, rounded = results["bf16"], results.get("reference", results["kernels"])
        rise = passes.rise(rounded.losses, plain.losses)
        suspects = Suspects(passes, effects.reduced(), sqnr_over_ranks(check.sqnr))
        blame = dataclasses.replace(blame, harm=suspects.harm, thresholds=_thresholds(rise))
    if fault is not None:
        gemm = "" if fault.gemm is None else f":{fault.gemm}"
        reason = f"{fault.linear}{gemm} on rank {fault.rank} is not what its inputs give: {fault.where}"
        bug = _save_inputs(fault, check.first if is_local else None, place)
        return dataclasses.replace(blame, verdict=BUG, reason=reason, bug=bug)
    if suspects is None or rise is None:
        return dataclasses.replace(blame, reason=f"the time of {passes.seconds:g} s ended before the pass in bf16")
    verdict, reason = _verdict(figures, rise, suspects)
    if verdict == NOT_PRECISION and figures["bf16"].finite and is_late:
        verdict, reason = UNFINISHED, f"the time of {passes.seconds:g} s ended, and until then {reason}"
    blame = dataclasses.replace(blame, verdict=verdict, reason=reason)
    if verdict != ROUNDING:
        return blame
    culprits, trials = find_culprits(passes, suspects, plain, rounded, rise)
    confirmed = [index for index, culprit in enumerate(culprits) if culprit.confirmed]
    parts = effects.parts([(culprits[index].linear, culprits[index].gemm) for index in confirmed])
    for index, errors in zip(confirmed, parts, strict=True):
        expert, shard = worst_part(errors)
        culprits[index] = dataclasses.replace(culprits[index], expert=expert, shard=shard)
    return dataclasses.replace(blame, culprits=tuple(culprits), bisection=tuple(trials))


def _thresholds(rise: Rise) -> dict[str, float]:
    """Return the measured rise of the loss, and the limits of the verdict."""
    rise_of_loss = rise.mean if math.isfinite(rise.mean) else 1e3
    limits = {f"error_of_{bits}_bits": limit for bits, limit in LIMIT.items()}
    return {"rise": rise_of_loss, "rise_error": rise.error, "healthy_rise": rise.healthy, "ratio": RATIO, **limits}


def _verdict(figures: Mapping[str, PassFigures], rise: Rise, suspects: Suspects) -> tuple[str, str]:
    """Return the verdict about a step whose kernels have no fault."""
    if not figures["bf16"].finite:
        return NOT_PRECISION, "the loss or the gradients are not finite in bf16 either"
    if not figures["reference" if "reference" in figures else "kernels"].finite:
        return ROUNDING, "the loss or the gradients are not finite in the job's formats, and they are in bf16"
    if not rise.is_healthy:
        return ROUNDING, (
            f"rounding raises the loss by {rise.mean:.4g} nats; {rise.healthy:.2g} is healthy in these formats"
        )
    if suspects.reason is not None:
        return ROUNDING, suspects.reason
    kernels = "kernels are correct"
    if suspects.uncompared:
        first, count = suspects.uncompared[0], len(suspects.uncompared)
        kernels = f"kernels are correct, but for {count} linears that were not compared ({first})"
    return NOT_PRECISION, (
        f"rounding changes the loss by {rise.mean:.2g} nats, which is healthy in these formats, and {kernels}: look at"
        " the data, the learning rate and the model"
    )


def _save_inputs(fault: Fault, local: LocalFault | None, place: Place) -> Fault:
    """Write the inputs of a GEMM's fault on its rank. Returns the fault with the file's name."""
    if not fault.shape:
        return fault
    path = place.folder / f"blame_{place.step}_inputs.pt"
    if local is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: each.cpu() if isinstance(each, torch.Tensor) else each for name, each in local.tensors.items()}
        torch.save(tensors, path)
    return dataclasses.replace(fault, inputs=str(path))
