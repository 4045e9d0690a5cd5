"""Conversion of Transformer Engine's grouped experts in a built decoder: names, layout of checkpoints, figures."""

import contextlib
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from small_decoder import identity
from te_models import EXPERTS, SWIGLU, Ignored, dense, seeming_cuda
from torch import Tensor
from torch.nn import functional

from snip_megatron.layers import LinearRegistry
from snip_megatron.megatron import convert_model, te_linears
from snip_megatron.megatron.compat import report_expert_gradients
from snip_megatron.numerics.quantize import operands, swiglu
from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.runtime.config import SnipConfig
from tests.unit.numerics.products import emulated_grouped
from tests.unit.numerics.products.products import hopper

pytestmark = pytest.mark.usefixtures("model_parallel_of_one")

CONFIG = SnipConfig(enabled=True, seed=99)
NAMES = ["mlp.experts.linear_fc1", "mlp.experts.linear_fc2"]


def converted(fmt: Format = Format.BF16, **changes: Any) -> tuple[GPTModel, LinearRegistry]:
    chunk = dense(**(EXPERTS | changes))
    registry = convert_model([chunk], CONFIG)
    registry.adopt(PrecisionMap.uniform(registry.names, fmt))
    return chunk, registry


def test_the_stock_modules_keep_all_but_their_class() -> None:
    chunk = dense(**EXPERTS)
    before = identity(chunk)
    registry = convert_model([chunk], CONFIG)
    assert identity(chunk) == before
    experts = chunk.decoder.layers[0].mlp.experts
    assert type(experts) is te_linears.SnipTEGroupedMLP
    assert type(experts.linear_fc1) is te_linears.SnipTEColumnParallelGroupedLinear
    assert type(experts.linear_fc2) is te_linears.SnipTERowParallelGroupedLinear
    assert [handle.weight for handle in experts.linear_fc2.snip_experts] == [
        getattr(experts.linear_fc2, f"weight{e}") for e in range(4)
    ]
    assert registry.names[2:4] == [f"decoder.layers.0.{name}" for name in NAMES]
    assert [(row.n, row.k, row.experts, row.active) for row in registry.rows[2:4]] == [
        (256, 128, 4, 2),
        (128, 128, 4, 2),
    ]


def mlp(experts: Any, x: Tensor, splits: list[int], probs: Tensor) -> Tensor:
    """The MLP of every expert by torch, with biases."""
    result = []
    for e, (rows, p) in enumerate(zip(x.split(splits), probs.split(splits), strict=True)):
        fc1, fc2 = (
            [getattr(linear, f"{kind}{e}") for kind in ("weight", "bias")]
            for linear in (experts.linear_fc1, experts.linear_fc2)
        )
        gate, up = (rows @ fc1[0].t() + (fc1[1] if len(fc1[1]) else 0)).chunk(2, dim=-1)
        hidden = (functional.silu(gate) * up * p[:, None]).to(x.dtype)
        result.append(hidden @ fc2[0].t() + (fc2[1] * p[:, None] if len(fc2[1]) else 0))
    return torch.cat(result)


@pytest.mark.parametrize("bias", [False, True])
def test_experts_are_those_of_torch(bias: bool) -> None:
    """A probe runs all GEMMs unquantised by SNIP's own code; parameters and gradients are FP32."""
    chunk, registry = converted(add_bias_linear=bias)
    experts = chunk.decoder.layers[0].mlp.experts
    registry.context.probing = True
    for handle in registry:
        handle.state.recorder = Ignored()
    with torch.no_grad():
        for name, parameter in experts.named_parameters():
            if "bias" in name:
                parameter.normal_()
    splits = [5, 0, 130, 3]
    x, probs = torch.randn(138, 128, requires_grad=True), torch.rand(138)
    y, _ = experts(x, torch.tensor(splits), probs)
    expected = mlp(experts, x, splits, probs)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(y)
    parameters = [x, *experts.parameters()]
    for actual, exact in zip(
        torch.autograd.grad(y, parameters, weight), torch.autograd.grad(expected, parameters, weight), strict=True
    ):
        torch.testing.assert_close(actual, exact, rtol=1e-4, atol=1e-4)


