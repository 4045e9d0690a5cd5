"""Forwards and backwards over the microbatches of one step, in formats of choice, and what they did to the step."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from snip_megatron.layers.context import LinearHandle, Override, StepContext
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.precision import Format, Formats, Gemm, PrecisionMap
from snip_megatron.runtime.gemm_check import BOUND, bits_of
from snip_megatron.runtime.host import Host, HostStep
from snip_megatron.runtime.watched import EXACT, ExactBackend, Watcher, watched
from snip_megatron.sensitivity.blame import PassFigures

HEALTHY_RISE = {4: 0.05, 8: 0.004, 16: 0.0}
"""Bits → rise of the loss in nats that is healthy if all fprops run in such a format. A map's is the mean."""

HEALTHY_ERROR = {4: 1.0, 8: 0.15, 16: 0.02}
"""Bits → healthy squared error of the gradient of a linear's weight, relative to its squared norm. A linear's is that
of the fewest bits in the model: errors travel with activations and gradients."""

HEALTHY_SLOPE = 0.5
"""Least healthy ⟨ĝ, g⟩/⟨g, g⟩ of the rounded gradient ĝ of a linear's weight. Gradients that vanish have less."""

Losses = list[tuple[torch.Tensor, torch.Tensor]]


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
        """Return the formats of a linear."""
        return self.formats.formats_of(handle.name)


class PassResult(NamedTuple):
    """What one pass gave on this rank: losses of tokens with their weights, and the gradient of each linear."""

    losses: Losses
    gradients: list[torch.Tensor]


@dataclass(frozen=True)
class Harmed:
    """What rounding did to a step, equal on all ranks.

    Attributes:
        rise, error: Rise of the mean loss of a token, and its standard error.
        healthy_rise, healthy_error: What is healthy in these formats.
        errors, slopes: Linear → squared relative error of its gradient, and its slope ⟨ĝ, g⟩/⟨g, g⟩.
    """

    rise: float
    error: float
    healthy_rise: float
    healthy_error: float
    errors: Mapping[str, float]
    slopes: Mapping[str, float]

    def _excess(self, name: str) -> float:
        """Return by how much the error of a linear's gradient is above what is healthy."""
        error = self.errors[name]
        if not math.isfinite(error):
            return 1e3
        lost = max(0.0, HEALTHY_SLOPE - self.slopes[name])
        return max(0.0, error - self.healthy_error) + lost

    @property
    def by_loss(self) -> float:
        """Rise of the loss above what is healthy, in multiples of it."""
        if not math.isfinite(self.rise):
            return 1e3
        return max(0.0, self.rise - 3.0 * self.error - self.healthy_rise) / max(self.healthy_rise, 1e-4)

    @property
    def by_gradient(self) -> float:
        """Sum over linears of the errors of gradients above what is healthy."""
        return sum(map(self._excess, self.errors))

    @property
    def reason(self) -> str | None:
        """Why the step is unhealthy. None if it is healthy."""
        if self.by_loss > 0.0:
            return (
                f"rounding raises the loss by {self.rise:.4g} nats; {self.healthy_rise:.2g} is healthy in these formats"
            )
        if self.by_gradient > 0.0:
            name = max(self.errors, key=self._excess)
            return (
                f"rounding leaves {self.slopes[name]:.0%} of the gradient of {name}, with a relative error of"
                f" {math.sqrt(self.errors[name]):.0%}"
            )
        return None

    def thresholds(self) -> dict[str, float]:
        """Return the limits of the verdict."""
        return {
            "healthy_rise": self.healthy_rise,
            "healthy_gradient_error": math.sqrt(self.healthy_error),
            "healthy_slope": HEALTHY_SLOPE,
            "rise": self.rise if math.isfinite(self.rise) else 1e3,
            "rise_error": self.error,
            "largest_gradient_error": math.sqrt(max(self.errors.values(), default=0.0)),
            "least_slope": min(self.slopes.values(), default=1.0),
        }


