"""Transformer Engine's CUDA graphs: capture, and a new capture of the layers whose formats changed.

The graphs of all layers share a memory pool, in which Transformer Engine lets a graph reuse what graphs before it have
freed. That holds as long as no other graph is captured into the pool, and as long as graphs run in the order of their
capture. A few layers can therefore be captured anew into a pool of their own: the others keep their memory and their
order. The memory of the replaced graphs stays in the old pool until all layers are captured anew.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs as core
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.transformer_layer import TransformerLayer

from snip_megatron.megatron.compat.graphs import FullIterationGraphs, Graphs, LocalGraphs
from snip_megatron.megatron.compat.random_state import rng_state, set_rng_state
from snip_megatron.megatron.compat.versions import changed
from snip_megatron.runtime.exchange import MapChannel

_WARM = 1 << 10  # warm-up steps that leave Transformer Engine one iteration of its own: kernels are compiled by then
_ROOM = 2.5
"""Free memory that a capture needs without releasing any, in sizes of its graphs: the graphs, a pass without graphs
before, and half as a reserve, because memory cannot be released during a capture."""


class TransformerEngineGraphs(Graphs):
    """Transformer Engine's ``make_graphed_callables``. Layers are captured between two steps."""

    def __init__(self) -> None:
        super().__init__()
        self._helper: Any = None
        self._inside: set[int] = set()  # modules that graphs hold
        self._accumulating: Callable[[], list[torch.nn.Parameter]] = list
        self._layers = 0  # captured since the last take()
        self._replaced = 0  # layers whose graphs were replaced since all were captured
        self._layer_bytes = 0.0  # reserved for a layer's graphs
        start, create = core.TECudaGraphHelper.__init__, core.TECudaGraphHelper.create_cudagraphs

        def remembered(helper: Any, *arguments: Any, **named: Any) -> None:
            start(helper, *arguments, **named)
            self._helper = helper
            self._inside = {id(m) for each in map(_captured_parts, helper.flattened_callables) for m in each}

        self._replace(core.TECudaGraphHelper, "__init__", remembered)
        self._replace(core.TECudaGraphHelper, "create_cudagraphs", lambda helper: self._create(helper, create))

    @property
    def captured(self) -> bool:
        return self._helper is not None and bool(self._helper.graphs_created())

    def accumulating(self, weights: Callable[[], list[torch.nn.Parameter]]) -> None:
        self._accumulating = weights

    def take(self) -> tuple[float, Mapping[str, Any]]:
        """See :class:`Graphs`. The field is ``layers``, the number of captured layers."""
        seconds, _ = super().take()
        layers, self._layers = self._layers, 0
        return seconds, {"layers": layers}

    def hold(self, module: torch.nn.Module) -> bool:
        return id(module) in self._inside

    # -- a capture ---------------------------------------------------------------------------------------------
    def _create(self, helper: Any, create: Callable[[Any], None]) -> None:
        """Run Megatron's capture of the helper's layers, and measure the memory of a layer's graphs."""
        started, layers = time.perf_counter(), len(helper.flattened_callables)
        chunks = {name: getattr(helper, name) for name in ("num_model_chunks", "num_layers_per_chunk")}
        torch.cuda.empty_cache()  # the capture begins and ends with it, so that what is reserved is the graphs'
        reserved = torch.cuda.memory_reserved()
        with _returned_as_they_are(self._accumulating()), _samples_on_the_device():
            create(helper)
        vars(helper).update(chunks)  # a capture for overlapped exchanges of experts counts every layer as a chunk
        if layers:
            self._layer_bytes = (torch.cuda.memory_reserved() - reserved) / layers
        self.seconds += time.perf_counter() - started
        self._layers += layers

    # -- another map -------------------------------------------------------------------------------------------
    def choose(self, changed: Sequence[torch.nn.Module]) -> list[torch.nn.Module] | None:
        """See :class:`Graphs`.

        All layers are captured anew where microbatches share buffers, with pipeline parallelism and with overlapped
        exchanges of experts, if a rank has too little memory for a second pool, and if the memory of replaced graphs
        would exceed that of all layers.
        """
        helper = self._helper
        layers = helper.flattened_callables
        chosen = layers_of(layers, changed)
        shared = helper.pp_group.size() > 1 or helper.config.overlap_moe_expert_parallel_comm
        if shared or chosen is None or len(chosen) == len(layers):
            return None
        free, _ = torch.cuda.mem_get_info()  # without what is cached
        fits = 0 < _ROOM * len(chosen) * self._layer_bytes <= free
        if self._replaced + len(chosen) > len(layers):
            return None
        # All ranks must capture the same layers: these have collectives.
        return chosen if MapChannel((), torch.device("cuda")).everywhere(fits) else None

    def renew(
        self, model: Sequence[torch.nn.Module], args: Any, layers: Sequence[torch.nn.Module] | None = None
    ) -> None:
        """See :class:`Graphs`. The capture runs at once, as it does in the training loop before the first such step."""
        helper, started, before = self._helper, time.perf_counter(), self.seconds
        gathering: list[Any] = [chunk for chunk in model if getattr(chunk, "remove_forward_pre_hook_handles", None)]
        states = rng_state()
        self._replaced = 0 if layers is None else self._replaced + len(layers)
        with contextlib.nullcontext() if layers is None else _only(helper, layers):
            for chunk in gathering:  # when their layers run
                chunk.disable_forward_pre_hook(param_sync=False)
            helper.delete_cuda_graphs()
            helper._capture_finished = False
            with changed(helper.config, cuda_graph_warmup_steps=_WARM):
                helper.create_cudagraphs()
        set_rng_state(states)
        for chunk in gathering:
            chunk.enable_forward_pre_hook()
        if gathering:
            helper.cuda_graph_set_manual_hooks()
        self.seconds = before + time.perf_counter() - started


