"""The passes of ``--snip-blame``: what was wrong with one training step, a bug or rounding, and in which GEMM.

Nothing is trained. All passes run on the microbatches of the step with the same random states: in bf16, in the job's
formats by the reference's exact numerics, and by the job's own kernels, whose every product is compared with the
reference's of the same inputs. All ranks return the same verdict.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from snip_megatron.layers.context import LinearHandle, Override, StepContext
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.precision import ALL_BF16, Format, Formats, Gemm, PrecisionMap
from snip_megatron.runtime.gemm_check import (
    BOUND,
    Effect,
    KernelCheck,
    LocalFault,
    RoundingEffects,
    first_of_ranks,
    sqnr_over_ranks,
)
from snip_megatron.runtime.host import Host, HostStep
from snip_megatron.runtime.rise import Rise
from snip_megatron.runtime.watched import EXACT, ExactBackend, Watcher, watched
from snip_megatron.sensitivity.blame import (
    BUG,
    NOT_PRECISION,
    ROUNDING,
    Blame,
    Checkpoint,
    Culprit,
    Fault,
    Harm,
    PassFigures,
)

Choice = tuple[str, Gemm]


@dataclass(frozen=True)
class Job:
    """How jobs differ: what a job multiplies in, what the reference of that is, and how its own kernels are watched.

    Attributes:
        kind: ``snip`` or ``megatron``: who chose the formats.
        description: The formats in words.
        formats: The format of every GEMM.
        numerics: The reference of the formats. Pass (b) runs on it, and it checks the job's kernels.
        watch: Returns a context in which linears run as in training and pass their products to a watcher.
        bound: Bits of a format → least signal to noise ratio of the job's kernels in dB.
    """

    kind: str
    description: str
    formats: PrecisionMap
    numerics: ExactBackend = EXACT
    watch: Callable[[StepContext, Watcher], AbstractContextManager[None]] = watched
    bound: Mapping[int, float] = field(default_factory=lambda: BOUND)

    def formats_of(self, handle: LinearHandle) -> Formats:
        return self.formats.formats_of(handle.name)


@dataclass(frozen=True)
class Place:
    """Where a verdict stands: the step as Megatron counts it, its checkpoint, and the folder of files."""

    step: int
    checkpoint: Checkpoint | None
    folder: Path


class _CountedOverride(Override):
    """An override whose microbatch, which keys stochastic rounding, is that of the backward that runs now."""

    handle: LinearHandle

    @property
    def microbatch(self) -> int:
        return self.handle.state.backwards

    @microbatch.setter
    def microbatch(self, value: int) -> None:
        pass


class PassResult(NamedTuple):
    """What one pass gave on this rank: losses and weights of tokens, and the gradient of each linear's weight."""

    losses: list[tuple[torch.Tensor, torch.Tensor]]
    gradients: list[torch.Tensor]


