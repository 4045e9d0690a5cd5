"""Checks, before a probe runs, that it fits into the free memory of every rank.

The peak memory of a training step tells what a pass takes, and the shapes of the linears tell what a probe takes in
addition. If one rank lacks memory, all ranks skip the update and keep training under their current map.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from snip_megatron.layers.context import GEMM_INDEX, LinearHandle
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.megatron.probing.probe_call import LoopShape
from snip_megatron.planner.layout import microbatches_in_flight
from snip_megatron.precision import Format, Gemm
from snip_megatron.quantization.wire import bytes_per_element
from snip_megatron.runtime.protocols import Unmeasured
from snip_megatron.statistics.probe_memory import LinearRows, ProbedShapes
from snip_megatron.statistics.reduction import ProbeGroups

_GIB = 2.0**30


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a rank's device, in bytes.

    Attributes:
        available: Memory that is free on the device, or cached by torch's allocator and unused.
        peak: Peak of allocated memory minus the memory that is allocated now.
    """

    available: float
    peak: float


def device_memory(device: torch.device, idle: float = 0.0) -> DeviceMemory | None:
    """Return the memory of ``device`` between two steps. Returns None for a CPU, whose memory ranks share.

    Args:
        device: The device.
        idle: Bytes that torch has reserved, but not for tensors.
    """
    if device.type != "cuda":
        return None
    allocated = torch.cuda.memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    unused = max(0.0, torch.cuda.memory_reserved(device) - allocated - idle)
    return DeviceMemory(float(free + unused), float(max(0, torch.cuda.max_memory_allocated(device) - allocated)))


@dataclass(frozen=True)
class Pipeline:
    """This rank's pipeline stage, the number of stages, and the model chunks per stage."""

    stage: int = 0
    stages: int = 1
    chunks: int = 1

    @classmethod
    def of(cls, handles: Iterable[LinearHandle], config: Any, shape: LoopShape) -> Pipeline:
        """Build it from a rank's linears, Megatron's model configuration and the sizes of the loop."""
        stage = next((handle.stage for handle in handles), 0)
        return cls(stage, config.pipeline_model_parallel_size, shape.virtual_stages or 1)

    def in_flight(self, microbatches: int) -> float:
        """Microbatches whose activations are kept at the same time in a schedule over ``microbatches``."""
        return microbatches_in_flight(microbatches, self.stage, self.stages, self.chunks)


class ProbeMemory:
    """Predicts the memory that an update takes on this rank.

    Args:
        shapes: Shapes of the linears that are recorded on this rank.
        handles: Linears of this rank in the same order. Their formats tell what training saves of their inputs.
        pipeline: This rank's place in the pipeline.
        probe_tokens: Value of ``--snip-probe-tokens``.
        gathers: Whether sequence parallelism keeps inputs of column-parallel linears as shards: in bf16, or quantised
            under ``--snip-communication gather``.
        recomputes: Whether the backward recomputes whole layers, one at a time.
    """

    def __init__(
        self,
        shapes: ProbedShapes,
        handles: Sequence[LinearHandle],
        pipeline: Pipeline,
        probe_tokens: int,
        *,
        gathers: bool = False,
        recomputes: bool = False,
    ) -> None:
        self._shapes = shapes
        self._handles = list(handles)
        self._pipeline = pipeline
        self._probe_tokens = probe_tokens
        self._gathers = gathers
        self._layers_at_once = 1.0 / max(1, len({h.id.layer for h in self._handles})) if recomputes else 1.0

    def needed(self, peak: float | None, microbatches: int, step_microbatches: int) -> float:
        """Bytes that an update takes beyond the memory that is allocated between two steps.

        Args:
            peak: Bytes that training steps took, or None before the first step of this process. Inputs and outputs of
                the linears are then used as an estimate.
            microbatches: Microbatches of the probe on this rank.
            step_microbatches: Microbatches of a training step on this rank.
        """
        shapes = self._shapes
        most = self._pass(peak, microbatches, step_microbatches) + shapes.recording
        return shapes.samples(self._probe_tokens, microbatches) + most

    def _pass(self, peak: float | None, microbatches: int, step_microbatches: int) -> float:
        """Bytes of one call of the schedule with all linears in bf16."""
        flights = self._pipeline.in_flight(microbatches)
        if peak is None:
            return flights * self._layers_at_once * self._shapes.element * self._shapes.features
        share = min(1.0, flights / self._pipeline.in_flight(step_microbatches))
        return share * peak + flights * self._layers_at_once * self._quantised_inputs()

    def _quantised_inputs(self) -> float:
        """Bytes by which the bf16 inputs of a microbatch exceed the quantised inputs that training saves."""
        return float(sum(map(self._excess, self._handles, self._shapes.linears)))

    def _excess(self, handle: LinearHandle, linear: LinearRows) -> float:
        fmt, size, elements = handle.formats[GEMM_INDEX[Gemm.WGRAD]], self._shapes.element, linear.rows * linear.k
        if fmt is Format.BF16:
            return 0.0
        if not (self._gathers and handle.parallel == "column"):
            return (size - 1) * elements
        kept = bytes_per_element(fmt) if handle.context.packs else size
        return (size - kept) * elements / handle.tp_size


def probed_shapes(
    registry: LinearRegistry,
    shape: LoopShape,
    *,
    hidden: int,
) -> ProbedShapes:
    """Return the shapes of a rank's linears.

    Tokens are assumed to be spread evenly over experts.
    """
    handles, tokens = list(registry), shape.tokens(1, 1)
    copies = Counter(handle.name for handle in handles)  # experts of a layer share a name
    linears = []
    for handle in handles:
        rows = tokens if handle.expert is None else -(-tokens * registry.mixture[1] // copies[handle.name])
        linears.append(LinearRows(rows, int(handle.weight.shape[0]), int(handle.weight.shape[1])))
    return ProbedShapes(
        linears=linears,
        tokens=tokens,
        hidden=hidden,
        boundaries=2 * len({handle.id.layer for handle in handles}),
        element=handles[0].weight.element_size() if handles else 2,
    )


def shortage(needed: float, memory: DeviceMemory, groups: ProbeGroups, device: torch.device) -> Unmeasured | None:
    """Return why the update is skipped, equal on all ranks. Returns None if every rank has enough memory. Collective.

    Args:
        needed: Bytes that the update takes on this rank.
        memory: Memory of this rank.
        groups: Process groups.
        device: Device of the tensor that is reduced.
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
