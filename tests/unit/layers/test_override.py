"""What a measuring pass forces on a linear: a format for one microbatch, the keys of another, ⟨G, E⟩."""

from dataclasses import replace

import pytest
import torch
from linears import convert, operands, reference, stock_linear

from snip_megatron.layers.context import LinearHandle, Override, StepContext
from snip_megatron.numerics.products.host_recipe import HostRecipe, RecipeGemms
from snip_megatron.precision import ALL_BF16, Format

pytestmark = pytest.mark.usefixtures("one_rank")
N, K, S, B = 192, 160, 40, 2
FP4 = (Format.FP4, Format.FP4, Format.FP4)


def linear(dtype: torch.dtype, context: StepContext) -> LinearHandle:
    handle = convert(stock_linear(N, K, dtype=dtype), context, ALL_BF16)
    handle.weight.main_grad = torch.zeros(N, K)  # type: ignore[attr-defined]
    return handle


def passed(handle: LinearHandle, forced: Override | None, x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    """Y, ∂L/∂X and ∇W of one pass under ``forced``."""
    handle.context.override = None if forced is None else lambda _: forced
    handle.weight.main_grad.zero_()  # type: ignore[attr-defined]
    x = x.detach().requires_grad_()
    y, _ = handle.module(x)
    handle.context.override = None  # a backward keeps what its forward was told
    y.backward(g)
    assert x.grad is not None
    return [y.detach(), x.grad, handle.weight.main_grad.clone()]  # type: ignore[operator]


def test_a_forced_format_is_the_map_s_and_draws_the_bits_of_its_microbatch() -> None:
    context = StepContext(step=3, seed=5, dp_rank=1, dp_size=2)
    handle = linear(torch.float32, context)
    x, g = operands(S, B, N, K, torch.float32)
    for microbatch in (0, 2):
        found = passed(handle, Override(FP4, microbatch), x, g)
        expected = reference(x, handle.weight, g, FP4, context, microbatch * 2 + 1)
        for name, a, b in zip(("y", "d", "gw"), found, expected, strict=True):
            torch.testing.assert_close(a.reshape(b.shape).double(), b, rtol=2e-5, atol=2e-6, msg=name)
    draws = [passed(handle, Override(FP4, m), x, g)[2] for m in (0, 2)]
    assert not torch.equal(*draws)


def test_nothing_forced_is_the_plain_linear_with_wgrad_in_fp32() -> None:
    """A bf16 weight gradient would drown what is measured."""
    handle = linear(torch.bfloat16, StepContext())
    x, g = operands(S, B, N, K, torch.bfloat16)
    y, d, gw = passed(handle, Override(), x, g)
    flat_x, flat_g = x.detach().reshape(-1, K), g.reshape(-1, N)
    assert torch.equal(y.view(-1, N), flat_x @ handle.weight.t())
    assert torch.equal(d.view(-1, K), flat_g @ handle.weight)
    exact = flat_g.double().t() @ flat_x.double()
    assert float((gw - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_order_term_is_that_of_the_forced_output(dtype: torch.dtype) -> None:
    handle = linear(dtype, StepContext())
    x, g = operands(S, B, N, K, dtype)
    found: list[torch.Tensor] = []
    plain = passed(handle, Override(compare=Format.FP4, report=found.append), x, g)
    for a, b in zip(plain, passed(handle, Override(), x, g), strict=True):
        assert torch.equal(a, b)  # comparing changes nothing
    forced = passed(handle, replace(Override(), formats=(Format.FP4, Format.BF16, Format.BF16)), x, g)
    expected = (g.double() * (forced[0].double() - plain[0].double())).sum()
    assert len(found) == 1
    torch.testing.assert_close(found[0], expected, rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=1e-12)


def test_the_backend_of_a_pass_multiplies_in_it_alone() -> None:
    """Transformer Engine's recipe with gradients in E5M2, which no format of a map has."""
    handle, recipe = linear(torch.bfloat16, StepContext()), HostRecipe("tensorwise", hybrid=True)
    x, g = operands(S, B, N, K, torch.bfloat16)
    formats = (Format.FP8_TENSOR,) * 3
    y, d, gw = passed(handle, Override(formats, backend=RecipeGemms(recipe)), x, g)
    matrices = {"x": x.detach().reshape(-1, K), "w": handle.weight.detach(), "g": g.reshape(-1, N)}
    q = {name: recipe.quantize(matrix, name, 1).dequantize() for name, matrix in matrices.items()}
    assert torch.equal(y.view(-1, N), (q["x"] @ q["w"].t()).bfloat16())
    assert torch.equal(d.view(-1, K), (q["g"] @ q["w"]).bfloat16())
    torch.testing.assert_close(gw, q["g"].t() @ q["x"])
    differences = [
        float((a - b).float().norm() / b.float().norm())
        for a, b in zip(passed(handle, Override(formats), x, g), (y, d, gw), strict=True)
    ]
    assert differences[0] < 5e-3  # E4M3 both, with scales that differ in the last bit
    assert min(differences[1:]) > 2e-2
