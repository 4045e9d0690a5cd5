"""Compiles the kernels of a run during its first steps, which run in bf16.

The kernels are those of every format that a linear of this rank may get, and those of probes. The code of training runs
once on small tensors to list them. Processes of low priority then compile them, each a share of the kernels of all
ranks. Training waits for them only if a map that quantises is in force at its first step.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from snip_megatron.layers.context import LinearHandle
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.layers.warm_up import covering, warm_up_gemms, warm_up_linear
from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.numerics.products.check import wrong_numbers
from snip_megatron.numerics.products.hopper import NATIVE
from snip_megatron.numerics.products.selection import launch_from_cpp
from snip_megatron.numerics.quantize.kernels import has_kernels
from snip_megatron.precision import Format, Formats, Gemm, option_id
from snip_megatron.precision.linears import pinned_formats
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.exchange import is_true_on_any, objects_of_ranks, rank
from snip_megatron.runtime.host import Host
from snip_megatron.runtime.run_data import replayed_maps
from snip_megatron.sensitivity.recorder import warm_up_recording
from snip_megatron.sensitivity.request import SolveRequest

if TYPE_CHECKING:
    from snip_megatron.numerics.quantize.kernels.compiler import Compilation
    from snip_megatron.numerics.quantize.kernels.launch import Source

_MOST_PROCESSES = 8
_ROWS = 1024
"""Largest number of rows with which kernels are listed. A probe samples fewer. Kernels depend on multiples of 16."""


@dataclass
class WarmUp:
    """The kernels of this rank, which are compiled beside the training."""

    registry: LinearRegistry
    config: SnipConfig
    request: SolveRequest
    host: Host
    times: Callable[[], None] | None  # runs once the calls that the first update times. None if this rank times nothing
    _compilation: Compilation | None = None

    @property
    def _cpp_replay(self) -> bool:
        # With CUDA graphs no host time is left to save, and a capture of replays has not been tried on a GPU.
        return self.registry.context.backend.name == "hopper" and self.registry.device is None

    def begin(self) -> bool:
        """Begin to compile what steps, updates and later maps run, and wait if a map in force needs it. Collective.

        Returns whether all ranks have all kernels. On a device without kernels nothing is compiled.
        """
        weight = next((handle.weight for handle in self.registry), None)
        if not torch.cuda.is_available() or not (weight is None or has_kernels(weight)):
            return True
        from triton.runtime import driver

        from snip_megatron.numerics.quantize.kernels.compiler import Compilation

        listed = self._listed()
        torch.cuda.empty_cache()
        kernels = {kernel for of_rank in objects_of_ranks(listed) for kernel in of_rank}
        place, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        processes = max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0)) // (2 * ranks)))  # training has the others
        share, replays = sorted(kernels, key=repr)[place::ranks], self._cpp_replay and place == 0
        self._compilation = Compilation(share, driver.active.get_current_target(), processes, replays=replays)
        if self.registry.context.map_is_quantized:
            if self._compilation.processes:
                _say(f"compiling {len(kernels)} kernels, for which the map in force waits ...")
            self._compilation.running(math.inf)
        device = torch.device("cuda", torch.cuda.current_device())
        running = is_true_on_any(self._compilation.running(), device)
        if running:
            _say(f"compiling {len(kernels)} kernels beside the training; the next map waits for them")
        return not running

    def finish(self, seconds: float = math.inf) -> bool:
        """Wait for this rank's kernels for at most ``seconds``. Returns whether the compilation has ended."""
        return self._compilation is None or not self._compilation.running(seconds)

    def complete(self) -> Mapping[str, float]:
        """Begin to use the kernels, which all ranks have. Returns figures for the event, empty without kernels.

        From now on, C++ launches the kernels of linears outside of CUDA graphs.
        """
        compilation = self._compilation
        if compilation is None:
            return {}
        self._check()
        agree_about_deepgemm(self.registry.context.backend)
        if compilation.remaining:
            lost = f"{compilation.remaining} of {compilation.kernels} kernels of rank {rank()}"
            line = f"processes that compile kernels died or hung: {lost} are compiled at their first launch"
            print(f"snip: {line}", flush=True)
        if compilation.processes:
            _say(f"{compilation.kernels} kernels are compiled")
        if self._cpp_replay:
            _say(launch_from_cpp(self.registry.context.backend, self._replayed_formats))
        return {name: getattr(compilation, name) for name in ("kernels", "compiled", "processes")}

    def _check(self) -> None:
        """Check the backend, before a map uses it."""
        formats, rows = self._formats_in_use, self.host.tokens or 0
        # The rows of experts differ from step to step. Graphs hold no experts, so that their products are timed later.
        sizes = {(rows, *handle.weight.shape) for handle in self.registry if handle.expert is None and rows}
        fault = self.registry.context.backend.check("cuda", formats, sorted(sizes)) if formats else None
        if fault is not None:
            print(f"snip: rank {rank()}: {fault}", flush=True)

    def close(self) -> None:
        """End the compilation."""
        if self._compilation is not None:
            self._compilation.close()

    def _listed(self) -> list[str | Source]:
        from snip_megatron.numerics.quantize.kernels.launch import list_launches

        backend = self.registry.context.backend
        with list_launches(rows=self.host.tokens or 0) as listing:
            self.run_once()
            if self.times is not None:
                self.times()
        if self._formats_in_use:
            with list_launches() as compared:  # of small matrices, whose sizes are not replaced
                backend.check("cuda", self._formats_in_use)
                for fmt in self._replayed_formats if self._cpp_replay else ():
                    wrong_numbers(backend, "cuda", [fmt])
            listing.kernels |= compared.kernels
        return list(listing.kernels)

    @property
    def _formats_in_use(self) -> frozenset[Format]:
        return self.config.formats_in_use() - {Format.BF16}

    @property
    def _replayed_formats(self) -> list[Format]:
        return [fmt for fmt in map(Format, self.config.formats) if fmt in NATIVE]

    # -- what is run -------------------------------------------------------------------------------------------
    def run_once(self) -> None:
        """Run once, for each kind of linear, all GEMMs and kernels of steps, probes and adoptions on this rank."""
        tokens = self.host.tokens
        assert tokens is not None
        for handle, formats in self._kinds():
            most = _ROWS * handle.tp_size
            rows = tokens if tokens <= most else most + tokens % (16 * handle.tp_size)
            # The rows of an expert vary, and kernels differ for multiples of 16.
            for count in [rows] if handle.expert is None else [rows, rows + 1]:
                gathered = self.host.sequence_parallel and handle.parallel == "column"
                linear = warm_up_linear(handle, count, whole_x=gathered, graphed=handle.state.graphed is not None)
                warm_up_gemms(linear, formats)
                if self.config.updates:
                    warm_up_recording(linear, self.config.measured_formats, self.config.probe_tokens)

    def _kinds(self) -> Iterator[tuple[LinearHandle, list[Formats]]]:
        """Yield one linear of each shape, with the formats that all linears of this shape may get.

        They are those in force, and those that an update, a later phase or a replay may adopt.
        """
        config, alike = self.config, self.request.granularity == "layer"
        candidates = [Format(name) for name in config.formats]
        pinned = pinned_formats(self.registry.names, self.request.pins)
        maps = [] if config.replay is None else replayed_maps(config.replay).values()
        kinds: dict[tuple[object, ...], tuple[LinearHandle, dict[Formats, None]]] = {}
        for handle in self.registry:
            key = tuple(handle.weight.shape), handle.parallel, handle.expert is None, handle.state.beside_swiglu
            _, formats = kinds.setdefault(key, (handle, {}))
            formats |= dict.fromkeys([handle.formats, *(each.formats_of(handle.name) for each in maps)])
            if config.updates or config.late:
                fprop, dgrad, wgrad = (
                    [pinned[option]] if option in pinned else [fmt for fmt in candidates if gemm in fmt.gemms]
                    for gemm in Gemm
                    for option in [option_id(handle.name, gemm)]
                )
                formats |= dict.fromkeys(covering((fprop, dgrad, wgrad), alike=alike))
        for handle, formats in kinds.values():
            yield handle, list(formats)


def agree_about_deepgemm(backend: GemmBackend) -> None:
    """Disable DeepGEMM on all ranks if its check has disabled it on one. Collective."""
    libraries = objects_of_ranks((backend.products, socket.gethostname()))
    disabled = [rank for rank, (library, _) in enumerate(libraries) if library != "DeepGEMM"]
    if disabled and len(disabled) < len(libraries):
        backend.disable_deepgemm()
        where = f"rank {disabled[0]} ({libraries[disabled[0]][1]})"
        _say(f"DeepGEMM is switched off on all ranks, because its check failed on {where}")


def _say(line: str) -> None:
    if rank() == 0:
        print(f"snip: {line}", flush=True)
