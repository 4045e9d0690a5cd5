"""The linear of all experts against float64 products of independently quantised operands, expert by expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from linears import decibel
from torch import Tensor

from snip_megatron.errors import SnipError
from snip_megatron.gemm.backend import REFERENCE, GemmBackend
from snip_megatron.gemm.emulated import EmulatedBackend
from snip_megatron.gemm.exact_products import ExactProducts
from snip_megatron.layers.context import GEMM_INDEX, LinearHandle, LinearState, StepContext
from snip_megatron.layers.grouped import grouped_product
from snip_megatron.precision import Format, Gemm, LinearId
from snip_megatron.quantization import derive_seed, fake_quantize
from snip_megatron.quantization.exact import quantize_exact
from snip_megatron.quantization.formats import STOCHASTIC

BF16, FP8, FP4, TENSOR, NVFP4 = Format.BF16, Format.FP8, Format.FP4, Format.FP8_TENSOR, Format.NVFP4
N, K = 144, 208
UNEVEN = (130, 0, 7, 256)
CASES = [
    *((UNEVEN, formats) for formats in ((FP8, FP8, FP8), (FP4, FP8, BF16), (BF16, TENSOR, FP4), (BF16, BF16, BF16))),
    ((0, 0, 0), (FP8, FP4, FP8)),
    ((384,), (FP8, FP4, FP8)),
    (tuple(3 * (e % 3) for e in range(128)), (FP8, FP8, FP8)),
]
Formats = tuple[Format, Format, Format]


class Experts(torch.nn.Module):
    """Weights and handles of one linear of some experts, as Transformer Engine's grouped linear names them."""

    def __init__(self, count: int, formats: Formats, backend: GemmBackend = REFERENCE, dtype: Any = torch.bfloat16):
        super().__init__()
        self.context = StepContext(step=3, seed=11, backend=backend, expert_dp_rank=1, expert_dp_size=2)
        draws = torch.Generator().manual_seed(count)
        for e in range(count):
            weight = torch.nn.Parameter((torch.randn(N, K, generator=draws) * K**-0.5).to(dtype))
            weight.main_grad = torch.ones(N, K)  # type: ignore[attr-defined]
            self.register_parameter(f"weight{e}", weight)
        self.handles = [
            LinearHandle(
                id=LinearId("decoder", 2, "mlp.experts.linear_fc1"), parallel="column", n=N, k=K, stage=0, tp_rank=0,
                tp_size=1,
                out_features=torch.arange(N), in_features=torch.arange(K), context=self.context, module=self,
                expert=e, parameter=f"weight{e}", state=LinearState(formats=formats),
            )
            for e in range(count)
        ]  # fmt: skip

    def forward(self, x: Tensor, splits: Sequence[int]) -> Tensor:
        return grouped_product(self.handles, list(self.parameters()), x, splits)


