"""``--snip-blame`` of Megatron's own FP8: what goes into Transformer Engine's linears and comes out is compared.

Their GEMMs need a GPU (tests/gpu/test_blame_gpu.py). Here a forward in plain torch stands for them.
"""

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)

import transformer_engine.pytorch as te
from te_models import dense

from snip_megatron.layers.context import Override
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.megatron import convert_model
from snip_megatron.megatron.blame import host_job
from snip_megatron.megatron.compat.transformer_engine import normalized
from snip_megatron.numerics.products.host_recipe import HostRecipe
from snip_megatron.precision import Gemm
from snip_megatron.runtime.blame_passes import Job
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.gemm_check import KernelCheck

pytestmark = pytest.mark.usefixtures("model_parallel_of_one")
ARGUMENTS = argparse.Namespace(
    num_layers=2, first_last_layers_bf16=False, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1
)
NAMES = ("mlp.linear_fc1", "mlp.linear_fc2")


def cast(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """FP8 numbers of a tensor by torch's own cast."""
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-limit, limit).to(dtype).float() / scale


class StandIn(torch.autograd.Function):
    """The three GEMMs of a linear with one scale a tensor, and gradients in E5M2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: Any) -> Tensor:
        ctx.module, ctx.weight, shape = module, weight, x.shape
        x = x.reshape(-1, shape[-1])
        scales = scales_of(module, "scaling_fwd", [x, weight], 448.0)
        ctx.x, ctx.w = (cast(t, torch.float8_e4m3fn, scale) for t, scale in zip((x, weight), scales, strict=True))
        ctx.shape = shape
        return damage(module, "fprop", ctx.x @ ctx.w.t()).to(weight.dtype).view(*shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None]:
        g = grad_outputs[0].reshape(-1, grad_outputs[0].shape[-1])
        (scale,) = scales_of(ctx.module, "scaling_bwd", [g], 57344.0)
        g = cast(g, torch.float8_e5m2, scale)
        d = damage(ctx.module, "dgrad", g @ ctx.w).to(ctx.weight.dtype).view(ctx.shape)
        wgrad = damage(ctx.module, "wgrad", g.t() @ ctx.x)
        if ctx.module.fuse_wgrad_accumulation:
            ctx.weight.main_grad += wgrad
            return d, None, None
        return d, wgrad.to(ctx.weight.dtype), None


def scales_of(module: Any, key: str, tensors: list[Tensor], limit: float) -> list[Tensor]:
    state = module.fp8_meta.get(key)
    return [limit / t.abs().amax().float() for t in tensors] if state is None else list(state.scale[: len(tensors)])


def damage(module: Any, gemm: str, product: Tensor) -> Tensor:
    if getattr(module, "broken", None) == gemm:
        product[-8:] = 0
    return product


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(self: Any, x: Tensor, **_: Any) -> Any:
        y = StandIn.apply(x, self.weight, self)
        return (y, self.bias) if self.te_return_bias else y

    monkeypatch.setattr(te.Linear, "forward", linear)

    def norm_linear(self: Any, x: Tensor, **_: Any) -> Any:
        is_delayed = "scaling_fwd" in self.fp8_meta  # then a fused kernel casts the norm to FP8 without a step in bf16
        x = normalized(self, x, exact=is_delayed)
        y = StandIn.apply(x, self.weight, self)
        return (y, self.bias) if self.te_return_bias else y

    monkeypatch.setattr(te.LayerNormLinear, "forward", norm_linear)


def model(*, fused: bool) -> tuple[Any, LinearRegistry]:
    chunk = dense(params_dtype=torch.bfloat16, bf16=True)
    registry = convert_model([chunk], SnipConfig(enabled=True, gemm="reference"))
    for handle in registry:
        handle.module.fuse_wgrad_accumulation = fused
        handle.weight.main_grad = torch.zeros(handle.weight.shape)
    return chunk, registry


def run(chunk: Any, seed: int = 3) -> None:
    """Forward and backward of the MLP of the first layer."""
    mlp = chunk.decoder.layers[0].mlp
    x = torch.randn(32, 2, 64, generator=torch.Generator().manual_seed(seed)).bfloat16().requires_grad_()
    gate, up = mlp.linear_fc1(x)[0].chunk(2, -1)
    mlp.linear_fc2(functional.silu(gate) * up)[0].square().sum().backward()


def checked(chunk: Any, registry: LinearRegistry, job: Job) -> KernelCheck:
    check = KernelCheck(job.formats_of, job.numerics, job.bound)
    registry.start_step(0)
    job.numerics.start_pass()
    with job.watch(registry.context, check):
        run(chunk)
        run(chunk, 4)
    return check


@pytest.mark.parametrize("fused", [True, False])
def test_a_healthy_job_has_no_fault(fused: bool) -> None:
    chunk, registry = model(fused=fused)
    check = checked(chunk, registry, host_job(HostRecipe("tensorwise", hybrid=True), ARGUMENTS, registry))
    assert check.first is None
    assert set(check.sqnr) == {(f"decoder.layers.0.{name}", gemm) for name in NAMES for gemm in Gemm}
    assert min(check.sqnr.values()) > 40


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("name", NAMES)
def test_a_broken_gemm_is_named(name: str, gemm: str) -> None:
    chunk, registry = model(fused=True)
    chunk.get_submodule(f"decoder.layers.0.{name}").broken = gemm
    check = checked(chunk, registry, host_job(HostRecipe("tensorwise", hybrid=True), ARGUMENTS, registry))
    assert check.first is not None
    fault = check.first
    assert (fault.linear, fault.gemm, fault.library) == (f"decoder.layers.0.{name}", gemm, "transformer_engine")
    assert "rows" in fault.where


def test_a_recipe_that_the_job_does_not_have_is_a_fault() -> None:
    chunk, registry = model(fused=True)
    check = checked(chunk, registry, host_job(HostRecipe("tensorwise"), ARGUMENTS, registry))
    assert check.first is not None
    assert check.first.gemm == "dgrad"  # in E5M2, not E4M3


def with_history(registry: LinearRegistry, scale: float) -> None:
    for handle in registry:
        for key, count in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            state = SimpleNamespace(scale=torch.full((count,), scale), amax_history=torch.zeros(1, count))
            handle.module.fp8_meta[key] = state


def test_delayed_scales_come_from_the_checkpoint_in_every_pass() -> None:
    chunk, registry = model(fused=True)
    with_history(registry, 64.0)
    job = host_job(HostRecipe("delayed", hybrid=True), ARGUMENTS, registry)
    check = checked(chunk, registry, job)
    assert check.first is None
    assert min(check.sqnr.values()) > 40
    with_history(registry, 1.0)  # as later steps would leave it
    fc1 = chunk.decoder.layers[0].mlp.linear_fc1
    job.numerics.start_pass()
    assert float(fc1.fp8_meta["scaling_fwd"].scale[0]) == 64.0

    registry.context.backend, registry.context.override = job.numerics, lambda handle: Override(
        job.formats_of(handle), backend=job.numerics.of(handle)
    )  # fmt: skip
    x = torch.randn(16, 2, 64).bfloat16()
    x[0, 0, 0] = 50.0
    registry.start_step(0)
    y, _ = fc1(x)
    numbers = normalized(fc1, x).detach().reshape(-1, 64)
    unit = torch.float8_e4m3fn
    scale = torch.tensor(64.0)  # the norm of the outlier is above 448 / 64
    assert float(numbers.abs().max()) > 7
    expected = cast(numbers, unit, scale) @ cast(fc1.weight.detach(), unit, scale).t()
    torch.testing.assert_close(y.reshape(expected.shape).float(), expected, rtol=1e-2, atol=1e-3)
    again, _ = fc1(x)  # the next microbatch has the scale of this one's amax
    scale = torch.tensor(448.0) / numbers.abs().max().float()  # 448.0 / tensor is no IEEE division
    expected = cast(numbers, unit, scale) @ cast(fc1.weight.detach(), unit, torch.tensor(64.0)).t()
    torch.testing.assert_close(again.reshape(expected.shape).float(), expected, rtol=1e-2, atol=1e-3)
