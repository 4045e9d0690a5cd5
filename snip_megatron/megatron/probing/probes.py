"""Runs the passes of an update over the first microbatches of a training step, without changing the training.

All passes run in bf16 through Megatron's own schedule. Weights, optimizer state, random states and data order stay as
they are. Gradient buffers are zeroed before training continues.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model

from snip_megatron.config import SnipConfig
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.megatron import compat
from snip_megatron.megatron.probing import probe_memory
from snip_megatron.megatron.probing.drift_probe import DriftProbe, sink_rows
from snip_megatron.megatron.probing.oracle import Oracle
from snip_megatron.megatron.probing.probe_call import LoopShape, StepCall, run_schedule, undisturbed
from snip_megatron.megatron.probing.probe_memory import Pipeline, ProbeMemory, probed_shapes
from snip_megatron.megatron.probing.stream import ResidualStream
from snip_megatron.megatron.warmup import Rehearsed
from snip_megatron.optimizers.weight_drift import StepScale
from snip_megatron.quantization import derive_seed
from snip_megatron.runtime.protocols import Unmeasured
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

_NOISE = 2  # a stream of random numbers derived from --snip-seed; drift_probe.py uses stream 1

__all__ = ["LoopShape", "ProbeResult", "ProbeRunner", "StepCall"]


@dataclass(frozen=True)
class ProbeResult:
    """What an update measured.

    Attributes:
        table: The statistics, equal on all ranks.
        seconds: Kind of pass → its seconds on this rank.
        tokens: Tokens of the probe over all ranks.
        passes: Kind of pass → microbatches that went through it on each rank.
    """

    table: StatisticsTable
    seconds: dict[str, float]
    tokens: int
    passes: dict[str, int]


class ProbeRunner:
    """Runs the passes of an update. Every rank has one, and all ranks call its methods at the same step.

    Args:
        registry: Linears of this rank.
        snip: SNIP's configuration.
        shape: Sizes of the training loop.
        groups: Process groups.
        model: Model chunks of this rank, wrapped by DDP.
        with_drift: Whether the policy uses weight divergence. The noise passes run only if it does.

    Attributes:
        has_trained: Whether this process has run a training step. The peak memory of that step predicts what a pass
            takes.
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
        self._routing: compat.RepeatedRouting | None = None
        self._table_shape = TableShape(
            names=tuple(registry.names),
            formats=snip.measured_formats,
            sinks=sink_rows(self._config, shape.padded_vocab_size),
            mixture=registry.mixture,
        )
        self._drift = DriftProbe(
            self._model, self._table_shape, groups, snip.seed, optimizer_sharded=shape.optimizer_sharded
        )
        self._oracle = Oracle(registry, shape, groups, self._drift, self._pass_group()) if snip.truth else None
        self.has_trained = False
        self._memory = ProbeMemory(
            probed_shapes(registry, shape, hidden=self._config.hidden_size),
            list(registry),
            Pipeline.of(registry, self._config, shape),
            snip.probe_tokens,
            gathers=bool(self._config.sequence_parallel),
            recomputes=self._config.recompute_granularity == "full",
        )

    def rehearsed(self, optimizer: str) -> Rehearsed:
        """Return what updates and steps of this rank run, for :class:`snip_megatron.megatron.warmup.WarmUp`.

        Args:
            optimizer: Megatron's name of it.
        """
        return Rehearsed(
            tokens=self._shape.tokens(1, 1),
            gathers=bool(self._config.sequence_parallel),
            sharded=self._shape.optimizer_sharded and self._groups.dp_size > 1,
            drift=self._with_drift and optimizer == "adam",
            sinks=[weight for _, weight, _, _ in self._drift.local_sinks()],
        )

    def check_optimizer(self, optimizer: Any, step: int) -> None:
        """Raise SnipError if updates need the next step of a parameter on this rank, and the optimizer's is not known.

        Args:
            optimizer: Megatron's optimizer.
            step: Number of training steps done.
        """
        if self._with_drift and self._snip.updates:
            sinks = (weight for _, weight, _, _ in self._drift.local_sinks())
            for weight in (*(handle.weight for handle in self._registry), *sinks):
                compat.update_of(optimizer, weight, step)

    def shortage(self, call: StepCall, idle: float = 0.0) -> Unmeasured | None:
        """Return why this update cannot run, or None if all ranks have enough memory. Collective.

        The result is equal on all ranks. A CPU's memory is not checked.

        Args:
            call: The arguments of the step.
            idle: Bytes that torch has reserved for CUDA graphs on this rank, and that a probe cannot use.
        """
        memory = probe_memory.device_memory(self._device, idle)
        if memory is None:
            return None
        peak = memory.peak if self.has_trained else None
        needed = self._memory.needed(peak, self._microbatches(call), call.num_microbatches)
        return probe_memory.shortage(needed, memory, self._groups, self._device)

    # -- the passes --------------------------------------------------------------------------------------------
    def run(self, call: StepCall) -> ProbeResult:
        """Run the passes of this update on the first microbatches of the step. Collective."""
        microbatches = self._microbatches(call)
        tokens = self._shape.tokens(microbatches, self._groups.dp_size)
        per_step = self._shape.tokens(call.num_microbatches, self._groups.dp_size)
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
        with undisturbed(call, self._registry.context) as self._rng, ExitStack() as stack:
            stack.enter_context(attached(recorders))
            stack.enter_context(stream.attached())
            self._routing = stack.enter_context(compat.routing_repeated(self._model))
            self._registry.context.probing = True
            with compat.loss_tokens_counted(call.config) as counts:
                seconds["statistics"] = self._run_pass(Pass.STATISTICS, call, microbatches, recorders, stream)
            started = time.perf_counter()
            scale = StepScale(self._gradient_scale(counts), call.clip, tokens, per_step)
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
        passes = {kind: microbatches for kind in seconds if kind != "reduction"}
        finished = table.to_table(
            step=call.step, tokens=tokens, tokens_per_step=per_step, meta={"clip": call.clip, **seconds}
        )
        if self._oracle is not None:
            started = time.perf_counter()
            truth, passes["truth"] = self._oracle.measure(call, finished, range(microbatches), scale)
            others = range(microbatches, 2 * microbatches)
            again, more = self._oracle.measure(call, finished, others, scale)
            finished, passes["truth"] = replace(finished, truth=truth, truth_again=again), passes["truth"] + more
            seconds["truth"] = time.perf_counter() - started
        return ProbeResult(finished, seconds, tokens, passes)

    def _noise_passes(self) -> list[Pass]:
        if not self._with_drift:
            return []
        return [Pass.FORWARD_NOISE, Pass.BACKWARD_NOISE] if self._snip.backward_noise else [Pass.FORWARD_NOISE]

    def _microbatches(self, call: StepCall) -> int:
        """Microbatches of the probe on this rank, rounded up to the groups of an interleaved schedule."""
        wanted = min(self._snip.probe_microbatches, call.num_microbatches)
        group = self._pass_group()
        return min(-(-wanted // group) * group, call.num_microbatches)

    def _pass_group(self) -> int:
        """Size of the groups of microbatches in an interleaved schedule; 1 in other schedules."""
        if self._shape.virtual_stages is None:
            return 1
        return int(self._config.microbatch_group_size_per_vp_stage or self._config.pipeline_model_parallel_size)

    def _run_pass(
        self,
        phase: Pass,
        call: StepCall,
        microbatches: int,
        recorders: list[LinearRecorder],
        stream: ResidualStream,
        sigma: float = 0.0,
    ) -> float:
        """Run one forward and backward of the probe's microbatches. Returns the seconds it took."""
        started = time.perf_counter()
        for recorder in recorders:
            recorder.start(phase)
        stream.start(phase, sigma)
        self._registry.start_step(call.step)
        compat.set_rng_state(self._rng)  # dropout draws the same masks in every pass
        assert self._routing is not None
        self._routing.start(first=phase is Pass.STATISTICS)
        run_schedule(call, self._shape, range(microbatches))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # otherwise the reduction, which waits for it, would take the blame
        return time.perf_counter() - started

    # -- reduction ---------------------------------------------------------------------------------------------
    def _gradient_scale(self, counts: Sequence[torch.Tensor]) -> float:
        """Return the factor from recorded gradients, summed over data parallel ranks, to those of the mean token loss.

        Args:
            counts: The tokens of this rank that the losses of the statistics pass count. A loss mask leaves some out.
        """
        if not self._config.calculate_per_token_loss:
            return 1.0 / self._groups.dp_size
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if self._tp_rank == 0:  # tensor parallel ranks count the same tokens
            total += sum(count.to(self._device) for count in counts)
        dist.all_reduce(total, group=self._groups.world)
        return 1.0 / max(float(total), 1.0)  # as Megatron

    def _partial(self, scale: StepScale) -> PartialTable:
        return PartialTable(self._table_shape, scale.gradient)

    def _collect(self, table: PartialTable, recorders: list[LinearRecorder], stream: ResidualStream) -> None:
        for recorder in recorders:
            table.add_recorder(recorder, self._groups.of(recorder.handle).dp_rank)
        for boundary in stream.reported:
            table.add_boundary(boundary)

    def _reduce_statistics(
        self, recorders: list[LinearRecorder], stream: ResidualStream, scale: StepScale
    ) -> PartialTable:
        finish_dots(recorders, self._groups)
        reduce_columns(recorders, self._groups)
        table = self._partial(scale)
        self._collect(table, recorders, stream)
        for handle in (recorder.handle for recorder in recorders):
            first = self._groups.of(handle).dp_rank == 0 and handle.tp_rank == 0
            if first and not handle.expert:  # experts of a layer share a row, which the first one adds
                table.add_layout(handle.name, handle.stage, handle.n, handle.k)
        table.reduce(self._groups.world, self._device)
        return table

    def _sigma(self, phase: Pass, table: PartialTable, scale: StepScale) -> float:
        """Standard deviation of a pass's noise.

        It is ``--snip-probe-noise`` times the root mean square of the residual stream at the embedding (forward noise)
        or of its gradient at the last layer's output (backward noise).
        """
        elements = scale.tokens * self._config.hidden_size
        if phase is Pass.FORWARD_NOISE:
            power = float(table.arrays["boundary.h2"][0])
        else:
            power = float(table.arrays["boundary.r2"][-1]) / scale.gradient**2
        return float(self._snip.probe_noise * (power / elements) ** 0.5)
