"""Megatron's CUDA graphs: which implementation is used, and how passes run without its graphs.

The names of Megatron that this module, :mod:`snip_megatron.megatron.compat.recapture` and
:mod:`snip_megatron.megatron.compat.te_graphs` use are checked when this module is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import megatron.training.training as training
import torch
from megatron.core import full_cuda_graph as full
from megatron.core.distributed import DistributedDataParallel
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.transformer import cuda_graphs as core
from megatron.core.transformer.module import GraphableMegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_model_config
from megatron.training import get_args

from snip_megatron.errors import SnipError

IMPLEMENTATIONS = ("local", "transformer_engine", "full_iteration")
"""Values of ``--cuda-graph-impl`` that capture graphs."""

_RECORD: Any = getattr(core, "_CudagraphGlobalRecord", None)
_CREATION = ("cudagraph_created", "_create_cudagraphs", "_enable_saved_tensors_observer")
_HOOKS = ("disable_forward_pre_hook", "enable_forward_pre_hook", "should_disable_forward_pre_hook")
_EXPECTED: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (core, "cuda_graphs", ("delete_cuda_graphs", "CudaGraphManager", "TECudaGraphHelper")),
    (_RECORD, "_CudagraphGlobalRecord", _CREATION),
    (core.CudaGraphManager, "CudaGraphManager", ("global_mempool",)),
    (core.TECudaGraphHelper, "TECudaGraphHelper", ("create_cudagraphs", "delete_cuda_graphs", "graphs_created")),
    (core.TECudaGraphHelper, "TECudaGraphHelper", ("cuda_graph_set_manual_hooks",)),
    (TransformerLayer, "TransformerLayer", ("get_layer_static_inputs",)),
    (core, "cuda_graphs", ("_apply_cudagraph_buffer_metadata", "CudagraphBufferMetadata")),
    (core, "cuda_graphs", ("fwd_buffer_reuse_ref_count", "bwd_buffer_reuse_ref_count")),
    (DistributedDataParallel, "DistributedDataParallel", ("reset_param_sync_dispatch_state",)),
    (full, "full_cuda_graph", ("_shared_graph_pool",)),
    (FullCudaGraphWrapper, "FullCudaGraphWrapper", ("cuda_graph", "curr_iteration", "reset_cuda_graph")),
    (GraphableMegatronModule, "GraphableMegatronModule", ("_should_call_local_cudagraph",)),
    (training, "training", _HOOKS),
)  # fmt: skip
_ATTRIBUTES = (
    "pp_group", "config", "flattened_callables", "callables_per_chunk", "num_layers_per_chunk",
    "flattened_callables_is_mtp", "callables_per_chunk_is_mtp", "_capture_finished",
)  # fmt: skip
_MADE = (core.TECudaGraphHelper.__init__, core.TECudaGraphHelper._discover_layers)
for _name in _ATTRIBUTES:  # of the object, so that the class does not have them
    if not any(_name in function.__code__.co_names for function in _MADE):
        raise SnipError(f"Megatron's TECudaGraphHelper no longer has {_name}: CUDA graphs cannot be captured anew")
for _owner, _where, _names in _EXPECTED:
    for _name in _names:
        if not hasattr(_owner, _name):
            raise SnipError(f"Megatron's {_where} no longer has {_name}: CUDA graphs cannot be captured anew")


def graph_implementation(args: Any) -> str | None:
    """Return which of :data:`IMPLEMENTATIONS` the arguments select, or None. Deprecated arguments count as well."""
    found = getattr(args, "cuda_graph_impl", None)
    if getattr(args, "enable_cuda_graph", False):
        found = "local"
    if getattr(args, "external_cuda_graph", False):
        found = "transformer_engine"
    return None if found in (None, "none") else str(found)


@contextlib.contextmanager
def graphs_bypassed(model: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Run the layers of ``model`` without graphs inside this context. Captured graphs are kept, and none is recorded.

    The parameters keep their ``grad_added_to_main_grad``, because Transformer Engine's graphs set it only when they are
    captured.
    """
    args = get_args()
    layers = [m for chunk in model for m in chunk.modules() if isinstance(m, GraphableMegatronModule)]
    holders = {id(config): config for config in (args, *map(get_model_config, model), *(m.config for m in layers))}
    before = [(holder, holder.cuda_graph_impl) for holder in holders.values()]
    marks = [(p, p.grad_added_to_main_grad) for p in parameters(model) if hasattr(p, "grad_added_to_main_grad")]
    try:
        for holder, _ in before:
            holder.cuda_graph_impl = "none"
        for layer in layers:
            layer._should_call_local_cudagraph = _never
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("_should_call_local_cudagraph", None)
        for holder, value in before:
            holder.cuda_graph_impl = value
        for parameter, mark in marks:
            parameter.grad_added_to_main_grad = mark


def schedule_without_graph(forward_backward_func: Callable[..., Any]) -> Callable[..., Any]:
    """Return Megatron's schedule without the wrapper that captures and replays it as a whole."""
    if isinstance(forward_backward_func, FullCudaGraphWrapper):
        inner: Callable[..., Any] = forward_backward_func.forward_backward_func
        return inner
    return forward_backward_func


def parameters(model: Sequence[torch.nn.Module]) -> Iterator[Any]:
    """Yield the parameters of all model chunks."""
    for chunk in model:
        yield from chunk.parameters()


def _never(*args: Any, **kwargs: Any) -> bool:
    return False
