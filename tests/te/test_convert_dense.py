"""Conversion of Transformer Engine's linears in a built decoder: names, layout of checkpoints, figures of torch."""

import pytest
import torch

pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)

import transformer_engine.pytorch as te
from megatron.core.models.gpt.gpt_model import GPTModel
from small_decoder import identity
from te_models import Ignored, dense, seeming_cuda
from torch.nn import functional

from snip_megatron.layers import LinearRegistry
from snip_megatron.megatron import convert_model, te_linears
from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.runtime.config import SnipConfig

pytestmark = pytest.mark.usefixtures("model_parallel_of_one")

CONFIG = SnipConfig(enabled=True, seed=99)
CLASSES = {
    "self_attention.linear_qkv": te_linears.SnipTELayerNormColumnParallelLinear,
    "self_attention.linear_proj": te_linears.SnipTERowParallelLinear,
    "mlp.linear_fc1": te_linears.SnipTELayerNormColumnParallelLinear,
    "mlp.linear_fc2": te_linears.SnipTERowParallelLinear,
}


def under(chunk: GPTModel, fmt: Format) -> LinearRegistry:
    registry = convert_model([chunk], CONFIG)
    registry.adopt(PrecisionMap.uniform(registry.names, fmt))
    return registry


def test_the_stock_module_keeps_all_but_its_class() -> None:
    chunk = dense()
    before = identity(chunk)
    registry = convert_model([chunk], CONFIG)
    assert identity(chunk) == before
    for layer in (0, 1):
        for path, cls in CLASSES.items():
            module = chunk.decoder.layers[layer].get_submodule(path)
            assert type(module) is cls
            assert module.snip is registry[f"decoder.layers.{layer}.{path}"]
            assert module.snip.is_stock
    assert len(registry) == 8
    assert any(key.endswith("linear_qkv._extra_state") for key in chunk.state_dict())


def test_transformer_engine_s_own_classes_of_several_weights_stay_bf16_and_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A whole MLP, groups of which a token meets one, and a linear whose weight is in parts."""
    chunk = dense()
    layer = chunk.decoder.layers[1]
    with seeming_cuda():
        layer.mlp = te.LayerNormMLP(64, 96, activation="swiglu", bias=False, device="cpu")
        layer.self_attention.side = te.GroupedLinear(3, 64, 32, bias=False, device="cpu")
        layer.self_attention.parts = te.Linear(64, 96, parameters_split=("q", "k"), bias=False, device="cpu")
    registry = convert_model([chunk], CONFIG)
    assert {row.id.path: (row.n, row.k, row.experts, row.flops, row.role) for row in registry.uncovered} == {
        "mlp.fc1": (192, 64, 1, 2.0 * 192 * 64, "reads"),
        "mlp.fc2": (64, 96, 1, 2.0 * 64 * 96, "writes"),
        "self_attention.side": (32, 64, 3, 2.0 * 32 * 64, "reads"),
        "self_attention.parts": (96, 64, 1, 2.0 * 96 * 64, "reads"),
    }
    assert len(registry) == 6
    said = capsys.readouterr().out
    for path, kind in (("mlp.fc1", "LayerNormMLP"), ("self_attention.side", "GroupedLinear")):
        assert f"decoder.layers.*.{path} of 1 layers stays bf16 (no quantised form of {kind})" in said


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm_and_linear_are_those_of_torch(normalization: str, zero_centered: bool) -> None:
    """Under an override all three GEMMs run in bf16 by SNIP's own code; parameters and gradients are FP32."""
    chunk = dense(normalization=normalization, layernorm_zero_centered_gamma=zero_centered, add_bias_linear=True)
    registry = convert_model([chunk], CONFIG)
    linear = chunk.decoder.layers[0].mlp.linear_fc1
    registry.context.probing, linear.snip.state.recorder = True, Ignored()
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    x = torch.randn(8, 2, 64, requires_grad=True)
    y, bias = linear(x)
    assert bias is linear.bias
    y.square().sum().backward()
    actual = [x.grad, *(p.grad for p in linear.parameters() if p is not bias)]

    gamma = linear.layer_norm_weight + float(zero_centered)
    leaf = x.detach().requires_grad_()
    normed = (
        functional.rms_norm(leaf, (64,), gamma, linear.eps)
        if normalization == "RMSNorm"
        else functional.layer_norm(leaf, (64,), gamma, linear.layer_norm_bias, linear.eps)
    )
    expected = functional.linear(normed, linear.weight)
    torch.testing.assert_close(y, expected)
    reference = [leaf, *(p for p in linear.parameters() if p is not bias)]
    for mine, theirs in zip(actual, torch.autograd.grad(expected.square().sum(), reference), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("of_ddp", "wgrad"), [(False, Format.FP8), (True, Format.FP8), (True, Format.BF16)])
def test_a_delayed_wgrad_runs_when_it_is_called_for(of_ddp: bool, wgrad: Format) -> None:
    """Two microbatches forward, two backward, as in a pipeline; then the calls, in the same order.

    In bf16, the operands are X and G themselves, and the calls come outside of any backward.
    """
    gradients = []
    for delay in (False, True):
        chunk = dense(delay_wgrad=delay, add_bias_linear=True)
        registry = convert_model([chunk], CONFIG)
        name = "decoder.layers.0.mlp.linear_fc2"
        registry.adopt(PrecisionMap({f"{name}:fprop": Format.FP8, f"{name}:dgrad": Format.FP8, f"{name}:wgrad": wgrad}))
        registry.start_step(0)
        linear = chunk.decoder.layers[0].mlp.linear_fc2
        if of_ddp:
            linear.weight.main_grad = torch.zeros_like(linear.weight)
            linear.weight.grad_added_to_main_grad = False
        generator = torch.Generator().manual_seed(5)
        xs = [torch.randn(8, 2, 96, generator=generator, requires_grad=True) for _ in range(2)]
        for y in [linear(x)[0] for x in xs]:
            y.square().sum().backward()
        if delay:
            assert (linear.weight.grad is not None) == of_ddp  # a placeholder, without which no graph can be captured
            for _ in range(2):
                linear.backward_dw()
        gradients.append([linear.weight.main_grad if of_ddp else linear.weight.grad, *(x.grad for x in xs)])
    for immediate, delayed in zip(*gradients, strict=True):
        assert torch.equal(immediate, delayed)
        assert not delayed.requires_grad
