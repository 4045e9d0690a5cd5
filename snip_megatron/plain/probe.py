"""Runs the passes of an update on one loss, without changing the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from snip_megatron.config import SnipConfig
from snip_megatron.errors import SnipError
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.optimizers.weight_drift import StepScale, linear_drift, sink_drift
from snip_megatron.plain.stream import PlainStream
from snip_megatron.plain.structure import Structure
from snip_megatron.plain.updates import update_of
from snip_megatron.quantization import derive_seed
from snip_megatron.statistics.recorder import LinearRecorder, Pass, attached
from snip_megatron.statistics.reduction import PartialTable, ProbeGroups, TableShape, finish_dots, reduce_columns
from snip_megatron.statistics.sums import sum_squares
from snip_megatron.statistics.table import SinkRow, StatisticsTable

_SIGNS, _NOISE = 1, 2  # streams of random numbers derived from the seed, as in Megatron's probes
_ALONE = ProbeGroups(tp=None, dp=None)

Loss = Callable[[], torch.Tensor]


class PlainProbe:
    """Measures the statistics table of a model on one batch.

    Args:
        model: The model.
        structure: Its blocks.
        registry: Its converted linears.
        optimizer: Holds the state that weight divergence reads.
        config: SNIP's configuration.
        microbatches: Batches of a training step, of which a probe runs one.
        with_drift: Whether the policy uses weight divergence. Only then the noise passes run.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        registry: LinearRegistry,
        optimizer: torch.optim.Optimizer,
        config: SnipConfig,
        microbatches: int,
        *,
        with_drift: bool,
    ) -> None:
        self._model = model
        self._structure = structure
        self._registry = registry
        self._optimizer = optimizer
        self._config = config
        self._microbatches = microbatches
        self._with_drift = with_drift
        self._shape = TableShape(
            names=tuple(registry.names),
            formats=config.measured_formats,
            sinks=tuple(SinkRow(name, boundary, w.numel()) for name, boundary, w in structure.sinks),
        )

    def run(self, loss: Loss, step: int) -> StatisticsTable:
        """Run the passes of an update before training step ``step`` (0-based).

        Raises:
            SnipError: If the loss is no scalar, or does not run the model's blocks once each.
        """
        config = self._config
        recorders = [LinearRecorder(handle, config.measured_formats, config.probe_tokens) for handle in self._registry]
        stream = PlainStream(self._structure, config.probe_tokens, derive_seed(config.seed, _NOISE, step))
        with undisturbed(self._model) as restart, ExitStack() as stack:
            stack.enter_context(attached(recorders))
            stack.enter_context(stream.attached())
            stack.enter_context(self._probing(step))
            self._pass(Pass.STATISTICS, loss, recorders, stream)
            stream.finish_statistics()
            tokens = _tokens(recorders)
            scale = StepScale(1.0, 1.0, tokens, tokens * self._microbatches)
            table = self._statistics(recorders, stream)
            if self._with_drift:
                self._add_drift(table, recorders, scale, step)
                for phase in (Pass.FORWARD_NOISE, *([Pass.BACKWARD_NOISE] if config.backward_noise else [])):
                    restart()
                    self._pass(phase, loss, recorders, stream, self._sigma(phase, table, tokens))
                self._collect(table, recorders, stream)
        return table.to_table(step=step, tokens=tokens, tokens_per_step=scale.tokens_per_step, meta={"clip": 1.0})

    @contextmanager
    def _probing(self, step: int) -> Iterator[None]:
        self._registry.start_step(step)
        self._registry.context.probing = True
        try:
            yield
        finally:
            self._registry.context.probing = False

    def _pass(
        self, phase: Pass, loss: Loss, recorders: list[LinearRecorder], stream: PlainStream, sigma: float = 0.0
    ) -> None:
        for recorder in recorders:
            recorder.start(phase)
        stream.start(phase, sigma)
        with torch.enable_grad():
            value = loss()
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise SnipError("step() takes a function that returns the loss of a batch: a scalar with a gradient")
        value.backward()  # type: ignore[no-untyped-call]

    # -- the table -------------------------------------------------------------------------------------------------
    def _statistics(self, recorders: list[LinearRecorder], stream: PlainStream) -> PartialTable:
        finish_dots(recorders, _ALONE)
        reduce_columns(recorders, _ALONE)
        table = PartialTable(self._shape, 1.0)
        self._collect(table, recorders, stream)
        for handle in self._registry:
            table.add_layout(handle.name, handle.stage, handle.n, handle.k)
        return table

    def _collect(self, table: PartialTable, recorders: list[LinearRecorder], stream: PlainStream) -> None:
        for recorder in recorders:
            table.add_recorder(recorder, 0)
        for boundary in stream.boundaries:
            table.add_boundary(boundary)
        table.finish()

    def _add_drift(self, table: PartialTable, recorders: list[LinearRecorder], scale: StepScale, step: int) -> None:
        seed, count = self._config.seed, len(self._shape.names)
        for recorder in recorders:
            handle, gradient = recorder.handle, _gradient(recorder.handle.weight)
            table.add_linear(handle.name, "gw2", sum_squares(gradient))
            state = update_of(self._optimizer, handle.weight, step)
            if state is None:
                continue
            s2, x2, g2 = (table.linear(handle.name, column) for column in ("s2", "x2", "g2"))
            signs = derive_seed(seed, _SIGNS, handle.index)
            drift = linear_drift(recorder, gradient, state, scale, s2=s2, x2=x2, g2=g2, seed=signs)
            table.add_drift(handle.name, drift.drift2)
            table.add_by_format(handle.name, "wdrift2", drift.wdrift2)
            table.add_by_format(handle.name, "wsigma2", drift.wsigma2)
            table.add_linear(handle.name, "m2", drift.m2)
            table.add_linear(handle.name, "v2", drift.v2)
        for index, (_, _, weight) in enumerate(self._structure.sinks):
            state = update_of(self._optimizer, weight, step)
            if state is not None:
                signs = derive_seed(seed, _SIGNS, count + index)
                drifted = sink_drift(_gradient(weight), state, scale, seed=signs, first_row=0)
                table.add_sink(index, drifted, sum_squares(weight.detach()))
        table.finish()

    def _sigma(self, phase: Pass, table: PartialTable, tokens: int) -> float:
        """Standard deviation of a pass's noise: ``probe_noise`` times the root mean square of the noised tensor."""
        name, row = ("boundary.h2", 0) if phase is Pass.FORWARD_NOISE else ("boundary.r2", -1)
        power = float(table.arrays[name][row]) / (tokens * self._structure.hidden)
        return float(self._config.probe_noise * power**0.5)


def _tokens(recorders: list[LinearRecorder]) -> int:
    """Tokens of the batch: rows of the linears' inputs, which are the same for all of them."""
    rows = {recorder.rows for recorder in recorders}
    if len(rows) != 1 or 0 in rows:
        raise SnipError("the linears of the blocks see different numbers of tokens, or none; SNIP takes one stream")
    return rows.pop()


def _gradient(weight: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Restore gradients, buffers, training mode and random states after the passes run inside this context.

    Yields a function that brings a pass back to the state at entry.
    """
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.clone()) for b in model.buffers()]
    devices = sorted({p.device.index for p, _ in gradients if p.device.type == "cuda" and p.device.index is not None})
    states = torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in devices]

    def restart() -> None:
        for parameter, _ in gradients:
            parameter.grad = None
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        torch.set_rng_state(states[0])
        for device, state in zip(devices, states[1], strict=True):
            torch.cuda.set_rng_state(state, device)

    restart()
    try:
        yield restart
    finally:
        restart()
        for parameter, gradient in gradients:
            parameter.grad = gradient
