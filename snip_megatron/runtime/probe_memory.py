"""How many sequences of a microbatch a probe can run in the free memory of every rank.

The memory of a pass follows from the peak of a training step, and what a probe takes in addition from the shapes of the
linears. If one rank has no memory for a single sequence, all ranks skip the update and train on under their map.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from snip_megatron.layers.context import GEMM_INDEX, LinearHandle
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.precision import Format, Gemm
from snip_megatron.runtime.exchange import UpdateDroppedError, all_reduced, rank
from snip_megatron.runtime.host import Host
from snip_megatron.sensitivity.probe_memory import LinearRows, ProbedShapes
from snip_megatron.sensitivity.reduction import group_size

_GIB = 2.0**30
_SHARED_POOL = (0, 0)  # of torch's allocator; every other pool belongs to graphs
_SMALL_PAGE, _LARGE_PAGE = 2 << 20, 20 << 20  # of the allocator's expandable segments


class FreeMemory(NamedTuple):
    """Memory of a device between two steps, in bytes."""

    whole: float  # what an allocation of any size can have
    holes: float  # unused, in segments of which a part is in use: only tensors that have been there fit for sure
    peak: float  # the peak of the training minus what is allocated


def device_memory(device: torch.device) -> FreeMemory | None:
    """Return the free memory of ``device``. None for a CPU, whose memory ranks share.

    Memory that is reserved for CUDA graphs does not count, because only the graphs can use it.
    """
    if device.type != "cuda":
        return None
    allocated = torch.cuda.memory_allocated(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    whole, holes = unused_memory(segment for segment in segments if segment["device"] == index)
    peak = max(0, torch.cuda.max_memory_allocated(device) - allocated)
    return FreeMemory(torch.cuda.mem_get_info(device)[0] + whole, holes, peak)


def unused_memory(segments: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the unused bytes in the allocator's segments: those that it can return to the device, and the others."""
    whole = holes = 0.0
    for segment in segments:
        if tuple(segment["segment_pool_id"]) != _SHARED_POOL:
            continue
        unused = float(segment["total_size"] - segment["allocated_size"])
        returned = _pages(segment) if segment.get("is_expandable") else unused if not segment["allocated_size"] else 0.0
        whole, holes = whole + returned, holes + unused - returned
    return whole, holes


