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
    ROUNDING,
    Blame,
    Checkpoint,
    Fault,
    PassFigures,
)
from snip_megatron.sensitivity.outliers import LIMIT, RATIO


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a verdict stands: the step as the host counts it, its checkpoint, and the folder of files."""

    step: int
    checkpoint: Checkpoint | None
    folder: Path


StateCheck = Callable[[KernelCheck], AbstractContextManager[None]]
"""Returns a context that checks what the host does beside GEMMs, and notes faults."""


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

    ``microbatches`` and ``seconds``, after which no more suspects are tried, are those of :class:`Passes`.
    """
    started = time.perf_counter()
    passes = Passes(job, host, registry, step, microbatches, seconds)
    with step.undisturbed():
        try:
            blame = _blame(passes, place, state)
        finally:
            registry.start_step(step.step)
    return dataclasses.replace(blame, seconds=round(time.perf_counter() - started, 3))


def _blame(passes: Passes, place: Place, state: StateCheck) -> Blame:
    job, context = passes.job, passes.registry.context
    # The job's own kernels run first, as a training's first step does after loading.
    check = KernelCheck(job.formats_of, job.numerics, job.bound)
    with state(check), job.watch(context, check):
        kernels = PassResult([], passes.gradients())
    kernels = kernels._replace(losses=passes.losses())
    effects = RoundingEffects(job.formats_of, job.numerics, len(passes.registry.names), passes.host.device)
    with passes.forced(lambda _: ALL_BF16):
        plain = PassResult(passes.losses(), [])
        with watched(context, effects):
            plain = plain._replace(gradients=passes.gradients())
    with passes.forced(job.formats_of):
        rounded = PassResult(passes.losses(), passes.gradients())
    figures = {
        name: passes.figures(each) for name, each in {"bf16": plain, "reference": rounded, "kernels": kernels}.items()
    }
    rise = passes.rise(rounded.losses, plain.losses)
    suspects = Suspects(passes, effects.reduced(), sqnr_over_ranks(check.sqnr))
    fault, is_local = first_of_ranks(check.first)
    verdict, reason = _verdict(fault, figures, rise, suspects)
    blame = Blame(
        place.step, place.checkpoint, job.kind, job.description, verdict, reason, figures, harm=suspects.harm,
        thresholds=_thresholds(rise),
    )  # fmt: skip
    if fault is not None:
        return dataclasses.replace(blame, bug=_save_inputs(fault, check.first if is_local else None, place))
    if verdict != ROUNDING:
        return blame
    culprits, trials = find_culprits(passes, suspects, plain, rounded, rise)
    return dataclasses.replace(blame, culprits=tuple(culprits), bisection=tuple(trials))


def _thresholds(rise: Rise) -> dict[str, float]:
    """Return the measured rise of the loss, and the limits of the verdict."""
    rise_of_loss = rise.mean if math.isfinite(rise.mean) else 1e3
    limits = {f"error_of_{bits}_bits": limit for bits, limit in LIMIT.items()}
    return {"rise": rise_of_loss, "rise_error": rise.error, "healthy_rise": rise.healthy, "ratio": RATIO, **limits}


def _verdict(
    fault: Fault | None, figures: Mapping[str, PassFigures], rise: Rise, suspects: Suspects
) -> tuple[str, str]:
    if fault is not None:
        gemm = "" if fault.gemm is None else f":{fault.gemm}"
        return BUG, f"{fault.linear}{gemm} on rank {fault.rank} is not what its inputs give: {fault.where}"
    if not figures["bf16"].finite:
        return NOT_PRECISION, "the loss or the gradients are not finite in bf16 either"
    if not figures["reference"].finite:
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
