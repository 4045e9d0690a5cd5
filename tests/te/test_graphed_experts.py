"""Layers that graphs hold with their experts train as eager ones. A stand-in for a graph runs the captured function."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import cuda_graphs as core
from megatron.core.transformer.enums import CudaGraphModule
from te_models import EXPERTS, SWIGLU, dense, seeming_cuda
from torch import Tensor

from snip_megatron.layers import LinearRegistry
from snip_megatron.megatron import convert_model
from snip_megatron.megatron.compat import report_expert_gradients
from snip_megatron.megatron.compat.graphs import let_graphs_hold_experts
from snip_megatron.megatron.graphs import GraphedRun
from snip_megatron.numerics.quantize import swiglu
from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.runtime.config import SnipConfig
from tests.unit.numerics.products import emulated_grouped
from tests.unit.numerics.products.products import hopper

pytestmark = pytest.mark.usefixtures("model_parallel_of_one")
PARTS = [CudaGraphModule.attn, CudaGraphModule.moe_router, CudaGraphModule.moe_preprocess]
MODEL: dict[str, Any] = EXPERTS | SWIGLU | {
    "num_layers": 2, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2,
    "moe_router_dtype": "fp64",  # by torch, not by Transformer Engine
    "moe_token_dispatcher_type": "alltoall", "bias_activation_fusion": True, "params_dtype": torch.bfloat16,
    "bf16": True, "cuda_graph_impl": "transformer_engine",
}  # fmt: skip
BF16, FP8 = Format.BF16, Format.FP8


class Run:
    """A model in DDP whose experts' layers may be in graphs, if ``experts``."""

    def __init__(self, *, experts: bool) -> None:
        self.args = argparse.Namespace(
            cuda_graph_impl="transformer_engine", cuda_graph_modules=[CudaGraphModule.attn, CudaGraphModule.moe],
            num_experts=4, expert_model_parallel_size=1, pipeline_model_parallel_size=1,
        )  # fmt: skip
        let_graphs_hold_experts(self.args)
        assert self.args.cuda_graph_modules == PARTS
        self.args.snip_graphed_experts = experts
        chunk = dense(**MODEL, cuda_graph_modules=list(PARTS))
        self.registry: LinearRegistry = convert_model([chunk], SnipConfig(enabled=True, seed=99))
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True
        )
        with seeming_cuda():
            self.ddp = DistributedDataParallel(chunk.config, config, chunk.decoder.layers)
        report_expert_gradients([self.ddp])
        self.groups = self.ddp.bucket_groups + self.ddp.expert_parallel_bucket_groups
        self.started = 0
        for group in self.groups:
            group.start_grad_sync = self._started
        self.layers = list(chunk.decoder.layers)
        self.graphs = GraphedRun(self.args)
        self.graphs.attach(self.registry, [self.ddp])
        helper = SimpleNamespace(flattened_callables=self.layers, graphs_created=lambda: False)
        self.graphs._graphs._helper = helper  # type: ignore[union-attr]
        self.registry.context.backend = hopper(activations=swiglu, groups=emulated_grouped)

    def _started(self, **_: Any) -> None:
        self.started += 1

    def adopt(self, *formats: Format) -> None:
        names = self.registry.names
        choices = {
            f"{name}:{gemm}": fmt if "experts" in name else FP8
            for name in names
            for gemm, fmt in zip(("fprop", "dgrad", "wgrad"), formats, strict=True)
        }
        self.registry.adopt(PrecisionMap(choices=choices))
        self.graphs.recapture(0)

    def capture(self) -> None:
        for layer in self.layers:
            layer.cuda_graphs = [Graph(layer)]

    def step(self, number: int) -> list[Tensor]:
        """Train two microbatches. Returns what the layers give and their gradients."""
        draws, found = torch.Generator().manual_seed(number), []
        self.registry.start_step(number)
        self.ddp.zero_grad_buffer()
        self.started = 0
        for last in (False, True):
            hidden = torch.randn(64, 2, 128, generator=draws).bfloat16().requires_grad_()
            y = hidden
            if last:
                assert self.registry.device is not None
                self.registry.device.weights_are_current(0)
            for group in self.groups:
                group.is_last_microbatch = last
            for layer in self.layers:
                with mock.patch("torch.cuda.current_device", return_value="cpu"):  # the router asks for it
                    y, _ = layer(hidden_states=y, attention_mask=None)
            y.float().square().mean().backward()
            assert hidden.grad is not None
            found += [y.detach(), hidden.grad]
        for group in self.groups:
            group.golden_per_param_grad_ready_counts = dict(group.per_param_grad_ready_counts)
            group.per_param_grad_ready_counts, group.is_first_batch = {}, False
        self.registry.end_step()
        return found + [parameter.main_grad.clone() for layer in self.layers for parameter in layer.parameters()]


class Graph:
    """Runs a layer as a capture does. Nothing in it may tell DDP of gradients, because a graph calls no Python."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, *args: Any, is_first_microbatch: bool, **kwargs: Any) -> Any:
        names = dict(self.layer.named_parameters())
        seen = [parameter for name, parameter in names.items() if ".experts." not in name]  # that autograd sees
        return Captured.apply(self, kwargs, *args, *seen)  # type: ignore[no-untyped-call]


class Captured(torch.autograd.Function):
    """Its backward runs as one function too."""

    @staticmethod
    def forward(ctx: Any, graph: Graph, kwargs: Any, hidden: Tensor, *parameters: Tensor) -> Any:
        ctx.hidden, ctx.parameters = hidden.detach().requires_grad_(), parameters
        with capturing(), torch.enable_grad():
            ctx.outputs = graph.layer._te_cuda_graph_capture(ctx.hidden, **kwargs)
        return tuple(each.detach() for each in ctx.outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with capturing(), torch.enable_grad():
            torch.autograd.backward(ctx.outputs, gradients)
        found = [parameter.grad for parameter in ctx.parameters]
        for parameter in ctx.parameters:
            parameter.grad = None
        return None, None, ctx.hidden.grad, *found


@contextmanager
def capturing() -> Iterator[None]:
    core._set_capture_start()
    try:
        yield
    finally:
        core._set_capture_end()


@pytest.mark.parametrize("wgrad", [BF16, FP8])
def test_layers_in_graphs_train_as_eager_ones(wgrad: Format, capsys: pytest.CaptureFixture[str]) -> None:
    eager, graphed = Run(experts=False), Run(experts=True)
    for run in (eager, graphed):
        run.adopt(FP8, FP8, wgrad)
    assert "snip: CUDA graphs hold the experts of 2 of 2 layers\n" in capsys.readouterr().out
    assert all(layer.config.cuda_graph_modules == PARTS for layer in eager.layers)
    assert all(CudaGraphModule.moe in layer.config.cuda_graph_modules for layer in graphed.layers)
    known, first = eager.step(0), graphed.step(0)
    graphed.capture()
    for found in (first, graphed.step(0)):
        assert all(torch.equal(*pair) for pair in zip(known, found, strict=True))
    assert graphed.started == len(graphed.groups), "DDP hears of all gradients"
    graphed.graphs.close()