def _pages(segment: Mapping[str, Any]) -> float:
    """Return the bytes of an expandable segment that the allocator can unmap, which it does page by page."""
    page = _LARGE_PAGE if segment["segment_type"] == "large" else _SMALL_PAGE
    return float(sum(block["size"] // page * page for block in segment["blocks"] if block["state"] == "inactive"))


class Need(NamedTuple):
    """Bytes that an update takes in ``total``, and those among them of a pass itself."""

    total: float
    of_pass: float


def needed(
    registry: LinearRegistry,
    host: Host,
    probe_tokens: int,
    peak: float | None,
    microbatches: int,
    step_microbatches: int,
    part: float = 1.0,
) -> Need:
    """Return the bytes that an update takes on this rank beyond the memory that is allocated between two steps.

    Args:
        registry: The linears, whose formats tell what training saves of their inputs.
        host: The host of the run. Its ``tokens`` must be known.
        probe_tokens: The setting ``probe_tokens``.
        peak: Bytes that training steps took. None before the first step of this process: inputs and outputs of the
            linears are then the estimate.
        microbatches: Microbatches of the probe on this rank.
        step_microbatches: Microbatches of a training step on this rank.
        part: Part of each microbatch that the probe runs, in (0, 1].
    """
    assert host.tokens is not None
    handles, shapes = list(registry), probed_shapes(registry, host, max(1, int(part * host.tokens)))
    blocks = len({(handle.id.stack, handle.id.layer) for handle in handles})
    at_once = host.in_flight(microbatches) / (max(1, blocks) if host.recomputes_blocks else 1)
    if peak is None:
        of_pass = at_once * shapes.element * shapes.features
    else:
        share = min(1.0, host.in_flight(microbatches) / host.in_flight(step_microbatches))
        # A pass saves bf16 inputs, and training quantised ones.
        excess = sum(_excess(host, *pair, shapes.element) for pair in zip(handles, shapes.linears, strict=True))
        of_pass = part * share * peak + at_once * excess
    return Need(shapes.samples(probe_tokens, microbatches) + of_pass + shapes.recording, of_pass)


def _excess(host: Host, handle: LinearHandle, linear: LinearRows, size: int) -> float:
    fmt, elements = handle.formats[GEMM_INDEX[Gemm.WGRAD]], linear.rows * linear.k
    if fmt is Format.BF16 or (
        host.sequence_parallel and handle.parallel == "column"
    ):  # a token shard is saved as it is
        return 0.0
    return (size - 1) * elements


def probed_shapes(registry: LinearRegistry, host: Host, tokens: int) -> ProbedShapes:
    """Return the shapes of a rank's linears. ``tokens`` are those of a microbatch on this rank.

    Tokens are assumed to be spread evenly over experts.
    """
    handles = list(registry)
    copies = Counter(handle.name for handle in handles)  # experts of a layer share a name
    linears = []
    for handle in handles:
        rows = tokens if handle.expert is None else -(-tokens * registry.row(handle).active // copies[handle.name])
        linears.append(LinearRows(rows, int(handle.weight.shape[0]), int(handle.weight.shape[1])))
    return ProbedShapes(
        linears=linears,
        tokens=tokens,
        hidden=host.hidden,
        boundaries=len({registry.row(handle).sub_block for handle in handles}),
        element=handles[0].weight.element_size() if handles else 2,
    )


class Fit(NamedTuple):
    """What fits on one rank."""

    sequences: int  # sequences into which this rank can cut a microbatch
    fitting: int  # the largest number of them that fits. 0 if none does
    of_whole: float  # bytes that an update with the whole microbatch takes
    of_one: float  # bytes that an update with one sequence takes
    free: float  # bytes that are free for it


def fitting(sequences: int, needed: Callable[[float], Need], free: FreeMemory) -> Fit:
    """Return how much of a microbatch fits on this rank, which can cut it into so many sequences.

    ``needed`` returns the bytes that an update with a part of the microbatch takes. A pass can use the holes that the
    tensors of a training step have left, up to the memory that the pass itself takes.
    """

    def available(part: float) -> float:
        return free.whole + min(free.holes, needed(part).of_pass)

    counts = [n for n in range(sequences, 0, -1) if sequences % n == 0]
    most = next((n for n in counts if needed(n / sequences).total <= available(n / sequences)), 0)
    one = 1 / sequences
    return Fit(sequences, most, needed(1.0).total, needed(one).total, available(one))


def fitting_on_all(fit: Fit, device: torch.device) -> int:
    """Return the largest number of sequences that fits on all ranks. Collective on ``device``.

    It is the whole microbatch, or none, if ranks can cut it into different numbers. Raises UpdateDroppedError on all
    ranks if none fits on one of them.
    """
    rows = torch.zeros(group_size(None), len(fit), dtype=torch.float64, device=device)
    rows[rank()] = torch.tensor(fit, dtype=torch.float64)
    sequences, most, of_whole, of_one, free = all_reduced(rows).cpu().unbind(1)
    can_cut = bool((sequences == sequences[0]).all())
    if can_cut and most.min() > 0:
        return int(most.min())
    if bool((most == sequences).all()):
        return fit.sequences
    least = of_one if can_cut else of_whole
    tightest = int((least - free).argmax())
    need, has = float(least[tightest]), float(free[tightest])
    reason = f"not enough memory: rank {tightest} has {has / _GIB:.2f} GiB free, a probe may take {need / _GIB:.2f} GiB"
    raise UpdateDroppedError(reason, {"rank": tightest, "needed_bytes": need, "free_bytes": has})
