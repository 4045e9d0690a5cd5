"""Reads the gradient difference of each trial from ``main_grad`` while the passes of the next trial already run.

In every kind of pipeline, the backwards of a model chunk run in the order of the schedule. Just before the first
backward of a trial, every ``main_grad`` of the chunk therefore holds δ∇W of the previous trial and nothing else. The
reader reduces it over data parallel ranks, evaluates the optimizer's update with it, and clears it. Only sums of
squares are kept. The pipeline never drains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from snip_megatron.optimizers.updates import Update, gradient_of_a_step
from snip_megatron.optimizers.weight_drift import StepScale
from snip_megatron.statistics.measured_schedule import Schedule, Trial
from snip_megatron.statistics.reduction import ProbeGroups
from snip_megatron.statistics.sums import sum_squares


@dataclass
class Owner:
    """A parameter of this rank whose gradient is read.

    Attributes:
        row: index among the linears, then the sinks, of the table.
        layer, linear: arguments of :meth:`Trial.reaches`.
        chunk: index of the model chunk that holds the parameter.
        weight: the parameter, with an FP32 ``main_grad``.
        first_of_copies: whether this tensor parallel rank reports the parameter. Exactly one rank reports a replicated
            parameter.
        update: returns the optimizer's next update of this rank's elements. None if another rank evaluates them.
        gradient: the elements' gradient as a training step sees it, in the parameter's dtype.
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
        """The gradient accumulator, FP32 [N local, K local] or [elements]."""
        grad: torch.Tensor = self.weight.main_grad  # type: ignore[attr-defined]
        return grad