class Noting:
    """The functions of ``quantize/swiglu.py``, which note what they are asked for."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.called.append(name)
        return getattr(swiglu, name)


def in_memory(experts: Any, *, backwards: bool) -> None:
    """Lay the weights of each linear out one after the other, and give them gradients that lie so too."""
    for linear in (experts.linear_fc1, experts.linear_fc2):
        weights = list(linear.parameters())
        memory = torch.empty(4, *weights[0].shape, dtype=torch.bfloat16)
        gradients = torch.zeros(4, *weights[0].shape)
        for place, gradient, weight in zip(memory, gradients, weights[:: -1 if backwards else 1], strict=True):
            weight.data = place.copy_(weight.data)
            weight.main_grad, weight.grad_added_to_main_grad = gradient, False


@pytest.mark.parametrize(("backwards", "fused"), [(False, False), (True, False), (False, True), (True, True)])
def test_rows_are_padded_once_an_mlp(backwards: bool, fused: bool) -> None:
    """Grouped kernels need multiples of 128 rows. Weights in memory from the last expert on get rows in that order."""
    chunk, registry = converted(Format.FP8, params_dtype=torch.bfloat16, bias_activation_fusion=fused, **SWIGLU)
    for handle in registry:
        handle.state.formats = (Format.FP8, Format.FP8, Format.FP8)
    experts, activations = chunk.decoder.layers[0].mlp.experts, Noting()
    registry.context.backend = hopper(activations=activations, groups=emulated_grouped)
    in_memory(experts, backwards=backwards)
    splits = [5, 0, 130, 3]
    x, probs = torch.randn(138, 128).bfloat16().requires_grad_(), torch.rand(138, requires_grad=True)
    y, _ = experts(x, torch.tensor(splits), probs)
    assert y.shape == (138, 128)
    expected = mlp(experts, x, splits, probs)
    weight = torch.randn_like(y)
    exact = torch.autograd.grad(expected, [x, probs, *experts.parameters()], weight)
    y.backward(weight)
    result = [x.grad, probs.grad, *(parameter.main_grad for parameter in experts.parameters())]
    for actual, real in zip((y, *result), (expected, *exact), strict=True):
        assert actual is not None
        assert (actual.float() - real.float()).norm() <= 0.1 * real.float().norm()
    assert activations.called == (["quantize_swiglu", "quantize_swiglu_gradient"] if fused else [])


def test_weights_are_quantised_while_the_host_would_wait_for_numbers_of_rows() -> None:
    chunk, registry = converted(Format.FP8, params_dtype=torch.bfloat16, bias_activation_fusion=True, **SWIGLU)
    layer, calls = chunk.decoder.layers[0].mlp, []
    for handle in registry:
        handle.state.formats = (Format.FP8, Format.FP8, Format.BF16)

    class Quantizers:
        quantize_operands = staticmethod(operands.quantize_operands)

        @staticmethod
        def quantize_group_blocks(w: Tensor, spec: Any, cached: Any) -> Any:
            calls.append("weights")
            return operands.quantize_group_blocks(w, spec, cached)

    registry.context.backend = hopper(Quantizers, activations=swiglu, groups=emulated_grouped)
    in_memory(layer.experts, backwards=True)
    x, probs, routes = torch.randn(64, 128).bfloat16(), torch.rand(64, 4), torch.rand(64, 4) < 0.5
    layer.token_dispatcher.routing_map = routes
    rows, of_rows = (
        torch.cat([each[chosen] for each, chosen in zip(of, routes.t(), strict=True)]) for of in ([x] * 4, probs.t())
    )
    with mock.patch("torch.Tensor.cpu", lambda numbers: calls.append("numbers") or numbers):
        y, _ = layer.routed_experts_compute(x, probs)
    assert calls == ["weights", "weights", "numbers"]
    again, _ = layer.experts(rows, routes.sum(0), of_rows)
    assert calls == ["weights", "weights", "numbers"]
    assert torch.equal(y, layer.token_dispatcher.combine_preprocess(again))


def test_a_delayed_wgrad_is_told_to_ddp_when_megatron_calls_for_it() -> None:
    chunk, _ = converted(Format.FP8)
    linear, calls = chunk.decoder.layers[0].mlp.experts.linear_fc1, []
    linear.snip_experts = [replace(handle, delays=True) for handle in linear.snip_experts]
    linear.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append(True))
    y, _ = linear(torch.randn(9, 128, requires_grad=True), [4, 0, 5, 0])
    y.sum().backward()
    assert not calls
    linear.backward_dw()
    assert calls == [True]
    assert linear.weight0.grad is not None


@pytest.mark.parametrize("overlaps", [False, True])
def test_ddp_reduces_gradients_that_autograd_does_not_pass(overlaps: bool) -> None:
    """The real DDP, over one rank for two steps of two microbatches. It learns in the first step what to wait for."""
    by_autograd, by_hook = (steps_under_ddp(overlaps=overlaps, tells=tells) for tells in (False, True))
    assert all(torch.equal(*pair) for pair in zip(by_autograd, by_hook, strict=True))


def steps_under_ddp(*, overlaps: bool, tells: bool) -> list[Tensor]:
    """Return the gradients of the weights of experts, after DDP has started their reduction once if it ``overlaps``."""
    config = DistributedDataParallelConfig(overlap_grad_reduce=overlaps, grad_reduce_in_fp32=True)
    chunk, _ = converted(Format.FP8, params_dtype=torch.bfloat16)
    with seeming_cuda():
        ddp = DistributedDataParallel(chunk.config, config, chunk.decoder.layers[0].mlp.experts)
    if tells:
        report_expert_gradients([ddp])
    started: list[bool] = []
    groups = ddp.bucket_groups + ddp.expert_parallel_bucket_groups
    for group in groups:
        group.start_grad_sync = lambda **_: started.append(True)  # type: ignore[method-assign]
    draws = torch.Generator().manual_seed(3)
    for _ in range(2):
        ddp.zero_grad_buffer()
        for last in (False, True):
            with contextlib.nullcontext() if last else ddp.no_sync():
                x = torch.randn(138, 128, generator=draws).bfloat16().requires_grad_()
                y, _ = ddp(x, torch.tensor([5, 0, 130, 3]), torch.rand(138, generator=draws))
                y.float().square().sum().backward()
        for group in groups if overlaps else ():
            group.golden_per_param_grad_ready_counts = dict(group.per_param_grad_ready_counts)
            group.per_param_grad_ready_counts, group.is_first_batch = {}, False
    assert len(started) == (1 if overlaps else 0)
    assert all(parameter.grad is None for parameter in ddp.parameters())
    return [parameter.main_grad.clone() for parameter in ddp.parameters()]
