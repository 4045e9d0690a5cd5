"""Hessian traces of a running model (policy ``hawq``): two passes of the probe's microbatches a probe vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from snip_megatron.layers.context import LinearHandle
from snip_megatron.quantization import derive_seed
from snip_megatron.statistics.hessian import HutchinsonTrace, traces
from snip_megatron.statistics.reduction import PartialTable, ProbeGroups

_STREAM = 3  # of random numbers under --snip-seed; 1 is the drift's signs, 2 the noise passes'


def add_hessian_traces(
    table: PartialTable,
    handles: Sequence[LinearHandle],
    run_pass: Callable[[], None],
    groups: ProbeGroups,
    *,
    seed: int,
    probes: int,
    gradient_scale: float,
) -> None:
    """Put ``htrace`` into a table that holds the reduced statistics pass. Collective over all ranks.

    Gradients are read where they are, by every data parallel rank its own: only a number a linear and probe vector
    travels. Weights are moved in place and put back bit by bit; parameters must have been gathered (a pass has run).

    Args:
        table: its ``w2`` and layout are read.
        handles: this rank's linears.
        run_pass: forward and backward of the probe's microbatches, gradients zeroed first.
        groups: process groups.
        seed: ``--snip-seed``.
        probes: probe vectors.
        gradient_scale: recorded gradients times this, summed over data parallel ranks, are of the mean token loss.
    """
    row = {name: index for index, name in enumerate(table.shape.names)}
    matrices = table.matrices().tolist()
    w2 = {handle.name: table.linear(handle.name, "w2") / matrices[row[handle.name]] for handle in handles}
    own = HutchinsonTrace(handles, w2, derive_seed(seed, _STREAM), probes).measure(run_pass)
    own[:, 0] *= gradient_scale
    for share, handle in zip(own, handles, strict=True):
        if groups.of(handle).dp_rank != 0:
            share[1] = 0.0  # every copy of a weight took the same step
    sums = torch.zeros(len(row), 2, probes, dtype=torch.float64, device=own.device)
    sums.index_add_(0, torch.tensor([row[handle.name] for handle in handles], device=own.device), own)
    dist.all_reduce(sums, group=groups.world)
    elements = table.arrays["layout"][:, 1:].prod(dim=1) * table.matrices()
    mean = traces(sums.cpu(), elements).mean(dim=1)
    table.arrays["linear.htrace"] = mean.clamp_min(0.0)
