"""Compiles kernels and makes plans before the first step, so that updates and adoptions need not wait for them.

This covers Triton's kernels for every format that a linear of this rank may get, the kernels of probes, the plans of
the GEMM library, the modules that CUDA loads at a first launch, and the communicators of the reductions. The code of
training runs twice on tensors of its own. The first run lists the kernels, which the ranks of a node then compile
together in separate processes. The second run launches them.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from snip_megatron.config import SnipConfig
from snip_megatron.layers.context import LinearHandle
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.layers.warm_up import Formats, covering, warm_up_gemms, warm_up_linear
from snip_megatron.megatron.startup import is_rank_zero
from snip_megatron.optimizers.warmup import warm_up_recording, warm_up_sinks, warm_up_update_error
from snip_megatron.precision import Format, Gemm, PrecisionMap, option_id
from snip_megatron.records.recorded_maps import replayed_maps
from snip_megatron.sensitivity.globs import pinned_formats
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.statistics.reduction import ProbeGroups
from snip_megatron.statistics.squares import has_kernels

_MOST_PROCESSES = 16


@dataclass(frozen=True)
class WarmUpSizes:
    """The sizes and kinds of work that a run may require of this rank.

    Attributes:
        tokens: rows of an activation in a microbatch.
        gathers: whether inputs of column-parallel linears are token shards (sequence parallelism).
        sharded: whether ranks hold shards of the optimizer's state.
        drift: whether updates evaluate AdamW's drift.
        sinks: the parameters besides the linears' weights whose drift counts.
    """

    tokens: int
    gathers: bool
    sharded: bool
    drift: bool
    sinks: Sequence[torch.Tensor]


class WarmUp:
    """Prepares one rank for training.

    The call is collective. All ranks call it after the first map is adopted and before the first step.

    Args:
        registry: the linears of this rank.
        config: the configuration of the run.
        request: the solve request of every update.
        asked: the sizes and kinds of work.
        groups: the process groups of the reductions.
    """

    def __init__(
        self,
        registry: LinearRegistry,
        config: SnipConfig,
        request: SolveRequest,
        asked: WarmUpSizes,
        groups: ProbeGroups,
    ) -> None:
        self._registry = registry
        self._config = config
        self._request = request
        self._asked = asked
        self._groups = groups

    def __call__(self) -> Mapping[str, float] | None:
        """Prepare this rank.

        Returns:
            The numbers of kernels, of compiled kernels and of processes that compiled them. None if nothing needs to
            be prepared, as on a CPU.
        """
        weight = next((handle.weight for handle in self._registry), None)
        if not self._lazy(weight):
            return None
        device = torch.device("cuda", torch.cuda.current_device())
        started = time.perf_counter()
        self._connect(device)
        figures = self._compile()
        self._run_if_it_fits()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        if is_rank_zero() and figures["compiled"]:
            print(f"snip: compiled in {time.perf_counter() - started:.1f} s", flush=True)
        return figures

    def _lazy(self, weight: torch.Tensor | None) -> bool:
        """Return whether any rank has kernels to compile. The result is the same on all ranks."""
        return torch.cuda.is_available() and (weight is None or has_kernels(weight))

    # -- what is run ---------------------------------------------------------------------------------------------
    def run_once(self) -> None:
        """Run everything that steps, probes and adoptions of this rank may run, once for each kind of linear."""
        asked = self._asked
        for handle, formats in self._kinds():
            for tokens in self._tokens(handle):
                gathered = asked.gathers and handle.parallel == "column"
                linear = warm_up_linear(handle, tokens, whole_x=gathered, graphed=handle.state.graphed is not None)
                warm_up_gemms(linear, formats)
                if self._config.updates:
                    recorder = warm_up_recording(linear, self._config.measured_formats, self._config.probe_tokens)
                    if asked.drift:
                        warm_up_update_error(recorder, sharded=asked.sharded)
        if self._config.updates and asked.drift:
            for weight in {(w.dim(), w.shape[-1]): w for w in asked.sinks}.values():
                warm_up_sinks(weight, sharded=asked.sharded)

    def _run_if_it_fits(self) -> None:
        """Run all once, or report that the memory is too small. Such a rank must still take part in the collectives."""
        try:
            self.run_once()
        except torch.cuda.OutOfMemoryError:
            print("snip: no memory to rehearse the GEMMs: the first update and adoption will take longer", flush=True)

    def _tokens(self, handle: LinearHandle) -> list[int]:
        """Return the numbers of rows to run. Those of an expert vary, and kernels differ for multiples of 16."""
        return [self._asked.tokens] if handle.expert is None else [self._asked.tokens, self._asked.tokens + 1]

    def _kinds(self) -> Iterator[tuple[LinearHandle, list[Formats]]]:
        """Yield one linear of each shape, with the formats that all linears of this shape may get."""
        found: dict[tuple[object, ...], tuple[LinearHandle, dict[Formats, None]]] = {}
        for handle in self._registry:
            key = (
                tuple(handle.weight.shape),
                handle.parallel,
                handle.expert is None,
                handle.state.beside_swiglu,
            )
            _, formats = found.setdefault(key, (handle, {}))
            formats |= dict.fromkeys(self._formats(handle))
        for handle, formats in found.values():
            yield handle, list(formats)

    def _formats(self, handle: LinearHandle) -> Iterable[Formats]:
        """Yield the formats in force, and those that an update, a later phase or a replay may choose."""
        yield handle.formats
        for replayed in self._replayed:
            of_y, of_x, of_w = (replayed.format_of(handle.name, gemm) for gemm in Gemm)
            yield (of_y, of_x, of_w)
        if not self._config.updates and not self._config.late:
            return
        candidates = [Format(name) for name in self._config.formats]
        fprop, dgrad, wgrad = (
            self._pinned.get(option_id(handle.name, gemm), [fmt for fmt in candidates if gemm in fmt.gemms])
            for gemm in Gemm
        )
        yield from covering((fprop, dgrad, wgrad), alike=self._request.granularity == "layer")

    @functools.cached_property
    def _replayed(self) -> list[PrecisionMap]:
        return [] if self._config.replay is None else list(replayed_maps(self._config.replay).values())

    @functools.cached_property
    def _pinned(self) -> dict[str, list[Format]]:
        found = pinned_formats(self._registry.names, self._request.pins)
        return {option: [Format(name)] for option, name in found.items()}

    # -- compilation -------------------------------------------------------------------------------------------
    def _compile(self) -> dict[str, float]:
        """Compile the kernels of all ranks. Each rank compiles a share of those of its node, and waits."""
        from triton.runtime import driver

        from snip_megatron.quantization.kernels.compiler import compile_variants
        from snip_megatron.quantization.kernels.listing import Variant, listed

        with listed(run=False) as listing:
            self._run_if_it_fits()
        gathered: list[list[Variant]] = [[] for _ in range(dist.get_world_size(self._groups.world))]
        dist.all_gather_object(gathered, list(listing.variants), group=self._groups.world)
        everything = sorted({variant for own in gathered for variant in own}, key=repr)
        rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        processes = max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0)) // ranks))
        done = compile_variants(everything[rank::ranks], driver.active.get_current_target(), processes, _say)
        if done.left:
            print(
                f"snip: processes that compile kernels died or hung: {done.left} of {done.kernels} kernels of rank"
                f" {dist.get_rank()} are compiled at their first launch",
                flush=True,
            )
        dist.barrier(self._groups.world)
        return {"kernels": len(everything), "compiled": done.compiled, "processes": done.processes}

    def _connect(self, device: torch.device) -> None:
        """Make NCCL create the communicators of the reductions, which it does at the first collective of a group."""
        groups = [self._groups] + ([self._groups.experts] if self._groups.experts is not None else [])
        for group in [self._groups.world, *(g for own in groups for g in (own.tp, own.dp))]:
            dist.all_reduce(torch.zeros(1, device=device), group=group)


def _say(kernels: int, processes: int) -> None:
    if is_rank_zero():
        print(f"snip: compiling {kernels} kernels in {processes} processes ...", flush=True)
