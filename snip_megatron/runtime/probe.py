"""The passes of an update over the first microbatches of a training step.

All passes run in bf16 through the host's own schedule. Weights, optimizer state, random states and data order do not
change.
"""

import functools
import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist

from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.numerics.quantize import derive_seed
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime import probe_memory as memory
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.host import Host, HostStep, LocalSink, ProbeResult, Unmeasured
from snip_megatron.runtime.residual_stream import ResidualStream
from snip_megatron.sensitivity.recorder import LinearRecorder, Pass, attached
from snip_megatron.sensitivity.reduction import PartialTable, ProbeGroups, TableShape, add_loss_effects, reduce_columns
from snip_megatron.sensitivity.sums import sum_squares
from snip_megatron.sensitivity.update_error import CachedSignWords, StepScale, linear_update_error, sink_update_error

_NOISE_SIZE = 0.03
_SIGNS, _NOISE = 1, 2  # streams of random numbers derived from --snip-seed


class ProbeRunner:
    """Runs the passes of an update. All ranks call its methods at the same step.

    Args:
        host: The host of the run.
        registry: The converted linears of this rank.
        config: The configuration of the run.
        weighs_updates: Whether the policy needs the noise pass and weight divergence.

    Attributes:
        has_trained: Whether this process has trained a step, so that its peak memory predicts that of a pass.
    """

    def __init__(self, host: Host, registry: LinearRegistry, config: SnipConfig, *, weighs_updates: bool) -> None:
        self._host = host
        self._registry = registry
        self._config = config
        self._weighs_updates = weighs_updates
        self._shape = TableShape(registry.rows, config.measured_formats, host.sinks)
        self._updates = UpdateErrors(host, len(registry.names), config.seed)
        self.has_trained = False

    def check_optimizer(self, step: HostStep) -> None:
        """Raise SnipError if updates need the optimizer's next update of a parameter, and it is not known."""
        if self._weighs_updates and self._config.updates:
            weights = [handle.weight for handle in self._registry] + [sink.weight for sink in self._host.local_sinks]
            for weight in weights:
                step.update_of(weight)

    def fit(self, step: HostStep, most: int | None = None) -> int | Unmeasured:
        """Return how many sequences of a microbatch the passes of this update run, equal on all ranks. Collective.

        They are the most that fit into the memory of all ranks, and at most ``most``, those of the latest update, so
        that a resumed run takes as many. The memory of a CPU is not checked. If one rank has no memory for one
        sequence, the result says so.
        """
        host, most = self._host, step.sequences if most is None else min(most, step.sequences)
        free = memory.device_memory(host.device)
        if free is None or host.tokens is None:
            return most
        available, peak = free
        needed = functools.partial(
            memory.needed, self._registry, host, self._config.probe_tokens, peak if self.has_trained else None,
            self._microbatches(step), step.microbatches,
        )  # fmt: skip
        part = memory.fitting(step.sequences, needed, available, host.device)
        return part if isinstance(part, Unmeasured) else min(most, round(part * step.sequences))

    def _microbatches(self, step: HostStep) -> int:
        """Return the microbatches of the probe on this rank, rounded up to the groups of an interleaved schedule."""
        microbatches, group = min(self._config.probe_microbatches, step.microbatches), self._host.pass_group
        return min(-(-microbatches // group) * group, step.microbatches)

    # -- the passes --------------------------------------------------------------------------------------------
    def run(self, step: HostStep, clip: float, sequences: int) -> ProbeResult:
        """Run the passes of this update on the first microbatches of the step. Collective.

        ``clip`` is the factor by which gradient clipping scaled the last gradient. ``sequences`` is the result of
        :meth:`fit`.
        """
        config, microbatches = self._config, self._microbatches(step)
        seconds: dict[str, float] = {}
        recorders = [LinearRecorder(handle, config.measured_formats, config.probe_tokens) for handle in self._registry]
        seed = derive_seed(config.seed, _NOISE)
        stream = ResidualStream(self._host, self._registry.context, config.probe_tokens, seed)
        with ExitStack() as stack:
            stack.enter_context(step.undisturbed())
            stack.enter_context(attached(recorders))
            stack.enter_context(stream.attached())
            stack.callback(setattr, self._registry.context, "probing", False)
            self._registry.context.probing = True
            seconds["statistics"] = self._run_pass(Pass.STATISTICS, step, sequences, recorders, stream)
            started = time.perf_counter()
            scale = self._scale(step, clip, sequences, recorders)
            # If only the passes tell the tokens, a block that runs twice would count them twice.
            stream.finish_statistics(microbatches, once=self._host.tokens is None)
            if self._weighs_updates:
                reduce_columns(recorders, self._host.groups)
            table = self._measured(recorders, stream, scale)
            if self._weighs_updates:
                partial = PartialTable(self._shape, scale.gradient)
                self._updates.collect(partial, table, recorders, step, scale)
                partial.reduce(self._host.device)
                table.merge(partial)
            seconds["reduction"] = time.perf_counter() - started
            if self._weighs_updates:
                sigma = self._sigma(table, scale)
                seconds["forward_noise"] = self._run_pass(Pass.FORWARD_NOISE, step, sequences, recorders, stream, sigma)
                started = time.perf_counter()
                table.merge(self._measured(recorders, stream, scale))
                seconds["reduction"] += time.perf_counter() - started
        tokens, meta = scale.tokens, {"clip": clip, **seconds}
        finished = table.to_table(step=step.step, tokens=tokens, tokens_per_step=scale.tokens_per_step, meta=meta)
        passes = {kind: microbatches for kind in seconds if kind != "reduction"}
        return ProbeResult(finished, seconds, scale, passes, sequences)

    def _run_pass(
        self,
        phase: Pass,
        step: HostStep,
        sequences: int,
        recorders: Sequence[LinearRecorder],
        stream: ResidualStream,
        sigma: float = 0.0,
    ) -> float:
        """Run one forward and backward of the probe's microbatches. Returns its seconds."""
        started = time.perf_counter()
        for recorder in recorders:
            recorder.start(phase)
        stream.start(phase, sigma)
        self._registry.start_step(step.step)
        step.run(self._microbatches(step), sequences)
        if self._host.device.type == "cuda":
            torch.cuda.synchronize(self._host.device)  # otherwise the reduction would wait for it
        return time.perf_counter() - started

    # -- reduction ---------------------------------------------------------------------------------------------
    def _scale(self, step: HostStep, clip: float, sequences: int, recorders: Sequence[LinearRecorder]) -> StepScale:
        """Return the scales of the gradient, after the statistics pass. Collective."""
        microbatches, of_microbatch = self._microbatches(step), self._host.tokens
        if of_microbatch is None:
            rows = {recorder.rows for recorder in recorders}
            if len(rows) != 1 or 0 in rows:
                raise SnipError(
                    "the linears of the blocks see different numbers of tokens, or none; SNIP takes one stream"
                )
            of_microbatch = rows.pop() // microbatches
        each = self._host.groups.dp_size * of_microbatch
        tokens = microbatches * each * sequences // step.sequences
        return StepScale(step.gradient_scale(), clip, tokens, step.microbatches * each)

    def _measured(self, recorders: Sequence[LinearRecorder], stream: ResidualStream, scale: StepScale) -> PartialTable:
        """Return the reduced sums that linears and boundaries have recorded since the last call. Collective."""
        table = PartialTable(self._shape, scale.gradient)
        add_loss_effects(table, recorders, self._host.groups)
        for recorder in recorders:
            table.add_recorder(recorder, self._host.groups.of(recorder.handle).dp_rank)
        for boundary in stream.reported:
            table.add_boundary(boundary)
        table.reduce(self._host.device)
        return table

    def _sigma(self, table: PartialTable, scale: StepScale) -> float:
        """Return the standard deviation of the noise: a share of the root mean square of the residual stream at the
        embedding.
        """
        power = float(table.arrays["boundary.h2"][0]) / (scale.tokens * self._host.hidden)
        return float(_NOISE_SIZE * power**0.5)


class UpdateErrors:
    """Weight divergence: how gradient errors change the optimizer's next update of this rank's parameters.

    ``linears`` is the number of linears of the model, and ``seed`` the value of ``--snip-seed``.
    """

    def __init__(self, host: Host, linears: int, seed: int) -> None:
        self._host = host
        self._linears = linears
        self._seed = seed
        self._words = CachedSignWords()  # four bytes for each row and column of a weight

    def collect(
        self,
        partial: PartialTable,
        table: PartialTable,
        recorders: Sequence[LinearRecorder],
        step: HostStep,
        scale: StepScale,
    ) -> None:
        """Add this rank's part to ``partial``, which the caller reduces. Collective.

        Args:
            partial: The table that receives the sums.
            table: The reduced table of the statistics pass.
            recorders: The recorders of this rank's linears, whose column norms are reduced.
            step: The step whose statistics pass has run.
            scale: Scales of the gradient.
        """
        of_experts = [recorder.expert_sums for recorder in recorders if recorder.expert_sums is not None]
        sums = iter(torch.stack(of_experts).tolist() if of_experts else ())  # one copy to the host for all experts
        for recorder in recorders:
            expert_sums = None if recorder.expert_sums is None else next(sums)
            self._add_linear(partial, table, recorder, expert_sums, step, scale)
        step.join_gradients()
        for sink in self._host.local_sinks:
            self._add_sink(partial, sink, step, scale)

    def _add_linear(
        self,
        partial: PartialTable,
        table: PartialTable,
        recorder: LinearRecorder,
        expert_sums: Sequence[float] | None,
        step: HostStep,
        scale: StepScale,
    ) -> None:
        handle, groups = recorder.handle, self._host.groups.of(recorder.handle)
        name, unit = handle.name, scale.gradient**2
        gradient = _reduced(step.gradient(handle.weight), groups)
        if handle.repeats:
            return
        if groups.dp_rank == 0:
            partial.add("linear.gw2", name, sum_squares(gradient) * unit)
        state = step.update_of(handle.weight)
        if state is None or not (self._host.optimizer_sharded or groups.dp_rank == 0):
            return
        x2, g2, s2 = (table.linear(name, column) for column in ("x2", "g2", "s2"))
        tokens = None
        if expert_sums is not None:
            x2, g2, s2, tokens = expert_sums
            g2, s2 = g2 * unit, s2 * unit
        seed = derive_seed(self._seed, _SIGNS, handle.index)
        drift2, wdrift2 = linear_update_error(
            recorder, gradient, state, scale, s2=s2, x2=x2, g2=g2, seed=seed, tokens=tokens, words=self._words
        )
        partial.add("drift2", name, drift2)
        partial.add("by_format.wdrift2", name, wdrift2)

    def _add_sink(self, partial: PartialTable, sink: LocalSink, step: HostStep, scale: StepScale) -> None:
        groups = self._host.groups
        gradient = _reduced(step.gradient(sink.weight), groups)
        state, weight = step.update_of(sink.weight), self._host.full_tensor(sink.weight).detach()
        if (
            state is None
            or not (self._host.optimizer_sharded or groups.dp_rank == 0)
            or (sink.replicated and groups.tp_rank)
        ):
            return
        seed = derive_seed(self._seed, _SIGNS, self._linears + sink.row)
        w2 = sum_squares(weight.reshape(-1)[state.start : state.end])
        drift2 = sink_update_error(gradient, state, scale, seed=seed, first_row=sink.first_row, words=self._words)
        partial.add("sink_drift2", sink.row, drift2)
        partial.add("sink_w2", sink.row, w2)


def _reduced(gradient: torch.Tensor, groups: ProbeGroups) -> torch.Tensor:
    """Sum a gradient over data parallel ranks in place, and return it."""
    if groups.dp_size > 1:
        dist.all_reduce(gradient, group=groups.dp)
    return gradient
