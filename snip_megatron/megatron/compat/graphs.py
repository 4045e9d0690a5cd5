"""Megatron's CUDA graphs: which implementation is used, how passes run without them, and how they are captured anew.

Megatron's three implementations capture once, in the first steps, and expect that a layer always computes the same.
Deleting the graphs returns an implementation to its state before the capture.
"""

import contextlib
import copy
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core import full_cuda_graph as full
from megatron.core.distributed import DistributedDataParallel
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.transformer import cuda_graphs as core
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.module import GraphableMegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_model_config

from snip_megatron.megatron.compat.loop import random_states
from snip_megatron.megatron.compat.versions import changed, check_names

check_names(
    core,
    *("_CudagraphGlobalRecord", "delete_cuda_graphs", "_apply_cudagraph_buffer_metadata", "CudagraphBufferMetadata"),
    *("fwd_buffer_reuse_ref_count", "bwd_buffer_reuse_ref_count", "alloc_tensor_from_graph_mempool"),
)
_RECORD: Any = core._CudagraphGlobalRecord
check_names(_RECORD, "cudagraph_created", "_create_cudagraphs", "_enable_saved_tensors_observer")
check_names(core.CudaGraphManager, "global_mempool")
check_names(
    core.TECudaGraphHelper,
    *("create_cudagraphs", "delete_cuda_graphs", "graphs_created", "cuda_graph_set_manual_hooks"),
)
check_names(
    DistributedDataParallel, *("reset_param_sync_dispatch_state", "disable_forward_pre_hook", "enable_forward_pre_hook")
)
check_names(full, "_shared_graph_pool")
check_names(FullCudaGraphWrapper, "cuda_graph", "curr_iteration", "reset_cuda_graph")
check_names(GraphableMegatronModule, "_get_submodules_under_cudagraphs")
check_names(TransformerLayer, "_te_cuda_graph_replay")


def graph_implementation(args: Any) -> str | None:
    """Return the ``--cuda-graph-impl`` of validated arguments, or None if it captures no graphs."""
    implementation = getattr(args, "cuda_graph_impl", None)
    return None if implementation in (None, "none") else str(implementation)


def graphs_leave_experts_out(args: Any) -> bool:
    """Return whether the graphs that the arguments select hold only parts of layers, and no routed expert."""
    modules = getattr(args, "cuda_graph_modules", None) or []
    parts = modules and CudaGraphModule.moe not in modules
    return bool(parts) and graph_implementation(args) == "transformer_engine"


_PARTS = (CudaGraphModule.moe_router, CudaGraphModule.moe_preprocess)


def let_graphs_hold_experts(args: Any) -> None:
    """Set ``snip_graphed_experts`` of the arguments: whether graphs hold experts as soon as the map allows it.

    Megatron refuses ``moe`` among the modules of Transformer Engine's graphs, because its own experts count rows on the
    host. The modules become those parts of the layer that it allows.
    """
    modules = getattr(args, "cuda_graph_modules", None) or []
    listed = graph_implementation(args) == "transformer_engine" and CudaGraphModule.moe in modules
    args.snip_graphed_experts = bool(args.num_experts) and listed
    if args.snip_graphed_experts:
        args.cuda_graph_modules = [each for each in modules if each is not CudaGraphModule.moe] + list(_PARTS)


@contextlib.contextmanager
def graphs_bypassed(model: Sequence[torch.nn.Module], settings: Any) -> Iterator[None]:
    """Run the layers of ``model`` without graphs inside this context. Captured graphs stay, and none is recorded.

    ``grad_added_to_main_grad`` of the parameters is restored, because Transformer Engine's graphs set it only when they
    are captured. ``settings`` is the object from which the training loop reads ``cuda_graph_impl``. The configurations
    of the model have that attribute too.
    """
    layers = [m for chunk in model for m in chunk.modules() if isinstance(m, GraphableMegatronModule)]
    holders = {id(each): each for each in (settings, *map(get_model_config, model), *(m.config for m in layers))}
    with contextlib.ExitStack() as stack:
        stack.enter_context(changed(core.CudaGraphManager, __call__=_run_eagerly))
        for holder in holders.values():
            stack.enter_context(changed(holder, cuda_graph_impl="none"))
        for layer in layers:
            if getattr(layer, "cuda_graphs", None):  # all that the overlap of expert exchanges looks at
                stack.enter_context(changed(layer, cuda_graphs=[]))
        for parameter in (parameter for chunk in model for parameter in chunk.parameters()):
            if hasattr(parameter, "grad_added_to_main_grad"):
                stack.enter_context(changed(parameter, grad_added_to_main_grad=parameter.grad_added_to_main_grad))
        yield


