"""SNIP under Megatron's CUDA graphs.

Captured linears read the state of the step from the device. Probes and validations run without graphs. The graphs are
captured anew when a map is adopted.
"""

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from snip_megatron.layers import LinearRegistry
from snip_megatron.layers.context import GraphedState, LinearHandle
from snip_megatron.layers.registry import DeviceStep
from snip_megatron.megatron import compat
from snip_megatron.megatron.startup import say
from snip_megatron.precision import ALL_BF16, Format


def _may_hold_experts(module: torch.nn.Module) -> bool:
    """Return whether a module is a layer with experts of the class that may run in a graph."""
    return hasattr(getattr(getattr(module, "mlp", None), "experts", None), "snip_why_eager")


def _expert_linears(layer: Any) -> tuple[Any, Any]:
    return layer.mlp.experts.linear_fc1, layer.mlp.experts.linear_fc2


def _why_eager(layer: Any) -> str | None:
    """Return why no graph can hold the experts of a layer under the map in force. None if one can."""
    config, reason = layer.config, compat.why_host_counts(layer.mlp.token_dispatcher)
    if reason is None and config.recompute_granularity == "selective" and "moe" in config.recompute_modules:
        reason = "--recompute-modules moe"
    if reason is None and config.moe_shared_expert_overlap:
        reason = "--moe-shared-expert-overlap"
    why_eager: str | None = reason or layer.mlp.experts.snip_why_eager()
    return why_eager


class GraphedRun:
    """The CUDA graphs of a run in one process. Without ``--cuda-graph-impl``, its methods do nothing."""

    def __init__(self, args: argparse.Namespace) -> None:
        implementation = compat.graph_implementation(args)
        self._args, self._graphs = args, None
        if implementation is not None:
            self._graphs = compat.IMPLEMENTATIONS[implementation](self._accumulating)
        self._layers: list[Any] = []  # those with experts that graphs may hold
        self._experts: dict[LinearHandle, GraphedState] = {}  # first expert of their linears → what a graph reads
        self._whole: list[bool] = []  # which of these layers the latest graphs hold with their experts
        self._line = ""  # what was printed about it
        self._registry: LinearRegistry | None = None
        self._model: list[torch.nn.Module] = []
        self._generation = 0
        self._graphed: list[LinearHandle] = []  # linears that read the state of the step from the device
        self._formats: dict[LinearHandle, tuple[Format, ...]] = {}  # of every linear, before a map is adopted
        self._captured_before = False

    def close(self) -> None:
        """Undo all changes of Megatron's classes."""
        if self._graphs is not None:
            self._graphs.close()

    def attach(self, registry: LinearRegistry, model: Sequence[torch.nn.Module]) -> None:
        """Make the linears read the state of the step from the device. This is called before the first step."""
        self._model, self._registry = list(model), registry
        if self._graphs is None or not len(registry):
            return
        self._formats = {linear: linear.formats for linear in registry}
        self._graphed = [linear for linear in registry if linear.expert is None]
        if getattr(self._args, "snip_graphed_experts", False):
            self._layers = [m for chunk in model for m in chunk.modules() if _may_hold_experts(m)]
            self._whole = [False] * len(self._layers)
        firsts = [linear.snip for layer in self._layers for linear in _expert_linears(layer)]
        linears = [*self._graphed, *firsts]  # one state serves all experts
        chunk_of = {id(parameter): i for i, chunk in enumerate(model) for parameter in chunk.parameters()}
        chunks = [chunk_of[id(linear.weight)] for linear in linears]
        registry.device = DeviceStep(linears, chunks, next(iter(registry)).weight.device)
        for first in firsts:
            assert first.state.graphed is not None
            self._experts[first], first.state.graphed = first.state.graphed, None  # until a graph holds the layer

    def _accumulating(self) -> list[torch.nn.Parameter]:
        """Return the weights whose captured backward adds to ``main_grad`` itself."""
        return [linear.weight for linear in self._graphed if linear.formats != ALL_BF16]

    # -- the step ------------------------------------------------------------------------------------------------
    def recapture(self, step: int) -> None:
        """Capture anew what an adopted map has changed. This is called between adoption and step."""
        registry = self._registry
        if self._graphs is None or registry is None or registry.generation == self._generation:
            return
        self._generation = registry.generation
        changed = [linear for linear in registry if linear.formats != self._formats[linear]]
        for linear in changed:
            self._formats[linear] = linear.formats
            # Megatron does not take this mark back under Transformer Engine's graphs. A capture or a backward sets it.
            if hasattr(linear.weight, "grad_added_to_main_grad"):
                linear.weight.grad_added_to_main_grad = False
        moved = self._hold_experts()
        captured = [each for each in changed if each.state.graphed is not None and self._graphs.contain(each.module)]
        if (captured or moved) and self._graphs.captured:
            assert registry.device is not None
            registry.device.forget_weights()
            self._graphs.recapture(self._model, self._args)
            registry.start_step(step)  # resets the counters, which the passes of a capture have increased

    def _hold_experts(self) -> bool:
        """Decide which layers the next graphs hold with their experts. Returns whether they are others than before."""
        if not self._layers:
            return False
        assert self._graphs is not None
        reasons = [_why_eager(layer) for layer in self._layers]
        before, self._whole = self._whole, [reason is None for reason in reasons]
        self._graphs.hold(self._layers, self._whole)
        for layer, is_whole in zip(self._layers, self._whole, strict=True):
            for linear in _expert_linears(layer):
                linear.snip.state.graphed = self._experts[linear.snip] if is_whole else None
        why = next((f": {reason}" for reason in reasons if reason is not None), "")
        line = f"CUDA graphs hold the experts of {sum(self._whole)} of {len(self._layers)} layers{why}"
        if line != self._line:
            say(line)
            self._line = line
        return self._whole != before

    def training(
        self, forward_step: Callable[..., Any], forward_backward: Callable[..., Any]
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return the two functions of a training step, wrapped for graphs.

        The forward step marks the weights of a chunk as quantised from its second microbatch on. A graph of the whole
        step captures the kernel that writes the mark. Captures are timed.
        """
        if self._graphs is None:
            return forward_step, forward_backward
        started_chunks: set[int] = set()
        chunks = {id(chunk): number for number, chunk in enumerate(self._model)}

        @functools.wraps(forward_step)
        def counted(data_iterator: Any, model: Any, *arguments: Any, **named: Any) -> Any:
            chunk = chunks.get(id(model))
            device = None if self._registry is None else self._registry.device
            if chunk is not None and device is not None:
                if chunk in started_chunks:
                    device.weights_are_current(chunk)
                started_chunks.add(chunk)
            return forward_step(data_iterator, model, *arguments, **named)

        return counted, self._graphs.timed(forward_backward)

    def take_captures(self) -> tuple[str, float] | None:
        """Return ("capture" or "recapture", seconds) if graphs were captured since the last call."""
        seconds = 0.0 if self._graphs is None else self._graphs.take_seconds()
        if not seconds:
            return None
        kind = "recapture" if self._captured_before else "capture"
        self._captured_before = True
        return kind, seconds

    # -- without graphs --------------------------------------------------------------------------------------------
    @contextmanager
    def bypassed(self, model: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Run the passes inside this context without graphs. They are probes or validations."""
        with nullcontext() if self._graphs is None else compat.graphs_bypassed(model, self._args):
            yield
