"""Beside Megatron's CUDA graphs, and back: what can be seen without a GPU; the graphs themselves: ``tests/gpu``."""

import argparse
from typing import Any

import pytest
import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.transformer.cuda_graphs import CudaGraphManager, _CudagraphGlobalRecord
from megatron.core.transformer.module import GraphableMegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from snip_megatron.megatron import compat


class Layer(GraphableMegatronModule):  # type: ignore[misc]
    """Megatron's own dispatch between graph and Python, over a weight."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def manager(func: Any = None) -> CudaGraphManager:
    """A manager of local graphs, whose ``__init__`` needs a GPU."""
    found = CudaGraphManager.__new__(CudaGraphManager)
    torch.nn.Module.__init__(found)
    found.func = func
    return found


class Chunk(torch.nn.Module):
    def __init__(self, implementation: str) -> None:
        super().__init__()
        self.config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
        self.layer = Layer(self.config)
        self.config.cuda_graph_impl = implementation
        if implementation == "local":
            self.layer.cudagraph_manager = manager()
        if implementation == "transformer_engine":
            self.layer.cuda_graphs = [lambda *args, **kwargs: "replayed"]
            self.layer.cuda_graph_manual_hooks = []


@pytest.fixture
def args() -> argparse.Namespace:
    return argparse.Namespace(cuda_graph_impl="full_iteration", cuda_graph_warmup_steps=3)


# -- beside the graphs -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_layers_run_their_python_beside_their_graphs(
    args: argparse.Namespace, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaGraphManager, "__call__", lambda *args, **kwargs: "replayed")
    chunk = Chunk(implementation)
    x = torch.eye(4)
    assert chunk.layer(x) == "replayed"
    with compat.graphs_bypassed([chunk], args):
        assert torch.equal(chunk.layer(x), chunk.layer.weight)
        assert not getattr(chunk.layer, "cuda_graphs", None)  # the overlap of experts' exchanges looks nowhere else
        assert args.cuda_graph_impl == chunk.config.cuda_graph_impl == "none"  # the schedule and evaluate() look there
        assert manager(lambda x, y: x - y)(None, (3,), {"y": 1}) == 2  # a part of a layer with experts
    assert chunk.layer(x) == "replayed"
    assert (args.cuda_graph_impl, chunk.config.cuda_graph_impl) == ("full_iteration", implementation)


def test_marks_of_accumulated_gradients_survive_a_probe(args: argparse.Namespace) -> None:
    """Transformer Engine's graphs set them once, when they are captured."""
    chunk = Chunk("transformer_engine")
    weight: Any = chunk.layer.weight
    for mark in (True, False):
        weight.grad_added_to_main_grad = mark
        with compat.graphs_bypassed([chunk], args):
            weight.grad_added_to_main_grad = not mark
        assert weight.grad_added_to_main_grad is mark


# -- captures that fail ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("implementation", ["local", "full_iteration"])
def test_a_capture_that_fails_says_whether_a_map_has_caused_it(
    args: argparse.Namespace, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU Megatron's own captures fail."""
    monkeypatch.setattr(FullCudaGraphWrapper, "curr_iteration", {"training": args.cuda_graph_warmup_steps})
    monkeypatch.setattr(_CudagraphGlobalRecord, "cudagraph_record", [(torch.nn.Linear(1, 1), "fwd")])
    graphs = compat.IMPLEMENTATIONS[implementation]()

    def capture(model: Any) -> None:
        if implementation == "local":
            _CudagraphGlobalRecord.create_cudagraphs()
        torch.cuda.CUDAGraph().capture_begin()

    try:
        with pytest.raises((RuntimeError, ValueError)) as own:
            graphs.timed(capture)(model=[])
        with pytest.raises((AssertionError, RuntimeError)):  # at the device
            graphs.recapture([], args)
        with pytest.raises(compat.RecaptureError) as caused:
            graphs.timed(capture)(model=[])
        assert repr(caused.value.__cause__) == repr(own.value)
    finally:
        graphs.close()
