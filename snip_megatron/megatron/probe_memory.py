"""Whether a probe fits into the memory that every rank has free: asked before it runs (DESIGN, rule 3).

A training step has shown what a pass takes; shapes say what a probe takes beside it. Where one rank is short, all ranks
leave the update out and train on under their map.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from snip_megatron.controller import Unmeasured
from snip_megatron.layers.context import GEMM_INDEX, LinearHandle
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.megatron.probe_call import LoopShape
from snip_megatron.planner.layout import microbatches_in_flight
from snip_megatron.precision import Format, Gemm
from snip_megatron.statistics.probe_memory import LinearRows, ProbedShapes
from snip_megatron.statistics.reduction import ProbeGroups

_GIB = 2.0**30
_MANY = 2**30  # microbatches of a call that fills the pipeline


@dataclass(frozen=True)
class DeviceMemory:
    """What a rank has, in bytes.

    Attributes:
        available: free on the device, or held by torch's allocator with no tensor in it.
        peak: the most that was allocated at once, beyond what is allocated now.
    """

    available: float
    peak: float


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Of this rank, between two steps; None on a CPU, whose memory is not the rank's own."""
    if device.type != "cuda":
        return None
    allocated = torch.cuda.memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - allocated
    return DeviceMemory(float(free + unused), float(max(0, torch.cuda.max_memory_allocated(device) - allocated)))


@dataclass(frozen=True)
class Pipeline:
    """This rank's place: its stage, the stages, model chunks a stage."""

    stage: int = 0
    stages: int = 1
    chunks: int = 1

    @classmethod
    def of(cls, handles: Iterable[LinearHandle], config: Any, shape: LoopShape) -> Pipeline:
        """From a rank's linears, Megatron's configuration of the model and the loop's sizes."""
        stage = next((handle.stage for handle in handles), 0)
        return cls(stage, config.pipeline_model_parallel_size, shape.virtual_stages or 1)

    def in_flight(self, microbatches: int) -> float:
        """Microbatches whose activations are kept at once in a call of so many."""
        return microbatches_in_flight(microbatches, self.stage, self.stages, self.chunks)


class ProbeMemory:
    """What an update of this run takes on this rank.

    Args:
        shapes: of what is recorded here.
        handles: this rank's linears in the same order, whose formats tell what training keeps of their inputs.
        pipeline: this rank's place.
        probe_tokens: ``--snip-probe-tokens``.
        forces, moves: whether options are forced alone, whether weights are moved (policy ``hawq``).
        gathers: inputs of column-parallel linears are kept as bf16 shards in every format (sequence parallelism).
        recomputes: whole layers run again in the backward, one at a time.
    """

    def __init__(
        self,
        shapes: ProbedShapes,
        handles: Sequence[LinearHandle],
        pipeline: Pipeline,
        probe_tokens: int,
        *,
        forces: bool = False,
        moves: bool = False,
        gathers: bool = False,
        recomputes: bool = False,
    ) -> None:
        self._shapes = shapes
        self._handles = list(handles)
        self._pipeline = pipeline
        self._probe_tokens = probe_tokens
        self._forces = forces
        self._moves = moves
        self._gathers = gathers
        self._layers_at_once = 1.0 / max(1, len({h.id.layer for h in self._handles})) if recomputes else 1.0

    def needed(self, peak: float | None, microbatches: int, step_microbatches: int) -> float:
        """Bytes beyond those allocated between two steps.

        Args:
            peak: what training steps took; None before the first one of this process: inputs and outputs of the
                linears stand in.
            microbatches: of the probe. step_microbatches: of a training step; both on this rank.
        """
        shapes = self._shapes
        most = self._pass(peak, microbatches, step_microbatches) + shapes.recording
        if self._moves:
            again = self._pass(peak, microbatches, step_microbatches)
            most = max(most, again + shapes.weight_copy + shapes.moving)
        if self._forces:
            full = self._pass(peak, _MANY, step_microbatches)
            most = max(most, full + shapes.gradient_copy + shapes.evaluating)
        return shapes.samples(self._probe_tokens, microbatches) + most

    def _pass(self, peak: float | None, microbatches: int, step_microbatches: int) -> float:
        """One call of the schedule with all linears in bf16."""
        flights = self._pipeline.in_flight(microbatches)
        if peak is None:
            return flights * self._layers_at_once * self._shapes.element * self._shapes.features
        share = min(1.0, flights / self._pipeline.in_flight(step_microbatches))
        return share * peak + flights * self._layers_at_once * self._quantised_inputs()

    def _quantised_inputs(self) -> float:
        """What bf16 inputs of a microbatch take beyond the quantised ones that training keeps in their place."""
        elements = sum(
            linear.rows * linear.k
            for handle, linear in zip(self._handles, self._shapes.linears, strict=True)
            if handle.formats[GEMM_INDEX[Gemm.WGRAD]] is not Format.BF16
            and not (self._gathers and handle.parallel == "column")
        )
        return float((self._shapes.element - 1) * elements)


def probed_shapes(
    registry: LinearRegistry,
    sinks: Iterable[tuple[int, torch.nn.Parameter, bool, int]],
    shape: LoopShape,
    groups: ProbeGroups,
    *,
    hidden: int,
) -> ProbedShapes:
    """Of a rank's linears and :meth:`snip_megatron.megatron.drift_probe.DriftProbe.local_sinks`. Tokens are taken to be
    spread evenly over experts."""
    handles, tokens = list(registry), shape.tokens(1, 1)
    copies = Counter(handle.name for handle in handles)  # experts share a name
    linears = []
    for handle in handles:
        rows = tokens if handle.expert is None else -(-tokens * registry.mixture[1] // copies[handle.name])
        linears.append(LinearRows(rows, int(handle.weight.shape[0]), int(handle.weight.shape[1])))
    sizes = [handle.weight.numel() for handle in handles] + [weight.numel() for _, weight, _, _ in sinks]
    return ProbedShapes(
        linears=linears,
        tokens=tokens,
        hidden=hidden,
        boundaries=2 * len({handle.id.layer for handle in handles}),
        parameters=sum(sizes),
        largest=max(sizes, default=0),
        shards=groups.dp_size if shape.optimizer_sharded else 1,
        element=handles[0].weight.element_size() if handles else 2,
    )


def shortage(needed: float, memory: DeviceMemory, groups: ProbeGroups, device: torch.device) -> Unmeasured | None:
    """Why no rank probes, if one cannot; the same on all of them. Collective over all ranks.

    Args:
        needed: bytes, on this rank. memory: of this rank.
        device: for the collective.
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
