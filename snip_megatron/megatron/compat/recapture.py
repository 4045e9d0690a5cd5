"""The graphs of one implementation of Megatron's CUDA graphs, and how they are captured anew under another map.

Megatron's three implementations capture once, in the first steps, and expect that a layer always computes the same.
Deleting the graphs returns an implementation to its state before the capture.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from snip_megatron.megatron.compat.graphs import FIRST_WITH_GRAPHS, parameters
from snip_megatron.megatron.compat.random_state import rng_state, set_rng_state
from snip_megatron.megatron.compat.versions import MEGATRON_VERSION

if MEGATRON_VERSION >= FIRST_WITH_GRAPHS:
    import megatron.training.training as training
    from megatron.core import full_cuda_graph as full
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.core.transformer import cuda_graphs as core
    from megatron.core.transformer.transformer_layer import TransformerLayer

    _RECORD: Any = core._CudagraphGlobalRecord

_PARTS = {
    "_start_capturing": "release",
    "_get_cuda_graph_input_data": "inputs",
    "_finish_capturing": "reset",
}  # methods of Transformer Engine's helper, and what its users see them as
_WARM = 1 << 10  # warm-up steps that leave Transformer Engine one iteration of its own: kernels are compiled by then


class Graphs:
    """Base class of the graphs of one implementation in this process.

    Attributes:
        seconds: duration of the captures since the last call of :meth:`take_seconds`.
        parts: the same by part, where the implementation has parts.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.parts: dict[str, float] = {}
        self._undo = contextlib.ExitStack()

    @property
    def captured(self) -> bool:
        """Whether graphs have been captured."""
        raise NotImplementedError

    def renew(self, model: Sequence[torch.nn.Module], args: Any) -> None:
        """Delete the graphs. They are captured again under the map in force, at once or in the next steps.

        Args:
            model: the model chunks of this rank.
            args: Megatron's arguments.
        """
        raise NotImplementedError

    def accumulating(self, weights: Callable[[], list[torch.nn.Parameter]]) -> None:
        """Set the function that returns, at a capture, the weights whose backward adds to ``main_grad`` itself.

        Such a backward returns a dummy gradient to autograd.
        """

    def watched(self, forward_backward_func: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward_backward_func``, wrapped to time the captures that it makes."""
        return forward_backward_func

    def take_seconds(self) -> tuple[float, Mapping[str, float]]:
        """Return the duration of the captures since the last call and its parts, and reset both."""
        taken = self.seconds, self.parts
        self.seconds, self.parts = 0.0, {}
        return taken

    def close(self) -> None:
        """Undo all changes of Megatron's classes."""
        self._undo.close()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        before = owner.__dict__[name]
        setattr(owner, name, value)
        self._undo.callback(setattr, owner, name, before)


class LocalGraphs(Graphs):
    """Megatron's own implementation, with one graph per layer and microbatch.

    One step records the order of the layers. The graphs are created in this order at the end of the step. They share a
    memory pool and pass buffers to each other, so that all of them must be captured anew together.
    """

    def __init__(self) -> None:
        super().__init__()
        create = _RECORD._create_cudagraphs

        def timed(record: Any) -> Any:
            figures = create()
            if figures:
                self.seconds += figures["time"]
            return figures

        self._replace(_RECORD, "_create_cudagraphs", classmethod(timed))

    @property
    def captured(self) -> bool:
        """See :class:`Graphs`."""
        return bool(_RECORD.cudagraph_created)

    def renew(self, model: Sequence[torch.nn.Module], args: Any) -> None:
        """See :class:`Graphs`. The next step is recorded."""
        torch.cuda.synchronize()
        for chunk in model:
            for module in chunk.modules():
                if isinstance(module, core.CudaGraphManager):
                    module.cudagraph_runners.clear()
                    module.custom_cudagraphs_lookup_table.clear()
        core.delete_cuda_graphs()
        for parameter in parameters(model):
            parameter.__dict__.pop("_cudagraph_wgrad_ready_event", None)
        # Tensors that outlive a step, such as rotary embeddings, would otherwise count as inputs of the old graphs.
        for found in gc.get_objects():
            if type(found) is core.CudagraphBufferMetadata:
                vars(found).update(vars(core.CudagraphBufferMetadata()))
        core.fwd_buffer_reuse_ref_count = core.bwd_buffer_reuse_ref_count = 0
        # The constructor of a manager does this, and the deletion does not undo it.
        core.CudaGraphManager.global_mempool = torch.cuda.graph_pool_handle()
        _RECORD._enable_saved_tensors_observer()
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


class TransformerEngineGraphs(Graphs):
    """Transformer Engine's ``make_graphed_callables``. All layers are captured between two steps.

    Its parts: ``delete`` the graphs of the earlier map; ``release`` memory and collect garbage; make the sample
    ``inputs``; ``warm_up``, one pass without graphs; ``capture``; ``reset`` gradients and release memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._helper: Any = None
        self._accumulating: Callable[[], list[torch.nn.Parameter]] = list
        start, create = core.TECudaGraphHelper.__init__, core.TECudaGraphHelper.create_cudagraphs

        def remembered(helper: Any, *arguments: Any, **named: Any) -> None:
            start(helper, *arguments, **named)
            self._helper = helper

        def timed(helper: Any) -> None:
            with self._part("create"), _returned_as_they_are(self._accumulating()), _samples_on_the_device():
                create(helper)
            self.seconds += self.parts.pop("create")

        self._replace(core.TECudaGraphHelper, "__init__", remembered)
        self._replace(core.TECudaGraphHelper, "create_cudagraphs", timed)
        for name, part in _PARTS.items():
            self._replace(core.TECudaGraphHelper, name, self._timed(part, getattr(core.TECudaGraphHelper, name)))
        if getattr(core, "make_graphed_callables", None) is not None:
            self._replace(core, "make_graphed_callables", self._captured_in_parts(core.make_graphed_callables))

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - started

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            with self._part(part):
                return function(*arguments, **named)

        return timed

    def _captured_in_parts(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return Transformer Engine's function, wrapped to tell its warm-up from its captures."""
        hooked = "post_warmup_hook" in inspect.signature(make).parameters

        @functools.wraps(make)
        def timed(*arguments: Any, **named: Any) -> Any:
            started = warm = time.perf_counter()
            if hooked:
                after = named.get("post_warmup_hook")

                def warmed() -> None:
                    nonlocal warm
                    if after is not None:
                        after()
                    torch.cuda.synchronize()  # what runs next would wait as well
                    warm = time.perf_counter()

                named["post_warmup_hook"] = warmed
            graphs = make(*arguments, **named)
            self.parts["warm_up"] = self.parts.get("warm_up", 0.0) + warm - started
            self.parts["capture"] = self.parts.get("capture", 0.0) + time.perf_counter() - warm
            return graphs

        return timed

    @property
    def captured(self) -> bool:
        """See :class:`Graphs`."""
        return self._helper is not None and bool(self._helper.graphs_created())

    def accumulating(self, weights: Callable[[], list[torch.nn.Parameter]]) -> None:
        """See :class:`Graphs`."""
        self._accumulating = weights

    def renew(self, model: Sequence[torch.nn.Module], args: Any) -> None:
        """See :class:`Graphs`. The capture runs at once, as it does in the training loop before the first such step."""
        helper = self._helper
        hooks = training.should_disable_forward_pre_hook(args)
        with self._part("delete"):
            if hooks:
                training.disable_forward_pre_hook(model, param_sync=False)
            helper.delete_cuda_graphs()
            helper._capture_finished = False
            for parameter in parameters(model):
                if hasattr(parameter, "grad_added_to_main_grad"):
                    parameter.grad_added_to_main_grad = False  # the capture marks those that accumulate by themselves
        self.seconds += self.parts["delete"]
        states, warmup = rng_state(), helper.config.cuda_graph_warmup_steps
        helper.config.cuda_graph_warmup_steps = _WARM
        try:
            helper.create_cudagraphs()
        finally:
            helper.config.cuda_graph_warmup_steps = warmup
        set_rng_state(states)
        if hooks:
            training.enable_forward_pre_hook(model)
            helper.cuda_graph_set_manual_hooks()


@contextlib.contextmanager
def _samples_on_the_device() -> Iterator[None]:
    """Make the sample inputs of layers on the device of their weights inside this context.

    Megatron makes a causal mask for every layer and microbatch on the CPU and copies it, which took 0.41 s for 22
    layers at 2,048 tokens. On the device the mask has the same values.
    """
    inputs = TransformerLayer.get_layer_static_inputs

    def on_the_device(layer: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
        with next(layer.parameters()).device:
            return inputs(layer, *arguments, **named)

    TransformerLayer.get_layer_static_inputs = on_the_device
    try:
        yield
    finally:
        TransformerLayer.get_layer_static_inputs = inputs


@contextlib.contextmanager
def _returned_as_they_are(weights: Sequence[Any]) -> Iterator[None]:
    """Make graphs that are captured inside return the dummy gradients of ``weights`` without a copy of each."""
    for weight in weights:
        weight.skip_backward_post_hook = True
    try:
        yield
    finally:
        for weight in weights:
            del weight.skip_backward_post_hook


class FullIterationGraphs(Graphs):
    """One graph of all forwards and backwards of a step. The first steps run without it."""

    @property
    def captured(self) -> bool:
        """See :class:`Graphs`."""
        return FullCudaGraphWrapper.cuda_graph["training"] is not None

    def renew(self, model: Sequence[torch.nn.Module], args: Any) -> None:
        """See :class:`Graphs`. The next step runs without a graph and compiles kernels. The one after it captures."""
        torch.cuda.synchronize()
        FullCudaGraphWrapper.reset_cuda_graph(None, "training")  # a method that only uses the class
        FullCudaGraphWrapper.curr_iteration["training"] = args.cuda_graph_warmup_steps - 1
        full._shared_graph_pool = None  # the pool of deleted graphs cannot be used again
        torch.cuda.empty_cache()

    def watched(self, forward_backward_func: Callable[..., Any]) -> Callable[..., Any]:
        """See :class:`Graphs`."""

        def watching(**named: Any) -> Any:
            before, started = self.captured, time.perf_counter()
            if not before:
                _gather_in_the_step(named["model"])
            result = forward_backward_func(**named)
            if self.captured and not before:
                self.seconds += time.perf_counter() - started
            return result

        return watching


def _gather_in_the_step(model: Sequence[Any]) -> None:
    """Make the next step gather the parameters even if a probe or a validation has gathered them already.

    A graph that is captured in this step must contain the gather, because every replay needs it.
    """
    for chunk in model:
        groups = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
        if chunk.ddp_config.overlap_param_gather and all(group.param_gather_handle is None for group in groups):
            chunk.reset_param_sync_dispatch_state()


def graphs_of(implementation: str) -> Graphs:
    """Return the graphs of an implementation, whose captures are timed from now on.

    This must be called before the model is built.

    Args:
        implementation: one of :data:`snip_megatron.megatron.compat.graphs.IMPLEMENTATIONS`.
    """
    if implementation == "local":
        return LocalGraphs()
    return TransformerEngineGraphs() if implementation == "transformer_engine" else FullIterationGraphs()