def operands(splits: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    draws, rows = torch.Generator().manual_seed(len(splits)), sum(splits)
    spread = torch.randn(rows, 1, generator=draws).exp()
    x = (torch.randn(rows, K, generator=draws) * spread).to(dtype).requires_grad_()
    return x, (torch.randn(rows, N, generator=draws) * spread * 1e-3).to(dtype)


def expected(experts: Experts, x: Tensor, g: Tensor, splits: Sequence[int], formats: Formats) -> list[Tensor]:
    """Y, ∂L/∂X and the stacked ∇W in float64. Each expert draws with keys of its own."""
    fprop, dgrad, wgrad = formats

    def quantised(t: Tensor, fmt: Format, gemm: Gemm | None = None, expert: int = 0, **options: Any) -> Tensor:
        if fmt is BF16:
            return t.double()
        if gemm is not None and fmt in STOCHASTIC:
            seed = derive_seed(derive_seed(11, 3, 1, experts.handles[0].index, GEMM_INDEX[gemm]), expert)
            options |= {"rounding": "stochastic", "seed": seed}
        return fake_quantize(t, fmt, **options).double()

    found: list[list[Tensor]] = [[], [], []]
    rows = x.detach().split(list(splits)), g.split(list(splits))
    for e, (w, xs, gs) in enumerate(zip(experts.parameters(), *rows, strict=True)):
        found[0].append(quantised(xs, fprop) @ quantised(w.detach(), fprop, block=True).t())
        of_w = quantised(w.detach(), dgrad, block=True, axis=0)
        found[1].append(quantised(gs, dgrad, Gemm.DGRAD, e) @ of_w)
        found[2].append(quantised(gs, wgrad, Gemm.WGRAD, e, axis=0).t() @ quantised(xs, wgrad, axis=0))
    return [torch.cat(found[0]), torch.cat(found[1]), torch.stack(found[2])]


@pytest.mark.parametrize(("splits", "formats"), CASES)
@pytest.mark.parametrize("name", ["reference", "emulated"])
def test_three_products_of_every_expert(splits: tuple[int, ...], formats: Formats, name: str) -> None:
    backend = REFERENCE if name == "reference" else EmulatedBackend(quantize_exact, ExactProducts())
    experts, (x, g) = Experts(len(splits), formats, backend), operands(splits)
    y = experts(x, splits)
    y.backward(g)
    main_grads = torch.stack([weight.main_grad for weight in experts.parameters()])  # type: ignore[misc]
    found = (y, x.grad, main_grads - 1)
    for actual, exact, least in zip(found, expected(experts, x, g, splits, formats), (45, 45, 90), strict=True):
        assert actual is not None
        assert actual.shape == exact.shape
        assert not exact.numel() or not exact.any() or decibel(exact, actual) > least
    assert [weight.grad for weight in experts.parameters()] == [None] * len(splits)


def test_rotated_operands_of_wgrad_give_the_gradient() -> None:
    """The Hadamard transforms of X and G cancel: with signs that agree, an error of 4 bits is left."""
    splits = (128, 0, 96)
    experts, (x, g) = Experts(3, (NVFP4, NVFP4, NVFP4)), operands(splits)
    experts(x, splits).backward(g)
    exact = [t.double() for t in expected(experts, x, g, splits, (BF16, BF16, BF16))]
    found = torch.stack([weight.main_grad for weight in experts.parameters()]) - 1  # type: ignore[misc]
    assert decibel(exact[2], found) > 12


def test_gradients_without_main_grad_and_without_a_backward() -> None:
    experts, (x, g) = Experts(2, (FP8, FP8, FP8)), operands((128, 5))
    with torch.no_grad():
        alone = experts(x, (128, 5))
    for weight in experts.parameters():
        del weight.main_grad
    y = experts(x, (128, 5))
    y.backward(g)
    assert torch.equal(y.detach(), alone)
    for weight, exact in zip(experts.parameters(), expected(experts, x, g, (128, 5), (FP8, FP8, FP8))[2], strict=True):
        assert weight.grad is not None
        assert decibel(exact, weight.grad) > 45


def test_weights_are_quantised_once_and_again_if_one_changes() -> None:
    counted: list[bool] = []

    class Counting(GemmBackend):
        def quantize(self, x: Tensor, spec: Any, cached: Any = None) -> Any:
            counted.append(spec.weight)
            return super().quantize(x, spec, cached)

    experts, (x, g) = Experts(3, (FP8, FP8, FP8), Counting()), operands((4, 4, 4))
    for _ in range(2):
        experts(x, (4, 4, 4)).backward(g)
    assert sum(counted) == 3
    with torch.no_grad():
        experts.weight1.mul_(2)
    y = experts(x, (4, 4, 4))
    assert sum(counted) == 6
    with torch.no_grad():
        experts.weight2.mul_(2)
    with pytest.raises(SnipError, match="a weight was changed between the forward and the backward"):
        y.backward(g)


def test_a_probe_records_the_rows_of_each_expert() -> None:
    class Recorder:
        def on_backward(self, *tensors: Tensor) -> None:
            self.tensors = tensors

    splits = (130, 0, 7)
    experts, (x, g) = Experts(3, (FP4, FP4, FP4)), operands(splits)
    recorders = [Recorder() for _ in splits]
    for handle, recorder in zip(experts.handles, recorders, strict=True):
        handle.state.recorder = recorder
    experts.context.probing = True
    experts(x, splits).backward(g)
    exact = expected(experts, x, g, splits, (BF16, BF16, BF16))
    assert x.grad is not None
    assert decibel(exact[1], x.grad) > 45
    rows = zip(x.split(list(splits)), g.split(list(splits)), x.grad.split(list(splits)), strict=True)
    for recorder, weight, (of_x, of_g, of_d) in zip(recorders, experts.parameters(), rows, strict=True):
        for found, given in zip(recorder.tensors, (of_x, weight, of_g, of_d, of_d), strict=True):
            assert torch.equal(found, given)
