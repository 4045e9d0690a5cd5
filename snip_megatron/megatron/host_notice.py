"""Notices of rank 0 before the first step, for a budget of time: what its seconds leave out or estimate."""

from __future__ import annotations

from collections.abc import Sequence

from snip_megatron.megatron.startup import is_rank_zero
from snip_megatron.planner.host_limit import host_limit
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.statistics.table import LinearRow
from snip_megatron.timing.cost_model import FlopsModel


def say_how_exchanges_are_estimated(request: SolveRequest) -> None:
    """Report once if the table lacks collectives of so many ranks, and what prices the exchanges instead."""
    times = request.times
    if times is not None and times.estimated and is_rank_zero():
        print(
            f"snip: the times of {times.model} hold no collectives of this many tensor parallel ranks:"
            f" exchanges are priced {times.estimated} (snip calibrate --ranks N measures them)",
            flush=True,
        )


def say_what_the_host_allows(request: SolveRequest, linears: Sequence[LinearRow]) -> None:
    """Report if the host is too slow for a budget of time, or if its time is not modelled."""
    times = request.times
    if times is None or not is_rank_zero():
        return
    measured = times.model != FlopsModel.name
    if not times.rest:
        if measured:
            print(
                "snip: whole steps of this model or layout are not predicted: a --snip-budget of time is one of the"
                " linears' GPU time, and whether the host launches them as fast is not checked",
                flush=True,
            )
        return
    if times.host is None and measured:
        print(
            f"snip: the times of {times.model} hold no host seconds: step speedups are predicted as if the GPU never"
            " waited for its host (snip calibrate --add-to measures them)",
            flush=True,
        )
    stages = {row.name: row.stage for row in linears}
    limit = None if request.speedup is None else host_limit(times, stages, request.speedup, request.formats)
    if limit is not None:
        print(f"snip: {limit}", flush=True)
