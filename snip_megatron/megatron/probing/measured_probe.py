"""Measures options: quantises one GEMM per pass through Megatron's own schedule and reads what changes.

An option is a format for one GEMM of one linear. A trial forces one option, or one GEMM over several linears, while all
other GEMMs run in bf16. All passes of a measurement are microbatches of one call of the schedule, so that the pipeline
fills only once. The backward of a pass begins with a hook on the output of its model chunk. When a new trial begins,
this hook reads the gradients of the previous trial (:mod:`snip_megatron.optimizers.measured_reader`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from snip_megatron.layers.context import ALL_BF16, GEMM_INDEX, Forced, LinearHandle
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.megatron import compat
from snip_megatron.megatron.probing.drift_probe import DriftProbe
from snip_megatron.megatron.probing.probe_call import LoopShape, StepCall, run_schedule, undisturbed
from snip_megatron.optimizers.measured_reader import MeasuredReader, Owner
from snip_megatron.optimizers.updates import Update
from snip_megatron.optimizers.weight_drift import StepScale
from snip_megatron.precision import Format, Gemm
from snip_megatron.statistics.measured_columns import Readings
from snip_megatron.statistics.measured_schedule import IDLE, Schedule, Slot, Trial
from snip_megatron.statistics.reduction import ProbeGroups, TableShape

Outputs = tuple[torch.Tensor, Callable[..., Any]]


class MeasuredProbe:
    """Measures options. Every rank has one, and all ranks call :meth:`measure` with the same trials.

    Args:
        registry: Linears of this rank.
        shape: Sizes of the training loop.
        table: Rows of the statistics table.
        groups: Process groups.
        drift: Lists the parameters beside the linears.
        multiple_of: Size of the groups of microbatches in an interleaved schedule; 1 in other schedules.
    """

    def __init__(
        self,
        registry: LinearRegistry,
        shape: LoopShape,
        table: TableShape,
        groups: ProbeGroups,
        drift: DriftProbe,
        multiple_of: int,
    ) -> None:
        self._registry = registry
        self._shape = shape
        self._table = table
        self._groups = groups
        self._drift = drift
        self._multiple_of = multiple_of
        self._tp_rank = dist.get_rank(groups.tp)

    def measure(
        self, call: StepCall, trials: Sequence[Trial], microbatches: Sequence[int], scale: StepScale
    ) -> tuple[Readings, int]:
        """Run ``trials``. Returns their readings, equal on all ranks, and the number of microbatch passes. Collective.

        Args:
            call: Arguments of the training step before which this runs.
            trials: At least one trial.
            microbatches: Microbatches that each trial runs, 0 being the first of the step.
            scale: Scales of the gradient.
        """
        schedule = Schedule(tuple(trials), tuple(microbatches), self._multiple_of)
        rows = len(self._table.names) + len(self._table.sinks)
        reader = MeasuredReader(self._owners(call), rows, schedule, scale, self._groups)
        passes = len(microbatches) + len(schedule.slots)
        with undisturbed(call, self._registry.context) as states:
            plain = [Slot(IDLE, microbatch, 1) for microbatch in microbatches]
            for slots, border in ((plain, reader.before_plain_backward), (schedule.slots, reader.before_backward)):
                compat.set_rng_state(states)
                self._registry.start_step(call.step)
                _Passes(call, self._registry, schedule, slots, reader, border, self._tp_rank).run(self._shape)
                if slots is plain:
                    reader.capture()
            reader.finish()
            reader.reduce()
        return (
            Readings(
                trials=schedule.trials,
                drift2=reader.drift2.numpy(),
                norm2=reader.norm2.numpy(),
                noise2=reader.noise2.numpy(),
                natural2=reader.natural2.numpy(),
                loss=reader.loss.numpy(),
                first_order=reader.first_order.numpy(),
                repeated=len(microbatches) * self._groups.dp_size > 1,
            ),
            passes,
        )

    def _owners(self, call: StepCall) -> list[Owner]:
        chunk_of = {id(p): i for i, chunk in enumerate(call.model) for p in chunk.parameters()}
        row_of = {name: row for row, name in enumerate(self._table.names)}
        owners = []
        for handle in self._registry:
            weight = handle.weight
            update = self._update(call, weight, first_of_copies=True)
            layer, chunk = handle.id.layer, chunk_of[id(weight)]
            owners.append(Owner(row_of[handle.name], layer, True, chunk, weight, True, update))
        for index, weight, replicated, _ in self._drift.local_sinks():
            row, layer = len(self._table.names) + index, self._table.sinks[index].boundary // 2
            first = not replicated or self._tp_rank == 0
            update = self._update(call, weight, first_of_copies=first)
            owners.append(Owner(row, layer, False, chunk_of[id(weight)], weight, first, update))
        return owners

    def _update(
        self, call: StepCall, weight: torch.nn.Parameter, *, first_of_copies: bool
    ) -> Callable[[], Update | None] | None:
        """Return a function that gives the optimizer's update of ``weight``, or None if this rank does not report it.

        The update is built at each use. It views FP32 moments of the optimizer and copies others only for that time.
        """
        update_of = partial(compat.update_of, call.optimizer, weight, call.step)
        return update_of if first_of_copies and self._drift.reports and update_of() is not None else None


class _Passes:
    """One call of the schedule, which tells the linears which pass is running.

    Forwards and backwards never overlap on a rank. A forward begins in :meth:`_forward_step`, a backward in the hook on
    the forward's output. Everything that linears run until the next one begins, recomputed forwards included, is of
    that pass.
    """

    def __init__(
        self,
        call: StepCall,
        registry: LinearRegistry,
        schedule: Schedule,
        slots: Sequence[Slot],
        reader: MeasuredReader,
        border: Callable[[int, int], None],
        tp_rank: int,
    ) -> None:
        self._call = call
        self._registry = registry
        self._schedule = schedule
        self._slots = slots
        self._reader = reader
        self._border = border
        self._tp_rank = tp_rank
        self._chunk = {id(chunk): index for index, chunk in enumerate(call.model)}
        self._forwards = [0] * len(call.model)
        self._current = slots[0]
        self._random: dict[tuple[int, int], compat.RandomState] = {}
        self._output: torch.Tensor | None = None  # output of the last chunk with the option quantised
        microbatches = len(schedule.microbatches)
        per_token = bool(call.config.calculate_per_token_loss)
        # Megatron divides the loss by the microbatches of the call, unless it is summed over tokens.
        self._loss_factor = 1.0 if per_token else len(slots) / microbatches
        self._loss_share = None if per_token else 1.0 / microbatches

    def run(self, shape: LoopShape) -> None:
        """Run all passes."""
        self._registry.context.forcing = self._forced
        run_schedule(self._call, shape, [slot.microbatch for slot in self._slots], self._forward_step)

    # -- Megatron's forward step -------------------------------------------------------------------------------
    def _forward_step(self, data_iterator: Any, model: torch.nn.Module, *rest: Any) -> Outputs:
        chunk = self._chunk[id(model)]
        number = self._forwards[chunk]
        self._forwards[chunk] += 1
        self._current = slot = self._slots[number]
        self._same_random_numbers(chunk, slot.microbatch)
        output, loss_function = self._call.forward_step_func(data_iterator, model, *rest)
        output.register_hook(partial(self._before_backward, chunk, number))
        return output, partial(self._loss, slot, loss_function)

    def _same_random_numbers(self, chunk: int, microbatch: int) -> None:
        """Let dropout draw the same masks with and without the option."""
        states = self._random.get((chunk, microbatch))
        if states is None:
            self._random[chunk, microbatch] = compat.rng_state()
        else:
            compat.set_rng_state(states)

    def _before_backward(self, chunk: int, number: int, gradient: torch.Tensor) -> None:
        self._current = self._slots[number]
        self._border(chunk, number)

    def _loss(self, slot: Slot, loss_function: Callable[..., Any], output: torch.Tensor) -> Any:
        """Compute the loss times the sign of the pass, and report how the option changes the loss."""
        if slot.trial != IDLE and self._schedule.trials[slot.trial].gemm is Gemm.FPROP:
            if slot.sign > 0:
                self._output = output.detach()
            else:
                self._note_change(slot.trial, loss_function, output)
        loss, *others = loss_function(output)
        return (loss * (slot.sign * self._loss_factor), *others)

    @torch.no_grad()
    def _note_change(self, trial: int, loss_function: Callable[..., Any], output: torch.Tensor) -> None:
        """Report the change of the loss.

        The loss is linear in the token losses, so it is evaluated on their difference. This avoids the cancellation of
        subtracting two losses.
        """
        assert self._output is not None
        change, *others = loss_function(self._output - output.detach())
        self._output = None
        if self._tp_rank != 0:
            return
        if self._loss_share is not None:
            tokens = others[0].clamp(min=1) if len(others) == 2 else 1
            change = change / tokens * self._loss_share
        self._reader.add_loss(trial, change.double())

    # -- linears -----------------------------------------------------------------------------------------------
    def _forced(self, handle: LinearHandle) -> Forced:
        slot = self._current
        if slot.trial == IDLE:
            return Forced(microbatch=slot.microbatch)
        trial = self._schedule.trials[slot.trial]
        if handle.name not in trial.linears:
            return Forced(microbatch=slot.microbatch)
        if slot.sign > 0:
            if trial.format is None:
                return Forced(microbatch=slot.microbatch, nudge=trial.gemm)
            return Forced(_only(trial.gemm, trial.format), slot.microbatch)
        if trial.gemm is not Gemm.FPROP or trial.format is None:
            return Forced(microbatch=slot.microbatch)
        report = partial(self._reader.add_first_order, slot.trial)
        return Forced(microbatch=slot.microbatch, compare=trial.format, report=report)


def _only(gemm: Gemm, fmt: Format) -> tuple[Format, Format, Format]:
    formats = list(ALL_BF16)
    formats[GEMM_INDEX[gemm]] = fmt
    return formats[0], formats[1], formats[2]
