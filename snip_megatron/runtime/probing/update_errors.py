"""Weight divergence: how gradient errors change the next update of the optimizer, per parameter of this rank."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from snip_megatron.numerics.quantize import derive_seed
from snip_megatron.runtime.host import Host, HostStep, LocalSink
from snip_megatron.sensitivity.recorder import LinearRecorder
from snip_megatron.sensitivity.reduction import PartialTable, ProbeGroups
from snip_megatron.sensitivity.sums import sum_squares
from snip_megatron.sensitivity.update_error import KeptWords, StepScale, linear_update_error, sink_update_error

_SIGNS = 1  # stream of random numbers derived from --snip-seed


class UpdateErrors:
    """Evaluates the optimizer with and without gradient errors on this rank's elements of its parameters.

    ``linears`` is the number of linears of the model, ``seed`` the value of ``--snip-seed``.
    """

    def __init__(self, host: Host, linears: int, seed: int) -> None:
        self._host = host
        self._linears = linears
        self._seed = seed
        self._words = KeptWords()  # four bytes for each row and column of a weight

    def collect(
        self,
        found: PartialTable,
        table: PartialTable,
        recorders: Sequence[LinearRecorder],
        step: HostStep,
        scale: StepScale,
    ) -> None:
        """Add this rank's share to ``found``, which the caller reduces. Collective over all tensor and data parallel
        groups. ``table`` is the reduced table of the statistics pass, which ``step`` has run, and the ``recorders`` of
        this rank's linears have reduced column norms.
        """
        apart = [recorder.whole for recorder in recorders if recorder.whole is not None]
        sums = iter(torch.stack(apart).tolist() if apart else ())  # one copy to the host for all experts
        for recorder in recorders:
            own = None if recorder.whole is None else next(sums)
            self._add_linear(found, table, recorder, own, step, scale)
        step.join_gradients()
        for sink in self._host.local_sinks:
            self._add_sink(found, sink, step, scale)

    def _add_linear(
        self,
        found: PartialTable,
        table: PartialTable,
        recorder: LinearRecorder,
        own: Sequence[float] | None,
        step: HostStep,
        scale: StepScale,
    ) -> None:
        """Add the share of one linear. ``own`` has the recorder's sums of one expert (``whole``)."""
        handle, groups = recorder.handle, self._host.groups.of(recorder.handle)
        name, unit = handle.name, scale.gradient**2
        gradient = _reduced(step.gradient(handle.weight), groups)
        if handle.repeats:
            return
        if groups.dp_rank == 0:
            found.add(name, "linear.gw2", sum_squares(gradient) * unit)
        state = step.update_of(handle.weight)
        if state is None or not (self._host.sharded or groups.dp_rank == 0):
            return
        x2, g2, s2 = (table.linear(name, column) for column in ("x2", "g2", "s2"))
        tokens = None
        if own is not None:
            x2, g2, s2, tokens = own
            g2, s2 = g2 * unit, s2 * unit
        seed = derive_seed(self._seed, _SIGNS, handle.index)
        drift2, wdrift2 = linear_update_error(
            recorder, gradient, state, scale, s2=s2, x2=x2, g2=g2, seed=seed, tokens=tokens, words=self._words
        )
        found.add(name, "drift2", drift2)
        found.add(name, "by_format.wdrift2", wdrift2)

    def _add_sink(self, found: PartialTable, sink: LocalSink, step: HostStep, scale: StepScale) -> None:
        groups = self._host.groups
        gradient = _reduced(step.gradient(sink.weight), groups)
        state, weight = step.update_of(sink.weight), self._host.whole(sink.weight).detach()
        if state is None or not (self._host.sharded or groups.dp_rank == 0) or (sink.replicated and groups.tp_rank):
            return
        seed = derive_seed(self._seed, _SIGNS, self._linears + sink.row)
        w2 = sum_squares(weight.reshape(-1)[state.start : state.end])
        drift2 = sink_update_error(gradient, state, scale, seed=seed, first_row=sink.first_row, words=self._words)
        found.add_sink(sink.row, drift2, w2)


def _reduced(gradient: torch.Tensor, groups: ProbeGroups) -> torch.Tensor:
    """Sum a gradient over data parallel ranks, in place."""
    if groups.dp_size > 1:
        dist.all_reduce(gradient, group=groups.dp)
    return gradient
