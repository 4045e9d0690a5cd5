"""Forwards and backwards over the microbatches of one step, in formats of choice, and what they did to the step."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from snip_megatron.layers.context import LinearHandle, Override, StepContext
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.precision import Formats, Gemm, PrecisionMap
from snip_megatron.runtime.exact_products import EXACT, ExactBackend
from snip_megatron.runtime.exchange import all_reduced, is_true_on_any
from snip_megatron.runtime.gemm_check import BOUND
from snip_megatron.runtime.host import Host, HostStep
from snip_megatron.runtime.watched import Watcher, watched
from snip_megatron.sensitivity.blame import UNFINISHED, Blame, Checkpoint, PassFigures, Weights

HEALTHY_RISE = {4: 0.05, 8: 0.004, 16: 0.0}
"""Bits → rise of the loss in nats that is healthy if all fprops run in such a format. A map's is the mean."""

USUAL_LOSS = 3.0
"""Mean loss of a token in nats up to which :data:`HEALTHY_RISE` holds. Above, a rise is healthy in proportion: on
random tokens, at a loss of 8.2, eight bits alone raise it by .008."""

ERRORS = 3.0
"""Number of standard errors by which a rise must exceed what is healthy."""

ENOUGH_TOKENS = 32768
"""Number of tokens of a step that a rank runs, at most, unless one microbatch has more."""

Losses = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Job:
    """What differs between jobs: the formats, their reference numerics, and how the job's own kernels are watched."""

    kind: str  # ``snip`` or ``megatron``: who chose the formats
    description: str  # the formats in words
    formats: PrecisionMap
    numerics: ExactBackend = EXACT  # the reference of the formats. Pass (b) runs on it, and it checks the job's kernels
    # returns a context in which linears run as in training and pass their products to a watcher
    watch: Callable[[StepContext, Watcher], AbstractContextManager[None]] = watched
    # bits of a format → least signal to noise ratio of the job's kernels in dB
    bound: Mapping[int, float] = field(default_factory=lambda: BOUND)

    def formats_of(self, handle: LinearHandle) -> Formats:
        """Return the formats of a linear."""
        return self.formats.formats_of(handle.name)

    def unfinished(self, step: int, checkpoint: Checkpoint | None = None, weights: Weights | None = None) -> Blame:
        """Return the verdict about a step before any pass."""
        return Blame(step, checkpoint, self.kind, self.description, UNFINISHED, "", {}, weights=weights)


class PassResult(NamedTuple):
    """What one pass gave on this rank: losses of tokens with their weights, and the gradient of each linear."""

    losses: Losses
    gradients: list[torch.Tensor]


@dataclass(frozen=True)
class RoundingRise:
    """Rise of the mean loss of a token by rounding, in nats, its standard error, and what is healthy."""

    mean: float
    error: float
    healthy: float

    @property
    def is_healthy(self) -> bool:
        """Whether the rise is no more than what is healthy, beyond its error."""
        return self.mean - ERRORS * self.error <= self.healthy