def _run_eagerly(manager: Any, module: torch.nn.Module, args: Any, kwargs: Any, cache_key: Any = None) -> Any:
    """Run what a manager of local graphs captures: a layer, or one of its methods."""
    if manager.func is None:
        return torch.nn.Module.__call__(module, *args, **kwargs)
    return manager.func(*args, **kwargs)


def schedule_without_graph(forward_backward_func: Callable[..., Any]) -> Callable[..., Any]:
    """Return Megatron's schedule without the wrapper that captures and replays it as a whole."""
    schedule: Any = forward_backward_func
    return schedule.forward_backward_func if isinstance(schedule, FullCudaGraphWrapper) else schedule  # type: ignore[no-any-return]


class RecaptureError(Exception):
    """Graphs could not be captured again after the map had changed. The exception of the capture is the cause."""


class Graphs:
    """Base class of the graphs of one implementation in this process.

    ``accumulating`` returns the weights whose captured backward adds to ``main_grad`` itself, and returns a dummy
    gradient to autograd.
    """

    def __init__(self, accumulating: Callable[[], list[torch.nn.Parameter]]) -> None:
        self.seconds = 0.0  # of the captures since the last call of :meth:`take_seconds`
        self._accumulating = accumulating
        self._again = False  # whether the next capture replaces graphs
        self._undo = contextlib.ExitStack()

    @contextlib.contextmanager
    def _capture(self) -> Iterator[None]:
        """Raise RecaptureError if a capture that a new map has caused fails inside this context."""
        try:
            yield
        except Exception as error:
            if self._again:
                raise RecaptureError from error
            raise

    @property
    def captured(self) -> bool:
        """Whether graphs have been captured."""
        raise NotImplementedError

    def contain(self, module: torch.nn.Module) -> bool:
        """Return whether a captured graph may contain ``module``."""
        return True

    def hold(self, layers: Sequence[Any], whole: Sequence[bool]) -> None:
        """Make the next capture hold each of ``layers``, with its experts where ``whole`` is true."""
        raise NotImplementedError

    def recapture(self, model: Sequence[torch.nn.Module], args: Any) -> None:
        """Delete all graphs. They are captured again, at once or in the next steps."""
        raise NotImplementedError

    def timed(self, forward_backward_func: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward_backward_func``, wrapped to time the captures that it makes."""
        return forward_backward_func

    def take_seconds(self) -> float:
        """Return the duration of the captures since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def close(self) -> None:
        """Undo all changes of Megatron's classes."""
        self._undo.close()

    def _replace(self, owner: Any, **values: Any) -> None:
        self._undo.enter_context(changed(owner, **values))


class LocalGraphs(Graphs):
    """Megatron's own implementation, with one graph per layer and microbatch.

    One step records the order of the layers. The graphs are created in this order at the end of the step. They share a
    memory pool and pass buffers to each other, so that all of them must be captured anew together.
    """

    def __init__(self, accumulating: Callable[[], list[torch.nn.Parameter]]) -> None:
        super().__init__(accumulating)
        self._metadata: list[weakref.ref[Any]] = []  # which a recording attaches to tensors
        self._pool_uses = 0
        create, apply = _RECORD._create_cudagraphs, core._apply_cudagraph_buffer_metadata
        allocate = core.alloc_tensor_from_graph_mempool

        def timed(record: Any) -> Any:
            with self._capture():
                figures = create()
            if figures:
                self.seconds += figures["time"]
            return figures

        def remembered(tensor: Any, **named: Any) -> Any:
            metadata = apply(tensor, **named)
            self._metadata.append(weakref.ref(metadata))
            return metadata

        def counted(metadata: Any) -> Any:
            self._pool_uses += 1
            return allocate(metadata)

        self._replace(core, alloc_tensor_from_graph_mempool=counted, _apply_cudagraph_buffer_metadata=remembered)
        self._replace(_RECORD, _create_cudagraphs=classmethod(timed))

    @property
    def captured(self) -> bool:
        return bool(_RECORD.cudagraph_created)

    def recapture(self, model: Sequence[torch.nn.Module], args: Any) -> None:
        # The next step is recorded.
        self._again = True
        torch.cuda.synchronize()
        pool = core.CudaGraphManager.global_mempool  # the deletion forgets it
        for chunk in model:
            for module in chunk.modules():
                if isinstance(module, core.CudaGraphManager):
                    for runner in module.cudagraph_runners:
                        # The grad_fn of its outputs refers to it and to the layer before, in cycles of which a
                        # collection of garbage frees one layer.
                        vars(runner).clear()
                    module.cudagraph_runners.clear()
                    module.custom_cudagraphs_lookup_table.clear()
        # Tensors that outlive a step, such as rotary embeddings, would otherwise count as inputs of the old graphs.
        for metadata in filter(None, (reference() for reference in self._metadata)):
            vars(metadata).update(vars(core.CudagraphBufferMetadata()))
        self._metadata.clear()
        core.delete_cuda_graphs()
        # Each tensor that Megatron allocates from the pool adds a use of the pool, which Megatron never releases. The
        # allocator frees a pool only when it has no use.
        for _ in range(self._pool_uses):
            torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
        self._pool_uses = 0
        torch.cuda.empty_cache()
        for parameter in (parameter for chunk in model for parameter in chunk.parameters()):
            parameter.__dict__.pop("_cudagraph_wgrad_ready_event", None)
        core.fwd_buffer_reuse_ref_count = core.bwd_buffer_reuse_ref_count = 0
        # The constructor of a manager does this, and the deletion does not undo it.
        core.CudaGraphManager.global_mempool = torch.cuda.graph_pool_handle()
        _RECORD._enable_saved_tensors_observer()
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


class FullIterationGraphs(Graphs):
    """One graph of all forwards and backwards of a step. The first steps run without it."""

    _warmup = 0

    @property
    def captured(self) -> bool:
        return FullCudaGraphWrapper.cuda_graph["training"] is not None

    def recapture(self, model: Sequence[torch.nn.Module], args: Any) -> None:
        # The next step runs without a graph and compiles kernels. The one after it captures.
        self._again, self._warmup = True, args.cuda_graph_warmup_steps
        torch.cuda.synchronize()
        FullCudaGraphWrapper.reset_cuda_graph(None, "training")  # a method that only uses the class
        FullCudaGraphWrapper.curr_iteration["training"] = args.cuda_graph_warmup_steps - 1
        full._shared_graph_pool = None  # the pool of deleted graphs cannot be used again
        torch.cuda.empty_cache()

    def timed(self, forward_backward_func: Callable[..., Any]) -> Callable[..., Any]:
        def timed_schedule(**named: Any) -> Any:
            before, started = self.captured, time.perf_counter()
            if not before:
                _gather_in_the_step(named["model"])
            captures = not before and FullCudaGraphWrapper.curr_iteration["training"] == self._warmup
            with self._capture() if captures else contextlib.nullcontext():
                result = forward_backward_func(**named)
            if self.captured and not before:
                self.seconds += time.perf_counter() - started
            return result

        return timed_schedule


def _gather_in_the_step(model: Sequence[Any]) -> None:
    """Make the next step gather the parameters even if a probe or a validation has gathered them already.

    A graph that is captured in this step must contain the gather, because every replay needs it.
    """
    for chunk in model:
        groups = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
        if chunk.ddp_config.overlap_param_gather and all(group.param_gather_handle is None for group in groups):
            chunk.reset_param_sync_dispatch_state()


_WARM = 1 << 10  # warm-up steps that leave Transformer Engine one iteration of its own: kernels are compiled by then


class TransformerEngineGraphs(Graphs):
    """Transformer Engine's ``make_graphed_callables``. Layers are captured between two steps.

    A layer of experts is in its graph as a whole if the map allows it, and else without its experts. It then has a copy
    of Megatron's configuration, which says so to all that reads it in the layer.
    """

    def __init__(self, accumulating: Callable[[], list[torch.nn.Parameter]]) -> None:
        super().__init__(accumulating)
        self._helper: Any = None
        self._contained: set[int] = set()  # modules in graphs
        self._whole: dict[int, Any] = {}  # layer that is held with its experts → the configuration that all others have
        start, create = core.TECudaGraphHelper.__init__, core.TECudaGraphHelper.create_cudagraphs

        def remembered(helper: Any, *arguments: Any, **named: Any) -> None:
            start(helper, *arguments, **named)
            self._helper = helper
            self._find_contained()

        self._replace(
            core.TECudaGraphHelper, __init__=remembered, create_cudagraphs=lambda helper: self._create(helper, create)
        )
        self._replace(TransformerLayer, _te_cuda_graph_replay=self._reporting())

    def _find_contained(self) -> None:
        layers = [] if self._helper is None else self._helper.flattened_callables
        self._contained = {id(module) for parts in map(_captured_parts, layers) for module in parts}

    @property
    def captured(self) -> bool:
        return self._helper is not None and bool(self._helper.graphs_created())

    def contain(self, module: torch.nn.Module) -> bool:
        return id(module) in self._contained

    def hold(self, layers: Sequence[Any], whole: Sequence[bool]) -> None:
        for layer, is_whole in zip(layers, whole, strict=True):
            if is_whole and id(layer) not in self._whole:
                self._whole[id(layer)] = layer.config
                modules = [each for each in layer.config.cuda_graph_modules if each not in _PARTS]
                layer.config = layer.mlp.config = copy.copy(layer.config)
                layer.config.cuda_graph_modules = [*modules, CudaGraphModule.moe]
            elif not is_whole and id(layer) in self._whole:
                layer.config = layer.mlp.config = self._whole.pop(id(layer))
        self._find_contained()

    def _reporting(self) -> Callable[..., Any]:
        """Return the replay of a layer that reports the wgrads of its experts to DDP after its backward.

        Autograd does not see these weights (:func:`.gradients.report_expert_gradients`), and a graph calls no Python.
        """
        replay: Callable[..., Any] = TransformerLayer._te_cuda_graph_replay

        def report(experts: Any) -> None:
            for linear in (experts.linear_fc2, experts.linear_fc1):
                if linear.on_wgrad_complete is not None:
                    linear.on_wgrad_complete()

        def reporting(layer: Any, *args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            if id(layer) in self._whole and hidden.requires_grad:
                hidden.register_hook(lambda _: report(layer.mlp.experts))
            return replay(layer, *args, **kwargs)

        return reporting

    def _create(self, helper: Any, create: Callable[[Any], None]) -> None:
        """Run Megatron's capture of the helper's layers."""
        started = time.perf_counter()
        chunks = {name: getattr(helper, name) for name in ("num_model_chunks", "num_layers_per_chunk")}
        with _dummy_gradients_uncopied(self._accumulating()), _samples_on_the_device():
            create(helper)
        vars(helper).update(chunks)  # a capture for overlapped exchanges of experts counts every layer as a chunk
        self.seconds += time.perf_counter() - started

    def recapture(self, model: Sequence[torch.nn.Module], args: Any) -> None:
        # The capture runs at once, as it does in the training loop before the first such step.
        helper, started, before = self._helper, time.perf_counter(), self.seconds
        gathering: list[Any] = [chunk for chunk in model if getattr(chunk, "remove_forward_pre_hook_handles", None)]
        restore = random_states()
        for chunk in gathering:  # when their layers run
            chunk.disable_forward_pre_hook(param_sync=False)
        helper.delete_cuda_graphs()
        helper._capture_finished = False
        with changed(helper.config, cuda_graph_warmup_steps=_WARM):
            helper.create_cudagraphs()
        restore()
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
def _dummy_gradients_uncopied(weights: Sequence[Any]) -> Iterator[None]:
    """Make graphs that are captured inside return the dummy gradients of ``weights`` without a copy of each.

    Weights whose wgrad is delayed are marked so at all times.
    """
    with contextlib.ExitStack() as marks:
        for weight in weights:
            if not hasattr(weight, "skip_backward_post_hook"):
                weight.skip_backward_post_hook = True
                marks.callback(delattr, weight, "skip_backward_post_hook")
        yield


IMPLEMENTATIONS: dict[str, type[Graphs]] = {
    "local": LocalGraphs,
    "transformer_engine": TransformerEngineGraphs,
    "full_iteration": FullIterationGraphs,
}
"""Value of ``--cuda-graph-impl`` → its graphs. An instance, which times captures, is made before the model is built."""