def _captured_parts(layer: Any) -> Iterator[torch.nn.Module]:
    parts = layer._get_submodules_under_cudagraphs()
    if CudaGraphModule.moe_preprocess in layer.config.cuda_graph_modules:  # Megatron's list lacks the latent projection
        parts = [*parts, *filter(None, [getattr(getattr(layer, "mlp", None), "fc1_latent_proj", None)])]
    for part in parts:
        yield from part.modules()


def layers_of(layers: Iterable[torch.nn.Module], modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module] | None:
    """Return the layers that contain ``modules``, in their order. None if there are no modules, or one is elsewhere."""
    wanted = {id(module) for module in modules}
    found, seen = [], set()
    for layer in layers:
        inside = wanted & {id(module) for module in layer.modules()}
        if inside:
            found.append(layer)
            seen |= inside
    return found if wanted and seen == wanted else None


def _only(helper: Any, layers: Sequence[torch.nn.Module]) -> AbstractContextManager[None]:
    """Make Megatron's helper delete and capture the graphs of ``layers`` alone, which belong to one model chunk."""
    chosen = {id(layer) for layer in layers}
    flags = zip(helper.flattened_callables, helper.flattened_callables_is_mtp, strict=True)
    mtp = [flag for layer, flag in flags if id(layer) in chosen]
    some = {
        "flattened_callables": list(layers), "callables_per_chunk": [list(layers)],
        "num_layers_per_chunk": [len(layers)],
        "flattened_callables_is_mtp": mtp, "callables_per_chunk_is_mtp": [mtp],
    }  # fmt: skip
    return changed(helper, **some)


def _samples_on_the_device() -> AbstractContextManager[None]:
    """Make the sample inputs of layers on the device of their weights inside this context.

    Megatron makes a causal mask for every layer and microbatch on the CPU and copies it, which took 0.41 s for 22
    layers at 2,048 tokens. On the device the mask has the same values.
    """
    inputs = TransformerLayer.get_layer_static_inputs

    def on_the_device(layer: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
        with next(layer.parameters()).device:
            return inputs(layer, *arguments, **named)

    return changed(TransformerLayer, get_layer_static_inputs=on_the_device)


@contextlib.contextmanager
def _returned_as_they_are(weights: Sequence[Any]) -> Iterator[None]:
    """Make graphs that are captured inside return the dummy gradients of ``weights`` without a copy of each.

    Weights whose wgrad is delayed are marked so at all times.
    """
    weights = [weight for weight in weights if not hasattr(weight, "skip_backward_post_hook")]
    for weight in weights:
        weight.skip_backward_post_hook = True
    try:
        yield
    finally:
        for weight in weights:
            del weight.skip_backward_post_hook


IMPLEMENTATIONS: dict[str, type[Graphs]] = {
    "local": LocalGraphs,
    "transformer_engine": TransformerEngineGraphs,
    "full_iteration": FullIterationGraphs,
}
"""Value of ``--cuda-graph-impl`` → its graphs. An instance, which times captures, is made before the model is built."""
