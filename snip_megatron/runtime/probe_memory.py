"""Finds, before a probe runs, how many sequences of a microbatch fit into the free memory of every rank.

The peak memory of a training step tells what a pass takes, and the shapes of the linears tell what a probe takes in
addition. If one rank lacks memory for a single sequence, all ranks skip the update and keep training under their map.
"""

from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist

from snip_megatron.layers.context import GEMM_INDEX, LinearHandle
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.precision import Format, Gemm
from snip_megatron.runtime.host import Host, Unmeasured
from snip_megatron.sensitivity.probe_memory import LinearRows, ProbedShapes

_GIB = 2.0**30
_SHARED_POOL = (0, 0)  # of torch's allocator; every other pool belongs to graphs


def device_memory(device: torch.device) -> tuple[float, float] | None:
    """Return what is free on ``device`` between two steps, or cached by torch's allocator and unused, and the peak of
    allocated memory minus what is allocated now, in bytes. None for a CPU, whose memory ranks share.

    What torch has reserved for CUDA graphs is not available, because only the graphs can use it.
    """
    if device.type != "cuda":
        return None
    allocated = torch.cuda.memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    unused = sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        if segment["device"] == index and tuple(segment["segment_pool_id"]) == _SHARED_POOL
    )
    return float(free + unused), float(max(0, torch.cuda.max_memory_allocated(device) - allocated))


def needed(
    registry: LinearRegistry,
    host: Host,
    probe_tokens: int,
    peak: float | None,
    microbatches: int,
    step_microbatches: int,
    part: float = 1.0,
) -> float:
    """Return the bytes that an update takes on this rank beyond the memory that is allocated between two steps.

    The formats of the ``registry``'s linears tell what training saves of their inputs. ``peak`` are the bytes that
    training steps took, or None before the first step of this process; inputs and outputs of the linears are then used
    as an estimate. ``microbatches`` and ``step_microbatches`` are those of the probe and of a training step on this
    rank, ``part`` the part of each microbatch that the probe runs.
    """
    assert host.tokens is not None
    handles, shapes = list(registry), probed_shapes(registry, host, max(1, int(part * host.tokens)))
    blocks = len({(handle.id.stack, handle.id.layer) for handle in handles})
    at_once = host.in_flight(microbatches) / (max(1, blocks) if host.recomputes else 1)
    if peak is None:
        of_pass = at_once * shapes.element * shapes.features
    else:
        share = min(1.0, host.in_flight(microbatches) / host.in_flight(step_microbatches))
        # The bf16 inputs of a pass exceed the quantised inputs that training saves.
        excess = sum(_excess(host, *pair, shapes.element) for pair in zip(handles, shapes.linears, strict=True))
        of_pass = part * share * peak + at_once * excess
    return shapes.samples(probe_tokens, microbatches) + of_pass + shapes.recording


def _excess(host: Host, handle: LinearHandle, linear: LinearRows, size: int) -> float:
    fmt, elements = handle.formats[GEMM_INDEX[Gemm.WGRAD]], linear.rows * linear.k
    if fmt is Format.BF16 or (host.gathers and handle.parallel == "column"):  # a token shard is saved as it is
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


def fitting(
    sequences: int, needed: Callable[[float], float], available: float, device: torch.device
) -> float | Unmeasured:
    """Return the largest part of a microbatch that fits on all ranks, or why none does. Equal on all ranks. Collective.

    This rank can cut a microbatch into ``sequences``. An update takes ``needed(part)`` of the ``available`` bytes.
    """
    parts = [n / sequences for n in range(sequences, 0, -1) if sequences % n == 0]
    fits = next((part for part in parts if needed(part) <= available), 0.0)
    every = torch.zeros(dist.get_world_size(), 5, dtype=torch.float64, device=device)
    own = [parts[-1], fits, needed(1.0), needed(parts[-1]), available]
    every[dist.get_rank()] = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(every)
    least, fit, whole, smallest, has = every.cpu().unbind(1)
    cut = bool((least == least[0]).all())  # if one rank cannot cut its microbatch, none does
    part = float(fit.min()) if cut or bool((fit == 1.0).all()) else 0.0
    if part > 0.0:
        return part
    wants = smallest if cut else whole
    rank = int((wants - has).argmax())
    wanted, free = float(wants[rank]), float(has[rank])
    reason = f"not enough memory: rank {rank} has {free / _GIB:.2f} GiB free, a probe may take {wanted / _GIB:.2f} GiB"
    return Unmeasured(reason, {"rank": rank, "needed_bytes": wanted, "free_bytes": free})
