"""Checks, before a probe runs, that it fits into the free memory of every rank.

The peak memory of a training step tells what a pass takes, and the shapes of the linears tell what a probe takes in
addition. If one rank lacks memory, all ranks skip the update and keep training under their current map.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from snip_megatron.layers.context import GEMM_INDEX, LinearHandle
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.precision import Format, Gemm
from snip_megatron.quantization.wire import bytes_per_element
from snip_megatron.runtime.host import Host
from snip_megatron.runtime.protocols import Unmeasured
from snip_megatron.statistics.probe_memory import LinearRows, ProbedShapes
from snip_megatron.statistics.reduction import ProbeGroups

_GIB = 2.0**30


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a rank's device, in bytes.

    Attributes:
        available: memory that is free on the device, or cached by torch's allocator and unused.
        peak: peak of allocated memory minus the memory that is allocated now.
    """

    available: float
    peak: float


def device_memory(device: torch.device, idle: float = 0.0) -> DeviceMemory | None:
    """Return the memory of ``device`` between two steps. Returns None for a CPU, whose memory ranks share.

    Args:
        device: the device.
        idle: bytes that torch has reserved, but not for tensors.
    """
    if device.type != "cuda":
        return None
    allocated = torch.cuda.memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    unused = max(0.0, torch.cuda.memory_reserved(device) - allocated - idle)
    return DeviceMemory(float(free + unused), float(max(0, torch.cuda.max_memory_allocated(device) - allocated)))


class ProbeMemory:
    """Predicts the memory that an update takes on this rank.

    Args:
        shapes: shapes of the linears that are recorded on this rank.
        handles: linears of this rank in the same order. Their formats tell what training saves of their inputs.
        host: the training loop.
        probe_tokens: the setting ``probe_tokens``.
    """

    def __init__(self, shapes: ProbedShapes, handles: Sequence[LinearHandle], host: Host, probe_tokens: int) -> None:
        self._shapes = shapes
        self._handles = list(handles)
        self._host = host
        self._probe_tokens = probe_tokens
        self._blocks_at_once = (
            1.0 / max(1, len({(h.id.stack, h.id.layer) for h in self._handles})) if host.recomputes else 1.0
        )

    def needed(self, peak: float | None, microbatches: int, step_microbatches: int) -> float:
        """Bytes that an update takes beyond the memory that is allocated between two steps.

        Args:
            peak: bytes that training steps took, or None before the first step of this process. Inputs and outputs of
                the linears are then used as an estimate.
            microbatches: microbatches of the probe on this rank.
            step_microbatches: microbatches of a training step on this rank.
        """
        shapes = self._shapes
        flights = self._host.in_flight(microbatches)
        if peak is None:
            of_pass = flights * self._blocks_at_once * shapes.element * shapes.features
        else:
            share = min(1.0, flights / self._host.in_flight(step_microbatches))
            of_pass = share * peak + flights * self._blocks_at_once * self._quantised_inputs()
        return shapes.samples(self._probe_tokens, microbatches) + of_pass + shapes.recording

    def _quantised_inputs(self) -> float:
        """Bytes by which the bf16 inputs of a microbatch exceed the quantised inputs that training saves."""
        return float(sum(map(self._excess, self._handles, self._shapes.linears)))

    def _excess(self, handle: LinearHandle, linear: LinearRows) -> float:
        fmt, size, elements = handle.formats[GEMM_INDEX[Gemm.WGRAD]], self._shapes.element, linear.rows * linear.k
        if fmt is Format.BF16:
            return 0.0
        if not (self._host.gathers and handle.parallel == "column"):
            return (size - 1) * elements
        kept = bytes_per_element(fmt) if handle.context.packs else size
        return (size - kept) * elements / handle.tp_size


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


def shortage(needed: float, memory: DeviceMemory, groups: ProbeGroups, device: torch.device) -> Unmeasured | None:
    """Return why the update is skipped, equal on all ranks. Returns None if every rank has enough memory. Collective.

    Args:
        needed: bytes that the update takes on this rank.
        memory: memory of this rank.
        groups: process groups.
        device: device of the tensor that is reduced.
    """
    every = torch.zeros(dist.get_world_size(groups.world), 2, dtype=torch.float64, device=device)
    every[dist.get_rank(groups.world)] = torch.tensor([needed, memory.available], dtype=torch.float64)
    dist.all_reduce(every, group=groups.world)
    wants, has = every.cpu().unbind(1)
    rank = int((wants - has).argmax())
    if wants[rank] <= has[rank]:
        return None
    wanted, free = float(wants[rank]), float(has[rank])
    reason = f"not enough memory: rank {rank} has {free / _GIB:.2f} GiB free, a probe may take {wanted / _GIB:.2f} GiB"
    return Unmeasured(reason, {"rank": rank, "needed_bytes": wanted, "free_bytes": free})