class Passes:
    """Runs forwards and backwards over the microbatches of one step, under formats of choice. Collective."""

    def __init__(self, job: Job, host: Host, registry: LinearRegistry, step: HostStep) -> None:
        self.job, self.host, self.registry, self.step = job, host, registry, step

    def forced(
        self, formats_of: Callable[[LinearHandle], Formats], backend: GemmBackend
    ) -> AbstractContextManager[None]:
        """Return a context in which linears run in these formats on ``backend``."""
        context = self.registry.context

        @contextmanager
        def forcing() -> Iterator[None]:
            overrides: dict[int, Override] = {}

            def override(handle: LinearHandle) -> Override:
                request = overrides.get(id(handle))
                if request is None:
                    request = overrides[id(handle)] = _counted(handle, formats_of(handle))
                return request

            job_backend, context.backend, context.override = context.backend, backend, override
            try:
                yield
            finally:
                context.backend, context.override = job_backend, None

        return forcing()

    def losses(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the losses of tokens of one forward, and their weights."""
        self._prepare()
        return self.step.losses()

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of this rank's linears after one forward and backward."""
        self._prepare()
        self.step.run()
        return [self.step.gradient(handle.weight).clone() for handle in self.registry]

    def _prepare(self) -> None:
        self.registry.start_step(self.step.step)
        self.step.prepare(self.step.microbatches, self.step.sequences)

    def mean_loss(self, losses: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Return the mean loss of a token over all ranks."""
        return self._sums([(weight * loss.double(), weight) for loss, weight in losses])[0]

    def rise(self, losses: Sequence[Any], plain: Sequence[Any]) -> Rise:
        """Return by how much the mean loss is above that of the ``plain`` pass, with a standard error."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.host.device)
        if self.host.groups.tp_rank == 0:
            for (loss, weight), (base, _) in zip(losses, plain, strict=True):
                rise = loss.double() - base.double()
                sums += torch.stack((weight.double().sum(), (weight * rise).sum(), (weight * rise.square()).sum()))
        if dist.is_initialized():
            dist.all_reduce(sums)
        tokens, total, squares = sums.tolist()
        return Rise.of(max(tokens, 1.0), total, squares) if math.isfinite(total) else Rise(math.inf, None, 0)

    def _sums(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
        sums = torch.zeros(2, dtype=torch.float64, device=self.host.device)
        if self.host.groups.tp_rank == 0:  # tensor parallel ranks have the same losses
            for value, weight in pairs:
                sums += torch.stack((value.double().sum(), weight.double().sum()))
        if dist.is_initialized():
            dist.all_reduce(sums)
        total, tokens = sums.tolist()
        return (total / tokens if tokens else math.nan), tokens

    def finite_on_all_ranks(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether all numbers of all ranks are finite."""
        flag = torch.ones((), dtype=torch.int32, device=self.host.device)
        for tensor in tensors:
            flag *= torch.isfinite(tensor.sum(dtype=torch.float64)).int()
        if dist.is_initialized():
            dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag.item())


def _counted(handle: LinearHandle, formats: Formats) -> Override:
    request = _CountedOverride(formats)
    object.__setattr__(request, "handle", handle)
    return request


def blame_step(job: Job, host: Host, registry: LinearRegistry, step: HostStep, place: Place) -> Blame:
    """Return the verdict about ``step``. Random states, gradients and data order are restored. Collective."""
    started = time.perf_counter()
    passes = Passes(job, host, registry, step)
    with step.undisturbed():
        try:
            blame = _blame(passes, place)
        finally:
            registry.start_step(step.step)
    return replace_seconds(blame, round(time.perf_counter() - started, 3))


def replace_seconds(blame: Blame, seconds: float) -> Blame:
    """Return ``blame`` with the seconds that it took."""
    return Blame(**{**vars(blame), "seconds": seconds})


def _blame(passes: Passes, place: Place) -> Blame:
    job, registry, host = passes.job, passes.registry, passes.host
    context = registry.context
    # The job's own kernels run first, as a training's first step does after loading.
    check = KernelCheck(job.formats_of, job.numerics, dict(job.bound))
    with job.watch(context, check):
        kernels_run = passes.gradients()
    finite_gradients = {"kernels": passes.finite_on_all_ranks(kernels_run)}
    kernel_losses = passes.losses()
    effects = RoundingEffects(job.formats_of, job.numerics, len(registry.names), host.device)
    with passes.forced(lambda _: ALL_BF16, job.numerics):
        plain_losses = passes.losses()
        with watched(context, effects):
            plain = passes.gradients()
    with passes.forced(job.formats_of, job.numerics):
        rounded_losses = passes.losses()
        rounded = passes.gradients()
    finite_gradients |= {
        "bf16": passes.finite_on_all_ranks(plain),
        "reference": passes.finite_on_all_ranks(rounded),
    }
    losses = {"bf16": plain_losses, "reference": rounded_losses, "kernels": kernel_losses}
    means = {name: passes.mean_loss(each) for name, each in losses.items()}
    figures = {
        name: PassFigures(mean if math.isfinite(mean) else None, math.isfinite(mean) and finite_gradients[name])
        for name, mean in means.items()
    }
    rise = passes.rise(rounded_losses, plain_losses)
    fault, is_local = first_of_ranks(check.first)
    if fault is not None:
        fault = _save_inputs(fault, check.first if is_local else None, place)
    table = effects.reduced()
    harms = _harms(passes, table, sqnr_over_ranks(check.sqnr))
    verdict, reason = _verdict(fault, figures, rise)
    return Blame(
        place.step, place.checkpoint, job.kind, job.description, verdict, reason, figures, bug=fault,
        culprits=_suspects(passes, table, harms) if verdict == ROUNDING else (),
        harm=harms,
    )  # fmt: skip


def _verdict(fault: Fault | None, figures: Mapping[str, PassFigures], rise: Rise) -> tuple[str, str]:
    if fault is not None:
        gemm = "" if fault.gemm is None else f":{fault.gemm}"
        return BUG, f"{fault.linear}{gemm} on rank {fault.rank} is not what its inputs give"
    if not figures["bf16"].finite:
        return NOT_PRECISION, "the loss or the gradients are not finite in bf16 either"
    if not figures["reference"].finite:
        return ROUNDING, "the loss or the gradients are not finite in the job's formats, and they are in bf16"
    if rise.mean > 0.01:
        return ROUNDING, f"the job's formats raise the loss by {rise.mean:.4g} nats"
    return NOT_PRECISION, f"the job's formats change the loss by {rise.mean:.2g} nats, and kernels are correct"


def _save_inputs(fault: Fault, local: LocalFault | None, place: Place) -> Fault:
    """Write the inputs of a fault on its rank. Returns the fault with the file's name."""
    if not fault.shape:
        return fault
    path = place.folder / f"blame_{place.step}_inputs.pt"
    if local is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({name: value.cpu() if isinstance(value, torch.Tensor) else value
                    for name, value in local.tensors.items()}, path)  # fmt: skip
    return Fault(**{**vars(fault), "inputs": str(path)})


def _harms(passes: Passes, table: Sequence[Sequence[Effect]], sqnr: Mapping[Choice, float]) -> tuple[Harm, ...]:
    names, formats = passes.registry.names, passes.job.formats
    scores = {(name, gemm): _score(effect, gemm) for name, row in zip(names, table, strict=True)
              for gemm, effect in zip(Gemm, row, strict=True)}  # fmt: skip
    total = sum(scores.values()) or 1.0
    harms = []
    for name, row in zip(names, table, strict=True):
        for gemm, effect in zip(Gemm, row, strict=True):
            count = max(effect.count, 1.0)
            harms.append(
                Harm(
                    name, gemm.value, formats.format_of(name, gemm).value, _finite(scores[name, gemm] / total),
                    sqnr.get((name, gemm)), _finite(effect.mse / count), _finite(effect.underflow / count),
                )
            )  # fmt: skip
    return tuple(harms)


def _score(effect: Effect, gemm: Gemm) -> float:
    """Return what ranks the suspects: the relative squared error of a GEMM's result."""
    return effect.error / effect.signal if effect.signal else 0.0


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _suspects(passes: Passes, table: Sequence[Sequence[Effect]], harms: Sequence[Harm]) -> tuple[Culprit, ...]:
    suspects = []
    for harm, effect in zip(harms, (each for row in table for each in row), strict=True):
        if harm.format == Format.BF16.value:
            continue
        error = math.sqrt(effect.error / effect.signal) if effect.signal else 0.0
        suspects.append(
            Culprit(
                harm.linear, harm.gemm, None, None, harm.format, _finite(effect.loss), _finite(error), harm.share,
                None, confirmed=False,
            )
        )  # fmt: skip
    return tuple(sorted(suspects, key=lambda each: -each.score))


__all__ = ["Job", "Passes", "Place", "blame_step"]