class MeasuredReader:
    """The readings of one measurement on one rank. :meth:`reduce` makes them global.

    Attributes:
        drift2: ‖u(g + s·δ) − u(g)‖² of each owner, float64 [len(scales), trials, owners].
        norm2: ‖δ‖² in units of the table, [trials, owners].
        noise2: variance over microbatches of the same mean, [trials, owners].
        natural2: Var(∇W) of the gradient without any option, [owners].
        loss: change of the mean token loss, [trials].
        first_order: ⟨G, E⟩, [trials].
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
        # δ as measured, as if all of it repeated in every microbatch; and, where a step has more tokens than the probe,
        # the average over a step if nothing of it repeated.
        self.scales = [1.0] if scale.variance >= 1.0 else [1.0, scale.variance**0.5]
        self.drift2 = torch.zeros(len(self.scales), trials, rows, dtype=torch.float64, device=device)
        self.norm2, self.noise2 = (torch.zeros(trials, rows, dtype=torch.float64, device=device) for _ in range(2))
        self.natural2 = torch.zeros(rows, dtype=torch.float64, device=device)
        self.loss, self.first_order = (torch.zeros(trials, dtype=torch.float64, device=device) for _ in range(2))

    # -- gradients ---------------------------------------------------------------------------------------------
    @torch.no_grad()
    def capture(self) -> None:
        """Keep the gradient that the pass without any option accumulated, and clear it. Collective."""
        for owner in self._owners:
            noise, _ = self._reduced(owner)
            if owner.first_of_copies:
                self.natural2[owner.row] += noise
            update = None if owner.update is None else owner.update()
            if update is not None:
                step = gradient_of_a_step(self._elements(owner, update), update, self._scale.variance**0.5)
                owner.gradient = step.to(owner.weight.dtype)  # scaling has made it a copy in any dtype
            owner.main_grad.zero_()
        self._first.clear()

    @torch.no_grad()
    def before_plain_backward(self, chunk: int, number: int) -> None:
        """As :meth:`before_backward`, for the pass without any option, which :meth:`capture` ends."""
        if number == 1:
            self._note_first([owner for owner in self._owners if owner.chunk == chunk])

    @torch.no_grad()
    def before_backward(self, chunk: int, slot: int) -> None:
        """Read the previous trial if a new one begins. Call this before backward number ``slot`` of a model chunk.

        Collective at the first backward of a trial.
        """
        trial, position = divmod(slot, self._schedule.passes_a_trial)
        if position == 0:
            self._catch_up(chunk, trial)
        elif position == 2:  # the first microbatch is complete
            self._note_first(self._owners_of(chunk, trial))

    @torch.no_grad()
    def finish(self) -> None:
        """Read the last trial. Call this when all passes are done. Collective."""
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
        """Sum the accumulator over all ranks that hold a part of it. Returns this rank's share of its noise, and its
        square.
        """
        if self._is_partial(owner):
            dist.all_reduce(owner.main_grad, group=self._groups.tp)
        own = sum_squares(owner.main_grad)
        if self._groups.dp_size > 1:
            dist.all_reduce(owner.main_grad, group=self._groups.dp)
        total = sum_squares(owner.main_grad)
        unit = self._scale.gradient**2
        return self._noise(own, self._first.get(owner.row), total) * unit, total * unit

    def _noise(self, own: torch.Tensor, first: torch.Tensor | None, total: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of the variance of a sum over microbatches.

        Parts of the sum that are larger than the sum suggests do not repeat: see
        :mod:`snip_megatron.statistics.gradient_noise`, here with parts instead of single microbatches. The parts are
        those of the data parallel ranks, or on one rank its first microbatch. A single microbatch has no parts, and the
        result is 0.
        """
        ranks, microbatches = self._groups.dp_size, len(self._schedule.microbatches)
        if ranks > 1:
            return (ranks * own - (total if self._groups.dp_rank == 0 else torch.zeros_like(total))) / (ranks - 1)
        if first is None:
            return torch.zeros_like(total)
        return (microbatches**2 * first - total) / (microbatches - 1)

    def _elements(self, owner: Owner, update: Update) -> torch.Tensor:
        """Return this rank's elements of the accumulator as the optimizer sees a gradient: flat, clipped, of the mean
        loss.
        """
        flat = owner.main_grad.reshape(-1)[update.start : update.end]
        return flat * (self._scale.gradient * self._scale.clip)

    def _whole(self, owner: Owner) -> torch.Tensor:
        """Return the accumulator summed over token shards. Does not change the accumulator."""
        if not self._is_partial(owner):
            return owner.main_grad
        total = owner.main_grad.clone()
        dist.all_reduce(total, group=self._groups.tp)
        return total

    def _is_partial(self, owner: Owner) -> bool:
        """Whether the gradient covers the tokens of this tensor parallel rank only, as that of a norm does under
        sequence parallelism.
        """
        return self._tp_size > 1 and bool(getattr(owner.weight, "sequence_parallel", False))

    # -- losses ------------------------------------------------------------------------------------------------
    def add_loss(self, trial: int, change: torch.Tensor) -> None:
        """Add a microbatch's share of the change of the loss. Of the ranks that see the same tokens exactly one calls
        this.
        """
        self.loss[trial] += change * self._scale.gradient

    def add_first_order(self, trial: int, dot: torch.Tensor) -> None:
        """Add a rank's share of ⟨G, E⟩ of a microbatch. G is as autograd gave it with the loss multiplied by −1."""
        self.first_order[trial] -= dot * self._scale.gradient

    def reduce(self) -> None:
        """Sum over all ranks in one float64 all-reduce, and move the arrays to the CPU."""
        arrays = (self.drift2, self.norm2, self.noise2, self.natural2, self.loss, self.first_order)
        flat = torch.cat([array.reshape(-1) for array in arrays])
        dist.all_reduce(flat, group=self._groups.world)
        parts = torch.split(flat.cpu(), [array.numel() for array in arrays])
        self.drift2, self.norm2, self.noise2, self.natural2, self.loss, self.first_order = (
            part.view(array.shape) for part, array in zip(parts, arrays, strict=True)
        )