class Passes:
    """Runs the passes. All methods but :meth:`forced` are collective.

    They run on the first ``microbatches`` of the step, by default as many as have ENOUGH_TOKENS on a rank.
    No pass begins that would probably end later than ``seconds`` from now (:attr:`is_late`).
    """

    def __init__(
        self,
        job: Job,
        host: Host,
        registry: LinearRegistry,
        step: HostStep,
        microbatches: int | None = None,
        seconds: float = math.inf,
    ) -> None:
        self.job, self.host, self.registry, self.step = job, host, registry, step
        enough = microbatches or max(1, ENOUGH_TOKENS // (host.tokens or ENOUGH_TOKENS))
        self.microbatches = min(step.microbatches, -(-enough // host.pass_group) * host.pass_group)
        self.seconds, self._started, self._longest = seconds, time.monotonic(), 0.0
        self.scale = 0.0  # from gradients of a pass to those of the mean loss
        self.tokens = 0.0  # of a pass over all ranks. 0 before its losses are known

    @contextmanager
    def forced(self, formats: PrecisionMap) -> Iterator[None]:
        """Run linears in the formats of a map by the reference's numerics inside this context."""
        context, numerics = self.registry.context, self.job.numerics
        backend = context.backend
        context.backend = numerics
        context.override = lambda handle: Override(formats.formats_of(handle.name), backend=numerics.of(handle))
        try:
            yield
        finally:
            context.backend, context.override = backend, None

    def losses(self) -> Losses:
        """Return the losses of tokens of one forward, and their weights."""
        self._prepare()
        started = time.monotonic()
        losses = self.step.losses()
        if self.host.device.type == "cuda":
            torch.cuda.synchronize(self.host.device)
        self._longest = max(self._longest, time.monotonic() - started)
        return losses

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of this rank's linears after one forward and backward."""
        self._prepare()
        self.step.run()
        if not self.scale:
            self.scale = self.step.gradient_scale()  # which counts the tokens of all passes so far
        return [self.step.gradient(handle.weight).clone() for handle in self.registry]

    def _prepare(self) -> None:
        self.job.numerics.start_pass()
        self.registry.start_step(self.step.step)
        self.step.prepare(self.microbatches, self.step.sequences)

    @property
    def is_late(self) -> bool:
        """Whether a rank has no time for another forward and backward, which take as long as three forwards."""
        return self.on_any_rank(time.monotonic() - self._started + 3.0 * self._longest > self.seconds)

    def on_any_rank(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on a rank."""
        return is_true_on_any(flag, self.host.device)

    def end(self, share: float) -> float:
        """Return the value of ``time.monotonic()`` when a share of the time has gone."""
        return self._started + share * self.seconds

    # -- figures -----------------------------------------------------------------------------------------------
    def figures(self, result: PassResult) -> PassFigures:
        """Return the mean loss of a pass, and whether all of its losses and gradients are finite."""
        total, tokens = self._sum(
            [torch.stack(((weight * loss.double()).sum(), weight.double().sum())) for loss, weight in result.losses], 2
        )
        self.tokens = tokens
        loss = total / tokens if tokens else math.nan
        unfinished = any(not torch.isfinite(each.sum(dtype=torch.float64)) for each in result.gradients)
        broken = self.on_any_rank(unfinished)
        return PassFigures(loss if math.isfinite(loss) else None, math.isfinite(loss) and not broken)

    def rise(self, losses: Losses, plain: Losses) -> RoundingRise:
        """Return by how much the mean loss of a token is above that of ``plain``."""
        rows, formats = [], self.job.formats
        bits = [formats.format_of(name, Gemm.FPROP).bits for name in self.registry.names]
        healthy = sum(HEALTHY_RISE[each] for each in bits) / len(bits)
        for (loss, weight), (base, _) in zip(losses, plain, strict=True):
            rise = loss.double() - base.double()
            terms = weight.double(), weight * rise, weight * rise.square(), weight * base.double()
            rows.append(torch.stack([each.sum() for each in terms]))
        tokens, total, squares, base_total = self._sum(rows, 4)
        if not math.isfinite(total) or not tokens:
            return RoundingRise(math.inf, 0.0, healthy)
        mean = total / tokens
        healthy *= max(1.0, base_total / tokens / USUAL_LOSS)
        return RoundingRise(mean, math.sqrt(max(0.0, squares / tokens - mean**2) / tokens), healthy)

    def gradient_error(self, gradients: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> float:
        """Return ‖ĝ − g‖²/‖g‖² over the weights of all linears."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.host.device)
        for handle, g, exact in zip(self.registry, gradients, plain, strict=True):
            if not handle.repeats:
                sums += torch.stack(((g - exact).square().sum(), exact.square().sum())).double()
        error, norm = all_reduced(sums).tolist()
        return error / norm if norm else 0.0

    def _sum(self, rows: Sequence[torch.Tensor], width: int) -> list[float]:
        """Return sums over microbatches and ranks. The ranks of a tensor parallel group have the same losses."""
        sums = torch.zeros(width, dtype=torch.float64, device=self.host.device)
        for row in rows if self.host.groups.tp_rank == 0 else ():
            sums += row
        return list(all_reduced(sums).tolist())
