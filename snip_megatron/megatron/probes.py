"""Probes: passes over a step's first microbatches that measure and leave nothing behind (DESIGN, rule 3).

Everything runs in bf16 through Megatron's own schedule. Weights, optimizer, RNG and data order are untouched; gradient
buffers are zeroed again before training continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model

from snip_megatron.config import SnipConfig
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.megatron import compat
from snip_megatron.megatron.drift_probe import DriftProbe, sink_rows
from snip_megatron.megatron.stream import ResidualStream
from snip_megatron.quantization import derive_seed
from snip_megatron.statistics.boundaries import TokenShard
from snip_megatron.statistics.recorder import LinearRecorder, Pass, attached
from snip_megatron.statistics.reduction import (
    PartialTable,
    ProbeGroups,
    TableShape,
    finish_dots,
    reduce_columns,
)
from snip_megatron.statistics.table import StatisticsTable
from snip_megatron.statistics.weight_drift import StepScale

_NOISE = 2  # stream of random numbers under --snip-seed; 1 is the drift's signs


@dataclass(frozen=True)
class LoopShape:
    """Sizes of the training loop that the schedule asks for.

    Attributes:
        seq_length, micro_batch_size: of one microbatch.
        padded_vocab_size: rows of the word embedding over all tensor parallel ranks.
        virtual_stages: model chunks a rank, under interleaved pipelining.
        optimizer_sharded: whether optimizer states are sharded over data parallel ranks.
    """

    seq_length: int
    micro_batch_size: int
    padded_vocab_size: int
    virtual_stages: int | None
    optimizer_sharded: bool


@dataclass(frozen=True)
class StepCall:
    """What ``train_step`` was called with, as far as a probe needs it."""

    step: int
    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: list[Any]
    optimizer: Any
    config: Any
    forward_backward_func: Callable[..., Any]
    num_microbatches: int
    clip: float


@dataclass(frozen=True)
class ProbeResult:
    """The table (the same on every rank) and the seconds of each pass."""

    table: StatisticsTable
    seconds: dict[str, float]
    tokens: int


class ProbeRunner:
    """Runs the passes of one update. One a rank; collective: all ranks call :meth:`run` at the same step.

    Args:
        registry: this rank's linears.
        snip: the run's configuration.
        shape: sizes of the loop.
        groups: process groups.
        model: this rank's chunks, wrapped by DDP.
        with_drift: whether the policy uses weight divergence: without it there are no noise passes.
    """

    def __init__(
        self,
        registry: LinearRegistry,
        snip: SnipConfig,
        shape: LoopShape,
        groups: ProbeGroups,
        model: Sequence[torch.nn.Module],
        *,
        with_drift: bool,
    ) -> None:
        self._with_drift = with_drift
        self._registry = registry
        self._snip = snip
        self._shape = shape
        self._groups = groups
        self._model = list(model)
        self._config = get_attr_wrapped_model(model[0], "config")
        tp_size, tp_rank = dist.get_world_size(groups.tp), dist.get_rank(groups.tp)
        split = self._config.sequence_parallel and tp_size > 1
        self._tokens = TokenShard(
            rank=tp_rank if split else 0, size=tp_size if split else 1, reports=split or tp_rank == 0
        )
        self._tp_rank = tp_rank
        self._device = next(model[0].parameters()).device
        self._rng: Any = None
        self._table_shape = TableShape(
            names=tuple(registry.names),
            formats=snip.measured_formats,
            sinks=sink_rows(self._config, shape.padded_vocab_size),
        )
        self._drift = DriftProbe(
            self._model, self._table_shape, groups, snip.seed, optimizer_sharded=shape.optimizer_sharded
        )

    # -- the passes --------------------------------------------------------------------------------------------
    def run(self, call: StepCall) -> ProbeResult:
        """Statistics, forward noise and, when asked, backward noise on the first microbatches of the step."""
        microbatches = self._microbatches(call)
        tokens = microbatches * self._groups.dp_size * self._shape.seq_length * self._shape.micro_batch_size
        per_step = call.num_microbatches * tokens // microbatches
        per_token = bool(self._config.calculate_per_token_loss)
        scale = StepScale(1.0 / (tokens if per_token else self._groups.dp_size), call.clip, tokens, per_step)
        recorders = [
            LinearRecorder(handle, self._snip.measured_formats, self._snip.probe_tokens) for handle in self._registry
        ]
        stream = ResidualStream(
            self._model,
            self._registry.context,
            self._tokens,
            self._snip.probe_tokens,
            derive_seed(self._snip.seed, _NOISE),
        )
        seconds: dict[str, float] = {}
        with ExitStack() as stack:
            self._enter_probe(stack, call, recorders, stream)
            seconds["statistics"] = self._run_pass(Pass.STATISTICS, call, microbatches, recorders, stream)
            started = time.perf_counter()
            stream.finish_statistics()
            table = self._reduce_statistics(recorders, stream, scale)
            if self._with_drift:
                drift = self._partial(scale)
                self._drift.collect(drift, table, recorders, call.optimizer, scale, call.step)
                drift.reduce(self._groups.world, self._device)
                table.merge(drift)
            seconds["reduction"] = time.perf_counter() - started
            for phase in self._noise_passes():
                sigma = self._sigma(phase, table, scale)
                seconds[phase.value] = self._run_pass(phase, call, microbatches, recorders, stream, sigma)
            started = time.perf_counter()
            late = self._partial(scale)
            self._collect(late, recorders, stream)
            late.reduce(self._groups.world, self._device)
            table.merge(late)
            seconds["reduction"] += time.perf_counter() - started
        finished = table.to_table(
            step=call.step, tokens=tokens, tokens_per_step=per_step, meta={"clip": call.clip, **seconds}
        )
        return ProbeResult(finished, seconds, tokens)

    def _noise_passes(self) -> list[Pass]:
        if not self._with_drift:
            return []
        return [Pass.FORWARD_NOISE, Pass.BACKWARD_NOISE] if self._snip.backward_noise else [Pass.FORWARD_NOISE]

    def _microbatches(self, call: StepCall) -> int:
        """Microbatches a rank; an interleaved schedule needs whole groups of them."""
        wanted = min(self._snip.probe_microbatches, call.num_microbatches)
        if self._shape.virtual_stages is None:
            return wanted
        group = int(self._config.microbatch_group_size_per_vp_stage or self._config.pipeline_model_parallel_size)
        return min(-(-wanted // group) * group, call.num_microbatches)

    def _enter_probe(
        self, stack: ExitStack, call: StepCall, recorders: list[LinearRecorder], stream: ResidualStream
    ) -> None:
        context = self._registry.context
        self._rng = states = compat.rng_state()

        def leave() -> None:
            context.probing = False
            for chunk in call.model:
                chunk.zero_grad_buffer()
            call.optimizer.zero_grad()
            compat.set_rng_state(states)

        stack.callback(leave)
        stack.enter_context(compat.rerun_disabled())
        stack.enter_context(compat.quiet_schedule(call.config))
        stack.enter_context(attached(recorders))
        stack.enter_context(stream.attached())
        context.probing = True

    def _run_pass(
        self,
        phase: Pass,
        call: StepCall,
        microbatches: int,
        recorders: list[LinearRecorder],
        stream: ResidualStream,
        sigma: float = 0.0,
    ) -> float:
        """One forward and backward of the probe's microbatches; returns its seconds."""
        started = time.perf_counter()
        for recorder in recorders:
            recorder.start(phase)
        stream.start(phase, sigma)
        self._registry.start_step(call.step)
        compat.set_rng_state(self._rng)  # dropout, if any, draws the same masks in every pass
        with ExitStack() as stack:
            for chunk in call.model:
                chunk.zero_grad_buffer()  # zero first: no_sync must see fresh buckets
            call.optimizer.zero_grad()  # an FP32 optimizer's step leaves p.grad an alias of main_grad
            for chunk in call.model:
                stack.enter_context(chunk.no_sync())
            call.forward_backward_func(
                forward_step_func=call.forward_step_func,
                data_iterator=compat.peek(call.data_iterator, microbatches).iterator(),
                model=call.model,
                num_microbatches=microbatches,
                seq_length=self._shape.seq_length,
                micro_batch_size=self._shape.micro_batch_size,
                decoder_seq_length=self._shape.seq_length,
                forward_only=False,
            )
        return time.perf_counter() - started

    # -- reduction ---------------------------------------------------------------------------------------------
    def _partial(self, scale: StepScale) -> PartialTable:
        return PartialTable(self._table_shape, scale.gradient)

    def _collect(self, table: PartialTable, recorders: list[LinearRecorder], stream: ResidualStream) -> None:
        for recorder in recorders:
            table.add_recorder(recorder, self._groups.dp_rank)
        for boundary in stream.reported:
            table.add_boundary(boundary)

    def _reduce_statistics(
        self, recorders: list[LinearRecorder], stream: ResidualStream, scale: StepScale
    ) -> PartialTable:
        finish_dots(recorders, self._groups)
        reduce_columns(recorders, self._groups)
        table = self._partial(scale)
        self._collect(table, recorders, stream)
        if self._groups.dp_rank == 0 and self._tp_rank == 0:
            for recorder in recorders:
                handle = recorder.handle
                table.add_layout(handle.name, handle.stage, handle.n, handle.k)
        table.reduce(self._groups.world, self._device)
        return table

    def _sigma(self, phase: Pass, table: PartialTable, scale: StepScale) -> float:
        """Standard deviation of a pass's noise: a fixed share of the stream's (or its gradient's) root mean square."""
        elements = scale.tokens * self._config.hidden_size
        if phase is Pass.FORWARD_NOISE:
            power = float(table.arrays["boundary.h2"][0])
        else:
            power = float(table.arrays["boundary.r2"][-1]) / scale.gradient**2
        return float(self._snip.probe_noise * (power / elements) ** 0.5)
