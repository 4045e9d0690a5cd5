"""Notice of rank 0 before the first step, for a budget of time: what its seconds estimate."""

from __future__ import annotations

from snip_megatron.megatron.startup import is_rank_zero
from snip_megatron.sensitivity.request import SolveRequest


def say_how_exchanges_are_estimated(request: SolveRequest) -> None:
    """Report once if the table lacks collectives of so many ranks, and what prices the exchanges instead."""
    times = request.times
    if times is not None and times.estimated and is_rank_zero():
        print(
            f"snip: the times of {times.model} hold no collectives of this many tensor parallel ranks:"
            f" exchanges are priced {times.estimated} (snip calibrate --ranks N measures them)",
            flush=True,
        )
