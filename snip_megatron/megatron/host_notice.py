"""Notices of rank 0 before the first step: whether the host is fast enough for a budget of time."""

from __future__ import annotations

from collections.abc import Sequence

from snip_megatron.megatron.startup import is_rank_zero
from snip_megatron.planner.host_limit import host_limit
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.statistics.table import LinearRow
from snip_megatron.timing.cost_model import FlopsModel


def say_what_the_host_allows(request: SolveRequest, linears: Sequence[LinearRow]) -> None:
    """Report if the host is too slow for a budget of time, or if its time is not modelled."""
    times = request.times
    if times is None or not times.rest or not is_rank_zero():
        return
    if times.host is None and times.model != FlopsModel.name:
        print(
            f"snip: the times of {times.model} hold no host seconds: step speedups are predicted as if the GPU never"
            " waited for its host (snip calibrate measures them)",
            flush=True,
        )
    stages = {row.name: row.stage for row in linears}
    limit = None if request.speedup is None else host_limit(times, stages, request.speedup, request.formats)
    if limit is not None:
        print(f"snip: {limit}", flush=True)
