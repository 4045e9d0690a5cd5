"""Reads what each trial of a measurement left in ``main_grad``, while the passes of the next one are on their way.

The backwards of a model chunk come in the order of the schedule, on every kind of pipeline. So just before the first
backward of a trial every ``main_grad`` of the chunk holds the previous trial's δ∇W and nothing else: it is reduced over
data parallel ranks, evaluated through the optimizer's update, and cleared. Nothing but sums of squares is kept, and the
pipeline never drains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from snip_megatron.statistics.drift import gradient_of_a_step
from snip_megatron.statistics.measured_schedule import Schedule, Trial
from snip_megatron.statistics.reduction import ProbeGroups
from snip_megatron.statistics.sums import sum_squares
from snip_megatron.statistics.updates import Update
from snip_megatron.statistics.weight_drift import StepScale


@dataclass
class Owner:
    """A parameter of this rank whose gradient is read.

    Attributes:
        row: its number among the linears, then the sinks, of the table.
        layer, linear: for :meth:`Trial.reaches`.
        chunk: the model chunk it lives in.
        weight: with an FP32 ``main_grad``.
        first_of_copies: whether this tensor parallel rank reports it (False on all but one where it is replicated).
        update: gives the optimizer's next update of this rank's elements; None where another rank evaluates them.
        gradient: the elements' own gradient as a training step sees it, in the parameter's dtype.
    """

    row: int
    layer: int
    linear: bool
    chunk: int
    weight: torch.nn.Parameter
    first_of_copies: bool
    update: Callable[[], Update | None] | None = None
    gradient: torch.Tensor | None = None

    @property
    def main_grad(self) -> torch.Tensor:
        """The accumulator, FP32 [N local, K local] or [elements]."""
        grad: torch.Tensor = self.weight.main_grad  # type: ignore[attr-defined]
        return grad


class MeasuredReader:
    """One measurement's readings on one rank; :meth:`reduce` makes them global.

    Attributes:
        drift2: ‖u(g + s·δ) − u(g)‖² of each owner, float64 [len(scales), trials, owners].
        norm2: ‖δ‖² in the table's unit, [trials, owners]. noise2: Var(δ) of the same mean over microbatches.
        natural2: Var(∇W) of the gradient without any option, likewise, [owners].
        loss: change of the mean token loss, [trials]. first_order: ⟨G, E⟩, [trials].
    """

    def __init__(
        self, owners: Sequence[Owner], rows: int, schedule: Schedule, scale: StepScale, groups: ProbeGroups
    ) -> None:
        self._owners = list(owners)
        self._schedule = schedule
        self._scale = scale
        self._groups = groups
        self._tp_size = dist.get_world_size(groups.tp)
        self._read = dict.fromkeys((owner.chunk for owner in owners), 0)
        self._first: dict[int, torch.Tensor] = {}
        device = owners[0].weight.device if owners else torch.device("cpu")
        trials = len(schedule.trials)
        self.scales = error_scales(scale.variance)
        self.drift2 = torch.zeros(len(self.scales), trials, rows, dtype=torch.float64, device=device)
        self.norm2, self.noise2 = (torch.zeros(trials, rows, dtype=torch.float64, device=device) for _ in range(2))
        self.natural2 = torch.zeros(rows, dtype=torch.float64, device=device)
        self.loss, self.first_order = (torch.zeros(trials, dtype=torch.float64, device=device) for _ in range(2))

    # -- gradients ---------------------------------------------------------------------------------------------
    @torch.no_grad()
    def capture(self) -> None:
        """Keep the gradient that a pass without any option left behind, and clear it. Collective."""
        for owner in self._owners:
            noise, _ = self._reduced(owner)
            if owner.first_of_copies:
                self.natural2[owner.row] += noise
            update = None if owner.update is None else owner.update()
            if update is not None:
                step = gradient_of_a_step(self._elements(owner, update), update, self._scale.variance**0.5)
                owner.gradient = step.to(owner.weight.dtype)  # a copy either way: it was scaled
            owner.main_grad.zero_()
        self._first.clear()

    @torch.no_grad()
    def before_plain_backward(self, chunk: int, number: int) -> None:
        """As :meth:`before_backward`, of the pass that :meth:`capture` ends."""
        if number == 1:
            self._note_first([owner for owner in self._owners if owner.chunk == chunk])

    @torch.no_grad()
    def before_backward(self, chunk: int, slot: int) -> None:
        """Call when backward number ``slot`` of a model chunk is about to begin. Collective at the trials' borders."""
        trial, position = divmod(slot, self._schedule.passes_a_trial)
        if position == 0:
            self._catch_up(chunk, trial)
        elif position == 2:  # the first microbatch is complete
            self._note_first(self._owners_of(chunk, trial))

    @torch.no_grad()
    def finish(self) -> None:
        """Call when all passes are done: what the last trial left."""
        for chunk in sorted(self._read):
            self._catch_up(chunk, len(self._schedule.trials))

    def _note_first(self, owners: Sequence[Owner]) -> None:
        for owner in owners:
            self._first[owner.row] = sum_squares(self._whole(owner))

    def _catch_up(self, chunk: int, trial: int) -> None:
        if chunk not in self._read or self._read[chunk] >= min(trial, len(self._schedule.trials)):
            return
        done = self._read[chunk]
        assert trial == done + 1, "a trial was passed over"
        for owner in self._owners_of(chunk, done):
            self._evaluate(owner, done)
        for owner in self._owners:
            if owner.chunk == chunk:
                owner.main_grad.zero_()
                self._first.pop(owner.row, None)
        self._read[chunk] = trial

    def _owners_of(self, chunk: int, trial: int) -> list[Owner]:
        if trial >= len(self._schedule.trials):
            return []
        forced: Trial = self._schedule.trials[trial]
        return [o for o in self._owners if o.chunk == chunk and forced.reaches(o.layer, linear=o.linear)]

    def _evaluate(self, owner: Owner, trial: int) -> None:
        noise, total = self._reduced(owner)
        if owner.first_of_copies:
            self.noise2[trial, owner.row] += noise
            if self._groups.dp_rank == 0:
                self.norm2[trial, owner.row] += total
        update = None if owner.update is None else owner.update()
        if update is not None and owner.gradient is not None:
            error = self._elements(owner, update)
            self.drift2[:, trial, owner.row] += update.squared_drift(owner.gradient.float(), error, self.scales)

    def _reduced(self, owner: Owner) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the accumulator over all ranks that hold a part of it; this rank's share of its noise, and its square."""
        self._sum_over_shares(owner)
        own = sum_squares(owner.main_grad)
        self._sum_over_data_parallel(owner)
        total = sum_squares(owner.main_grad)
        unit = self._scale.gradient**2
        return self._noise(own, self._first.get(owner.row), total) * unit, total * unit

    def _noise(self, own: torch.Tensor, first: torch.Tensor | None, total: torch.Tensor) -> torch.Tensor:
        """This rank's share of Var of a sum over microbatches: parts of it that are larger than it is suggests do
        not repeat (:mod:`snip_megatron.statistics.gradient_noise`, with parts instead of single microbatches).

        The parts are what each data parallel rank has; on one rank, its first microbatch. One microbatch has none: 0.
        """
        ranks, microbatches = self._groups.dp_size, len(self._schedule.microbatches)
        if ranks > 1:
            return (ranks * own - (total if self._groups.dp_rank == 0 else torch.zeros_like(total))) / (ranks - 1)
        if first is None:
            return torch.zeros_like(total)
        return (microbatches**2 * first - total) / (microbatches - 1)

    def _elements(self, owner: Owner, update: Update) -> torch.Tensor:
        """This rank's elements of the accumulator as an optimizer sees a gradient: flat, clipped, of the mean loss."""
        flat = owner.main_grad.reshape(-1)[update.start : update.end]
        return flat * (self._scale.gradient * self._scale.clip)

    def _whole(self, owner: Owner) -> torch.Tensor:
        """The accumulator, summed over token shards; itself unchanged."""
        if not self._is_partial(owner):
            return owner.main_grad
        total = owner.main_grad.clone()
        dist.all_reduce(total, group=self._groups.tp)
        return total

    def _is_partial(self, owner: Owner) -> bool:
        """A norm that saw this tensor parallel rank's tokens only."""
        return self._tp_size > 1 and bool(getattr(owner.weight, "sequence_parallel", False))

    def _sum_over_shares(self, owner: Owner) -> None:
        if self._is_partial(owner):
            dist.all_reduce(owner.main_grad, group=self._groups.tp)

    def _sum_over_data_parallel(self, owner: Owner) -> None:
        if self._groups.dp_size > 1:
            dist.all_reduce(owner.main_grad, group=self._groups.dp)

    # -- losses ------------------------------------------------------------------------------------------------
    def add_loss(self, trial: int, change: torch.Tensor) -> None:
        """A microbatch's share of the change of the loss; one rank of those that see the same tokens reports."""
        self.loss[trial] += change * self._scale.gradient

    def add_first_order(self, trial: int, dot: torch.Tensor) -> None:
        """A rank's share of ⟨G, E⟩ of a microbatch, G as autograd gave it under a loss times −1."""
        self.first_order[trial] -= dot * self._scale.gradient

    def reduce(self) -> None:
        """Sum over all ranks in one float64 all-reduce, and bring the arrays to the CPU."""
        arrays = (self.drift2, self.norm2, self.noise2, self.natural2, self.loss, self.first_order)
        flat = torch.cat([array.reshape(-1) for array in arrays])
        dist.all_reduce(flat, group=self._groups.world)
        parts = torch.split(flat.cpu(), [array.numel() for array in arrays])
        self.drift2, self.norm2, self.noise2, self.natural2, self.loss, self.first_order = (
            part.view(array.shape) for part, array in zip(parts, arrays, strict=True)
        )


def error_scales(variance: float) -> list[float]:
    """Sizes of δ at which drift is evaluated: as measured (all of it repeats in every microbatch), and as its average
    over a whole step would be if nothing did. ``variance``: :attr:`StepScale.variance`."""
    return [1.0] if variance >= 1.0 else [1.0, variance**0.5]
