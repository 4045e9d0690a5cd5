"""Megatron's CUDA graphs: which implementation is used, how passes run without them, and how they are captured anew.

Megatron's three implementations capture once, in the first steps, and expect that a layer always computes the same.
Deleting the graphs returns an implementation to its state before the capture. The names of Megatron that this module
and :mod:`snip_megatron.megatron.compat.te_graphs` use are checked when this module is imported.
"""

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import full_cuda_graph as full
from megatron.core.distributed import DistributedDataParallel
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.transformer import cuda_graphs as core
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.module import GraphableMegatronModule
from megatron.core.utils import get_model_config

from snip_megatron.megatron.compat.versions import changed, check_names

check_names(
    core,
    *("_CudagraphGlobalRecord", "delete_cuda_graphs", "_apply_cudagraph_buffer_metadata", "CudagraphBufferMetadata"),
    *("fwd_buffer_reuse_ref_count", "bwd_buffer_reuse_ref_count"),
)
_RECORD: Any = core._CudagraphGlobalRecord
check_names(_RECORD, "cudagraph_created", "_create_cudagraphs", "_enable_saved_tensors_observer")
check_names(core.CudaGraphManager, "global_mempool")
check_names(
    core.TECudaGraphHelper,
    *("create_cudagraphs", "delete_cuda_graphs", "graphs_created", "cuda_graph_set_manual_hooks"),
)
check_names(
    DistributedDataParallel,
    *("reset_param_sync_dispatch_state", "disable_forward_pre_hook", "enable_forward_pre_hook"),
)
check_names(full, "_shared_graph_pool")
check_names(FullCudaGraphWrapper, "cuda_graph", "curr_iteration", "reset_cuda_graph")
check_names(GraphableMegatronModule, "_get_submodules_under_cudagraphs")


def graph_implementation(args: Any) -> str | None:
    """Return the ``--cuda-graph-impl`` of validated arguments, or None if it captures no graphs."""
    found = getattr(args, "cuda_graph_impl", None)
    return None if found in (None, "none") else str(found)


def graphs_leave_experts_out(args: Any) -> bool:
    """Return whether the graphs that the arguments select hold parts of layers alone, and no routed expert."""
    modules = getattr(args, "cuda_graph_modules", None) or []
    parts = modules and CudaGraphModule.moe not in modules
    return bool(parts) and graph_implementation(args) == "transformer_engine"


@contextlib.contextmanager
def graphs_bypassed(model: Sequence[torch.nn.Module], settings: Any) -> Iterator[None]:
    """Run the layers of ``model`` without graphs inside this context. Captured graphs are kept, and none is recorded.

    The parameters keep their ``grad_added_to_main_grad``, because Transformer Engine's graphs set it only when they are
    captured. ``settings`` is what the training loop asks for ``cuda_graph_impl``, beside the configurations of the
    model.
    """
    layers = [m for chunk in model for m in chunk.modules() if isinstance(m, GraphableMegatronModule)]
    holders = {id(each): each for each in (settings, *map(get_model_config, model), *(m.config for m in layers))}
    with contextlib.ExitStack() as stack:
        stack.enter_context(changed(core.CudaGraphManager, __call__=_run_eagerly))
        for holder in holders.values():
            stack.enter_context(changed(holder, cuda_graph_impl="none"))
        for layer in layers:
            if getattr(layer, "cuda_graphs", None):  # the overlap of experts' exchanges asks for nothing else
                stack.enter_context(changed(layer, cuda_graphs=[]))
        for parameter in parameters(model):
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
    if isinstance(forward_backward_func, FullCudaGraphWrapper):
        inner: Callable[..., Any] = forward_backward_func.forward_backward_func
        return inner
    return forward_backward_func


def parameters(model: Sequence[torch.nn.Module]) -> Iterator[Any]:
    for chunk in model:
        yield from chunk.parameters()


class Graphs:
    """Base class of the graphs of one implementation in this process.

    ``seconds`` are those of the captures since the last call of :meth:`take`.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._undo = contextlib.ExitStack()

    @property
    def captured(self) -> bool:
        """Whether graphs have been captured."""
        raise NotImplementedError

    def hold(self, module: torch.nn.Module) -> bool:
        """Return whether a captured graph may hold ``module``. The experts of dropless routing are in none."""
        return True

    def choose(self, changed: Sequence[torch.nn.Module]) -> list[torch.nn.Module] | None:
        """Return the layers to capture anew when linears have changed their formats, or None for all. Collective."""
        return None

    def renew(
        self, model: Sequence[torch.nn.Module], args: Any, layers: Sequence[torch.nn.Module] | None = None
    ) -> None:
        """Delete graphs. They are captured again under the map in force, at once or in the next steps.

        ``layers`` is what :meth:`choose` returned.
        """
        raise NotImplementedError

    def accumulating(self, weights: Callable[[], list[torch.nn.Parameter]]) -> None:
        """Set the function that returns, at every capture, the weights whose backward adds to ``main_grad`` itself.

        Such a backward returns a dummy gradient to autograd. Only Transformer Engine's graphs need them.
        """

    def watched(self, forward_backward_func: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward_backward_func``, wrapped to time the captures that it makes."""
        return forward_backward_func

    def take(self) -> tuple[float, Mapping[str, Any]]:
        """Return the duration of the captures since the last call, with further fields of the event, and reset it."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds, {}

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
        apply = core._apply_cudagraph_buffer_metadata

        def noted(tensor: Any, **named: Any) -> Any:
            metadata = apply(tensor, **named)
            self._metadata.append(weakref.ref(metadata))
            return metadata

        self._metadata: list[weakref.ref[Any]] = []  # what a recording has noted at tensors
        self._replace(core, "_apply_cudagraph_buffer_metadata", noted)

    @property
    def captured(self) -> bool:
        return bool(_RECORD.cudagraph_created)

    def renew(
        self, model: Sequence[torch.nn.Module], args: Any, layers: Sequence[torch.nn.Module] | None = None
    ) -> None:
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
        for metadata in filter(None, (noted() for noted in self._metadata)):
            vars(metadata).update(vars(core.CudagraphBufferMetadata()))
        self._metadata.clear()
        core.fwd_buffer_reuse_ref_count = core.bwd_buffer_reuse_ref_count = 0
        # The constructor of a manager does this, and the deletion does not undo it.
        core.CudaGraphManager.global_mempool = torch.cuda.graph_pool_handle()
        _RECORD._enable_saved_tensors_observer()
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


class FullIterationGraphs(Graphs):
    """One graph of all forwards and backwards of a step. The first steps run without it."""

    @property
    def captured(self) -> bool:
        return FullCudaGraphWrapper.cuda_graph["training"] is not None

    def renew(
        self, model: Sequence[torch.nn.Module], args: Any, layers: Sequence[torch.nn.Module] | None = None
    ) -> None:
        """See :class:`Graphs`. The next step runs without a graph and compiles kernels. The one after it captures."""
        torch.cuda.synchronize()
        FullCudaGraphWrapper.reset_cuda_graph(None, "training")  # a method that only uses the class
        FullCudaGraphWrapper.curr_iteration["training"] = args.cuda_graph_warmup_steps - 1
        full._shared_graph_pool = None  # the pool of deleted graphs cannot be used again
        torch.cuda.empty_cache()

    def watched(self, forward_backward_func: Callable[..., Any]) -> Callable[..., Any]:
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