class Passes:
    """Runs the passes. All methods but :meth:`forced` are collective."""

    def __init__(self, job: Job, host: Host, registry: LinearRegistry, step: HostStep) -> None:
        self.job, self.host, self.registry, self.step = job, host, registry, step
        self.scale = 0.0  # from gradients of a pass to those of the mean loss
        self.tokens = 0.0  # of a pass over all ranks, known from its losses on

    @contextmanager
    def forced(self, formats_of: Callable[[LinearHandle], Formats]) -> Iterator[None]:
        """Run linears in these formats by the reference's numerics inside this context."""
        context, overrides = self.registry.context, dict[int, Override]()

        def override(handle: LinearHandle) -> Override:
            if id(handle) not in overrides:
                overrides[id(handle)] = _CountedOverride(formats_of(handle), handle)
            return overrides[id(handle)]

        backend = context.backend
        context.backend, context.override = self.job.numerics, override
        try:
            yield
        finally:
            context.backend, context.override = backend, None

    def losses(self) -> Losses:
        """Return the losses of tokens of one forward, and their weights."""
        self._prepare()
        return self.step.losses()

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of this rank's linears after one forward and backward."""
        self._prepare()
        self.step.run()
        if not self.scale:
            self.scale = self.step.gradient_scale()  # which counts the tokens of all passes so far
        return [self.step.gradient(handle.weight).clone() for handle in self.registry]

    def _prepare(self) -> None:
        self.registry.start_step(self.step.step)
        self.step.prepare(self.step.microbatches, self.step.sequences)

    # -- figures -----------------------------------------------------------------------------------------------
    def figures(self, result: PassResult) -> PassFigures:
        """Return the mean loss of a pass, and whether all of its losses and gradients are finite."""
        total, tokens = self._sum(
            [torch.stack(((weight * loss.double()).sum(), weight.double().sum())) for loss, weight in result.losses], 2
        )
        self.tokens = tokens
        loss = total / tokens if tokens else math.nan
        unfinished = sum(float(not torch.isfinite(each.sum(dtype=torch.float64))) for each in result.gradients)
        broken = torch.tensor([unfinished], dtype=torch.float64, device=self.host.device)
        if dist.is_initialized():
            dist.all_reduce(broken)
        return PassFigures(loss if math.isfinite(loss) else None, math.isfinite(loss) and not float(broken))

    def compare(self, rounded: PassResult, plain: PassResult) -> Harmed:
        """Return what rounding did."""
        rise, error = self.rise(rounded.losses, plain.losses)
        names = self.registry.names
        sums = torch.zeros(len(names), 3, dtype=torch.float64, device=self.host.device)
        for handle, g, exact in zip(self.registry, rounded.gradients, plain.gradients, strict=True):
            if not handle.repeats:
                pairs = torch.stack(((g - exact).square().sum(), (g * exact).sum(), exact.square().sum()))
                sums[handle.state.position] += pairs.double()
        if dist.is_initialized():
            dist.all_reduce(sums)
        rows = dict(zip(names, sums.tolist(), strict=True))
        return Harmed(
            rise, error, self._healthy_rise(), self._healthy_error(),
            {name: error / norm if norm else 0.0 for name, (error, _, norm) in rows.items()},
            {name: dot / norm if norm else 1.0 for name, (_, dot, norm) in rows.items()},
        )  # fmt: skip

    def rise(self, losses: Losses, plain: Losses) -> tuple[float, float]:
        """Return by how much the mean loss of a token is above that of ``plain``, and the standard error."""
        rows = []
        for (loss, weight), (base, _) in zip(losses, plain, strict=True):
            rise = loss.double() - base.double()
            rows.append(torch.stack((weight.double().sum(), (weight * rise).sum(), (weight * rise.square()).sum())))
        tokens, total, squares = self._sum(rows, 3)
        if not math.isfinite(total) or not tokens:
            return math.inf, 0.0
        mean = total / tokens
        return mean, math.sqrt(max(0.0, squares / tokens - mean**2) / tokens)

    def _sum(self, rows: Sequence[torch.Tensor], width: int) -> list[float]:
        """Return sums over microbatches and ranks. The ranks of a tensor parallel group have the same losses."""
        sums = torch.zeros(width, dtype=torch.float64, device=self.host.device)
        for row in rows if self.host.groups.tp_rank == 0 else ():
            sums += row
        if dist.is_initialized():
            dist.all_reduce(sums)
        return list(sums.tolist())

    def _healthy_rise(self) -> float:
        fprops = [bits_of(self.job.formats.format_of(name, Gemm.FPROP)) for name in self.registry.names]
        return sum(HEALTHY_RISE[bits] for bits in fprops) / len(fprops)

    def _healthy_error(self) -> float:
        formats = {fmt for name in self.registry.names for fmt in self.job.formats.formats_of(name)}
        return max(HEALTHY_ERROR[bits_of(fmt)] for fmt in formats or {Format.BF16})


class _CountedOverride(Override):
    """An override whose microbatch, which keys stochastic rounding, is that of the backward that runs now."""

    def __init__(self, formats: Formats, handle: LinearHandle) -> None:
        object.__setattr__(self, "handle", handle)
        super().__init__(formats)

    @property
    def microbatch(self) -> int:
        handle: LinearHandle = self.handle  # type: ignore[attr-defined]
        return handle.state.backwards

    @microbatch.setter
    def microbatch(self, value: int) -> None:
        pass
