"""Estimates Hessian traces of a running model (policy ``hawq``), with two passes per random probe vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from snip_megatron.layers.context import LinearHandle
from snip_megatron.quantization import derive_seed
from snip_megatron.statistics.hessian import HutchinsonTrace, traces
from snip_megatron.statistics.reduction import PartialTable, ProbeGroups

_STREAM = 3  # stream of random numbers derived from --snip-seed


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
    """Add ``htrace`` to the reduced table of the statistics pass. Collective over all ranks.

    Every data parallel rank reads its own gradients, and one number per linear and probe vector is reduced. Weights are
    changed in place and restored bitwise. A pass must have run before, so that parameters are gathered.

    Args:
        table: Table whose ``w2`` and layout are read and whose ``htrace`` is set.
        handles: Linears of this rank.
        run_pass: Zeroes the gradients and runs a forward and backward over the probe's microbatches.
        groups: Process groups.
        seed: Value of ``--snip-seed``.
        probes: Number of probe vectors.
        gradient_scale: Factor that turns recorded gradients, summed over data parallel ranks, into gradients of the
            mean token loss.
    """
    row = {name: index for index, name in enumerate(table.shape.names)}
    matrices = table.matrices().tolist()
    w2 = {handle.name: table.linear(handle.name, "w2") / matrices[row[handle.name]] for handle in handles}
    own = HutchinsonTrace(handles, w2, derive_seed(seed, _STREAM), probes).measure(run_pass)
    own[:, 0] *= gradient_scale
    for share, handle in zip(own, handles, strict=True):
        if groups.of(handle).dp_rank != 0:
            share[1] = 0.0  # data parallel copies of a weight took the same step, and one of them reports it
    sums = torch.zeros(len(row), 2, probes, dtype=torch.float64, device=own.device)
    sums.index_add_(0, torch.tensor([row[handle.name] for handle in handles], device=own.device), own)
    dist.all_reduce(sums, group=groups.world)
    elements = table.arrays["layout"][:, 1:].prod(dim=1) * table.matrices()
    mean = traces(sums.cpu(), elements).mean(dim=1)
    table.arrays["linear.htrace"] = mean.clamp_min(0.0)
