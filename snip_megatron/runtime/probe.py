"""The passes of an update over the first microbatches of a training step.

All passes run through the host's own schedule, in bf16 but for the forwards that measure maps. Weights, optimizer
state, random states and data order do not change. An update is a
:class:`snip_megatron.runtime.exchange.Transaction`: if one of its parts fails on a rank, all ranks drop it.

| part | what may fail on a rank without harm to the training |
|---|---|
| ``memory`` | :meth:`ProbeRunner.check_memory` |
| ``preparation`` | :meth:`Passes.prepare` |
| ``statistics`` | ``HostStep.prepare``, ``LinearRecorder._record``, ``Boundary._on_forward`` and ``._on_gradient`` |
| ``weight_divergence`` | :meth:`Passes.add_linear`, :meth:`Passes.add_sink`, ``HostStep.update_of`` |
| ``forward_noise`` | as ``statistics``, ``LinearRecorder._compare``, ``ResidualStream._draw`` |
| ``reduction`` | :meth:`Passes.fill_table`, ``ResidualStream.finish_statistics``, ``PartialTable.pack`` |
| ``submission`` | ``RankZeroCoordinator.submit`` |
| ``rise`` | ``HostStep.prepare``, ``HostStep.losses`` (in :func:`snip_megatron.runtime.rise.measure_rises`) |

An exception in the model's own forward or backward is one of these where no rank waits for another one inside a pass
(data parallelism alone). Elsewhere it ends the job with a line (:class:`UpdateBrokenError`).
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.numerics.quantize import derive_seed
from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime import probe_memory as memory
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.exchange import (
    Failure,
    Transaction,
    UnsupportedError,
    UpdateBrokenError,
    UpdateDroppedError,
)
from snip_megatron.runtime.host import Host, HostStep, LocalSink, ProbeResult
from snip_megatron.runtime.residual_stream import ResidualStream
from snip_megatron.runtime.rise import Rise, enough_sequences, measure_rises
from snip_megatron.sensitivity.recorder import LinearRecorder, Pass, attached
from snip_megatron.sensitivity.reduction import (
    PartialTable,
    ProbeGroups,
    add_loss_effects,
    group_size,
    reduce_columns,
    reduce_loss_effects,
)
from snip_megatron.sensitivity.sums import sum_squares
from snip_megatron.sensitivity.update_error import AdamWState, StepScale, linear_update_error, sink_update_error

_NOISE_SIZE = 0.03
_SIGNS, _NOISE = 1, 2  # streams of random numbers derived from --snip-seed


@dataclass(eq=False)
class ProbeRunner:
    """Runs the passes of an update. All ranks call its methods at the same step."""

    host: Host
    registry: LinearRegistry  # the converted linears of this rank
    config: SnipConfig
    weighs_updates: bool  # whether the policy needs the noise pass and weight divergence
    # whether this process has trained a step, so that its peak memory predicts that of a pass
    has_trained: bool = False
    first_peak: float = 0.0  # bytes that the first pass of the training took

    def first_pass[T](self, run: Callable[[], T]) -> T:
        """Run a pass of the first training step, and measure what memory it takes.

        The optimizer allocates its state after it. Under CUDA graphs no later pass is as large. The peak of the process
        is then too low a measure: less memory is allocated beside the first pass than beside later ones.
        """
        device = self.host.device
        if device.type != "cuda":
            return run()
        before = torch.cuda.memory_allocated(device)
        result = run()
        self.first_peak = max(self.first_peak, float(torch.cuda.max_memory_allocated(device) - before))
        return result

    def check_optimizer(self, step: HostStep) -> None:
        """Raise SnipError if updates need the optimizer's next update of a parameter, and it is not known."""
        if self.weighs_updates and self.config.updates:
            weights = [handle.weight for handle in self.registry] + [sink.weight for sink in self.host.local_sinks]
            for weight in weights:
                step.update_of(weight)

    def measure(self, step: HostStep, clip: float, most: int | None = None) -> ProbeResult:
        """Measure the statistics of an update. Collective.

        Random states, gradients, routers and data order are restored in either case.

        Args:
            step: The step before which the update is.
            clip: The factor by which gradient clipping scaled the last gradient.
            most: Maximum number of sequences of a microbatch. None if the latest update sets none.

        Raises:
            UpdateDroppedError: On all ranks, if a part failed on a rank.
            UnsupportedError: On all ranks, if the model or the loop is not one that SNIP measures.
            UpdateBrokenError: On one rank, if it failed where others wait for it.
        """
        with self._transaction(step) as update:
            update.sequences = self.fit(step, most, update)
            return self.run(step, clip, update.sequences, update)

    def measure_maps(self, step: HostStep, maps: Sequence[PrecisionMap], most: int | None = None) -> list[Rise]:
        """Measure how much each map raises the loss. Collective.

        ``step`` is the one before which a map is adopted, and ``most`` the sequences of a microbatch that the update's
        probes took. A forward without gradients takes less memory than their passes. What is restored and raised is as
        in :meth:`measure`.
        """
        sequences = step.sequences if most is None else min(most, step.sequences)
        sequences = enough_sequences(sequences, (self.host.tokens or 0) // step.sequences)
        with self._transaction(step) as update:
            update.sequences = sequences
            return measure_rises(maps, self.host, self.registry, step, self._microbatches(step), sequences, update)

    @contextmanager
    def _transaction(self, step: HostStep) -> Iterator[Transaction]:
        """Yield an update. Errors outside of its votes become UpdateBrokenError, or on one rank UpdateDroppedError."""
        update = Transaction(self.host.device)
        try:
            yield update
        except (UpdateDroppedError, UnsupportedError):
            raise
        except Exception as error:
            failure = Failure.of(update.part, error)
            if group_size(None) > 1:
                raise UpdateBrokenError(step.step, failure, error) from error
            raise update.dropped(failure) from None

    def fit(self, step: HostStep, most: int | None, update: Transaction) -> int:
        """Return how many sequences of a microbatch the passes of this update run, equal on all ranks. Collective.

        They are the most that fit into the memory of all ranks, and at most ``most``, so that a resumed run takes as
        many. Raises UpdateDroppedError on all ranks if one has no memory for one sequence.
        """
        fit = update.together("memory", self.check_memory, step)
        fitting = step.sequences if fit is None else memory.fitting_on_all(fit, self.host.device)
        return fitting if most is None else min(most, fitting)

    def check_memory(self, step: HostStep) -> memory.Fit | None:
        """Return what fits on this rank. None on a CPU, which is not checked."""
        host, free = self.host, memory.device_memory(self.host.device)
        if free is None or host.tokens is None:
            return None
        peak = max(free.peak, self.first_peak) if self.has_trained else None
        needed = functools.partial(
            memory.needed, self.registry, host, self.config.probe_tokens, peak, self._microbatches(step),
            step.microbatches,
        )  # fmt: skip
        return memory.fitting(step.sequences, needed, free)

    def _microbatches(self, step: HostStep) -> int:
        return self.config.probed_microbatches(step.microbatches, self.host.pass_group)

    def run(self, step: HostStep, clip: float, sequences: int, update: Transaction | None = None) -> ProbeResult:
        """Run the passes of this update on the first microbatches of the step. Collective.

        ``sequences`` is the result of :meth:`fit`. Raises UpdateDroppedError on all ranks if a part of the update
        fails on one of them.
        """
        update = Transaction(self.host.device) if update is None else update
        passes = Passes(self.host, self.registry, self.config, step, self._microbatches(step), sequences, update)
        with ExitStack() as stack:
            return passes.run(stack, clip, weighs_updates=self.weighs_updates)


@dataclass(eq=False)
class Passes:
    """The passes of one update and what they measure, on the first ``microbatches`` of ``step``."""

    host: Host
    registry: LinearRegistry
    config: SnipConfig
    step: HostStep
    microbatches: int
    sequences: int
    update: Transaction
    _recorders: list[LinearRecorder] = field(init=False)
    _stream: ResidualStream = field(init=False)
    _scale: StepScale = field(init=False)  # known after the statistics pass

    def run(self, stack: ExitStack, clip: float, *, weighs_updates: bool) -> ProbeResult:
        """Run the passes. Recorders stay until ``stack`` is closed. See :meth:`ProbeRunner.run`."""
        seconds, step, host = {}, self.step, self.host
        self.update.together("preparation", self.prepare, stack)
        seconds[Pass.STATISTICS.value] = self.run_pass(Pass.STATISTICS)
        started = time.perf_counter()
        each = host.groups.dp_size * self._together(self._tokens)
        tokens = self.microbatches * each * self.sequences // step.sequences
        self._scale = StepScale(step.gradient_scale(), clip, tokens, step.microbatches * each)
        if weighs_updates:
            reduce_columns(self._recorders, host.groups, self._together)
        table = self.reduced()
        if weighs_updates:
            self.add_update_errors(table)
        seconds["reduction"] = time.perf_counter() - started
        if weighs_updates:
            # The noise is a share of the root mean square of the residual stream at the embedding.
            power = float(table.arrays["boundary.h2"][0]) / (tokens * host.hidden)
            seconds[Pass.FORWARD_NOISE.value] = self.run_pass(Pass.FORWARD_NOISE, _NOISE_SIZE * power**0.5)
            started = time.perf_counter()
            table.merge(self.reduced())
            seconds["reduction"] += time.perf_counter() - started
        finished = table.to_table(
            step=step.step, tokens=tokens, tokens_per_step=self._scale.tokens_per_step, meta={"clip": clip, **seconds}
        )
        return ProbeResult(finished, seconds, self._scale, self.microbatches, self.sequences)

    def prepare(self, stack: ExitStack) -> None:
        """Attach recorders to linears and residual streams until ``stack`` is closed, which restores the step."""
        config, context = self.config, self.registry.context
        self._recorders = [
            LinearRecorder(handle, config.measured_formats, config.probe_tokens, attempt=self.update.attempt)
            for handle in self.registry
        ]
        seed = derive_seed(config.seed, _NOISE)
        self._stream = ResidualStream(self.host, context, config.probe_tokens, seed, self.update.attempt)
        stack.enter_context(self.step.undisturbed())
        stack.enter_context(attached(self._recorders))
        stack.enter_context(self._stream.attached())
        stack.callback(setattr, context, "probing", False)
        context.probing = True

    def run_pass(self, phase: Pass, sigma: float = 0.0) -> float:
        """Run one forward and backward of the probe's microbatches. Returns its seconds. Collective.

        If recording fails, the pass goes on without it, because other ranks wait for the activations of this one.
        """

        def prepare() -> None:
            for recorder in self._recorders:
                recorder.start(phase)
            self._stream.start(phase, sigma)
            self.registry.start_step(self.step.step)
            self.step.prepare(self.microbatches, self.sequences)

        started = time.perf_counter()
        self.update.together(phase.value, prepare)
        if self.host.passes_alone:
            self.update.attempt(self.step.run)
        else:
            self.step.run()
        if self.host.device.type == "cuda":
            torch.cuda.synchronize(self.host.device)  # otherwise the reduction would wait for it
        self.update.vote()
        return time.perf_counter() - started

    # -- reduction ---------------------------------------------------------------------------------------------
    def _together[**P, T](self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self.update.together("reduction", work, *args, **kwargs)

    def _tokens(self) -> int:
        """Finish the statistics pass on this rank. Returns the tokens of a microbatch."""
        tokens = self.host.tokens
        # If only the passes tell the tokens, a block that runs twice would count them twice.
        self._stream.finish_statistics(self.microbatches, once=tokens is None)
        if tokens is not None:
            return tokens
        rows = {recorder.rows for recorder in self._recorders if recorder.handle.expert is None}
        if len(rows) != 1 or 0 in rows:
            raise SnipError("the linears of the blocks see different numbers of tokens, or none; SNIP takes one stream")
        return rows.pop() // self.microbatches

    def reduced(self) -> PartialTable:
        """Return the reduced sums that linears and boundaries have recorded since the last call. Collective."""
        reduce_loss_effects(self._recorders, self.host.groups, self._together)
        table: PartialTable = self._together(self.fill_table)
        table.reduce()
        return table

    def fill_table(self) -> PartialTable:
        """Return this rank's share of the table."""
        rows, formats = self.registry.rows, self.config.measured_formats
        table = PartialTable(rows, formats, self.host.sinks, self._scale.gradient)
        add_loss_effects(table, self._recorders)
        for recorder in self._recorders:
            table.add_recorder(recorder, self.host.groups.of(recorder.handle).dp_rank)
        for boundary in self._stream.reported:
            table.add_boundary(boundary)
        return table.pack(self.host.device)

    # -- weight divergence: how gradient errors change the optimizer's next update -------------------------------
    def add_update_errors(self, table: PartialTable) -> None:
        """Add the weight divergence of this rank's parameters to ``table``, the reduced one. Collective."""
        host, step, update = self.host, self.step, self.update

        def begin() -> tuple[PartialTable, list[list[float]]]:
            of_experts = [recorder.expert_sums for recorder in self._recorders if recorder.expert_sums is not None]
            sums = torch.stack(of_experts).tolist() if of_experts else []  # one copy to the host for all experts
            return table.empty(), sums

        def add_norm(name: str, gradient: torch.Tensor) -> None:
            partial.add("linear.gw2", name, sum_squares(gradient) * self._scale.gradient**2)

        def update_of(weight: torch.nn.Parameter) -> AdamWState | None:
            return step.update_of(weight) if host.gathers_updates else update.attempt(step.update_of, weight)

        partial, sums = update.together("weight_divergence", begin)
        parts = iter(sums)
        for recorder in self._recorders:
            handle = recorder.handle
            groups = host.groups.of(handle)
            gradient = _reduced(step.gradient(handle.weight), groups)
            expert_sums = None if recorder.expert_sums is None else next(parts)
            if handle.repeats:
                continue
            if groups.dp_rank == 0:
                update.attempt(add_norm, handle.name, gradient)
            state = update_of(handle.weight)
            if state is not None and (host.optimizer_sharded or groups.dp_rank == 0):
                update.attempt(self.add_linear, partial, table, recorder, expert_sums, gradient, state)
        step.join_gradients()
        for sink in host.local_sinks:
            gradient = _reduced(step.gradient(sink.weight), host.groups)
            state = update_of(sink.weight)
            weight = host.full_tensor(sink.weight).detach()
            reports = (host.optimizer_sharded or host.groups.dp_rank == 0) and not (
                sink.replicated and host.groups.tp_rank
            )
            if state is not None and reports:
                update.attempt(self.add_sink, partial, sink, gradient, weight, state)
        update.together("weight_divergence", partial.pack, host.device).reduce()
        table.merge(partial)

    def add_linear(
        self,
        partial: PartialTable,
        table: PartialTable,
        recorder: LinearRecorder,
        expert_sums: Sequence[float] | None,
        gradient: torch.Tensor,
        state: AdamWState,
    ) -> None:
        """Add the divergence of a linear's weight to ``partial``."""
        handle, unit = recorder.handle, self._scale.gradient**2
        x2, g2, s2 = (table.linear(handle.name, column) for column in ("x2", "g2", "s2"))
        tokens = None
        if expert_sums is not None:
            x2, g2, s2, tokens = expert_sums
            g2, s2 = g2 * unit, s2 * unit
        seed = derive_seed(self.config.seed, _SIGNS, handle.index)
        drift2, wdrift2 = linear_update_error(
            recorder, gradient, state, self._scale, s2=s2, x2=x2, g2=g2, seed=seed, tokens=tokens
        )
        partial.add("drift2", handle.name, drift2)
        partial.add("by_format.wdrift2", handle.name, wdrift2)

    def add_sink(
        self, partial: PartialTable, sink: LocalSink, gradient: torch.Tensor, weight: torch.Tensor, state: AdamWState
    ) -> None:
        """Add the divergence of a parameter beside the linears to ``partial``."""
        seed = derive_seed(self.config.seed, _SIGNS, len(self.registry.names) + sink.row)
        w2 = sum_squares(weight.reshape(-1)[state.start : state.end])
        drift2 = sink_update_error(gradient, state, self._scale, seed=seed, first_row=sink.first_row)
        partial.add("sink_drift2", sink.row, drift2)
        partial.add("sink_w2", sink.row, w2)


def _reduced(gradient: torch.Tensor, groups: ProbeGroups) -> torch.Tensor:
    """Sum a gradient over data parallel ranks in place, and return it."""
    if groups.dp_size > 1:
        dist.all_reduce(gradient, group=groups.dp)
    return gradient
