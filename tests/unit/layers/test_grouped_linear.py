"""The linear of all experts against float64 products of independently quantised operands, expert by expert."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from handles import Recorder, handle_of
from linears import reference
from torch import Tensor

from benchmarks.quality.oracle import ComparedFprop, NudgedGemm
from snip_megatron.layers.context import LinearState, Override, StepContext
from snip_megatron.layers.grouped import GroupedCall, grouped_call, grouped_product, pad, unpad
from snip_megatron.layers.registry import DeviceStep
from snip_megatron.layers.swiglu import fused_experts, may_fuse_experts, takes_device_rows
from snip_megatron.numerics.products.backend import REFERENCE, GemmBackend
from snip_megatron.numerics.products.check import decibel
from snip_megatron.numerics.products.grouped import DeviceRows, Rows, group_rows
from snip_megatron.numerics.products.host_recipe import HostRecipe, RecipeGemms
from snip_megatron.numerics.quantize import derive_seed, swiglu
from snip_megatron.precision import Format, Formats, Gemm
from snip_megatron.precision.errors import SnipError
from tests.unit.layers.test_weights import Counting
from tests.unit.numerics.products import emulated_grouped
from tests.unit.numerics.products.products import BACKENDS, hopper

BF16, FP8, FP4, TENSOR, NVFP4 = Format.BF16, Format.FP8, Format.FP4, Format.FP8_TENSOR, Format.NVFP4
N, K = 144, 208
UNEVEN = (130, 0, 7, 256)
CASES = [
    *((UNEVEN, formats) for formats in ((FP8, FP8, FP8), (FP4, FP8, BF16), (BF16, TENSOR, FP4), (BF16, BF16, BF16))),
    ((0, 0, 0), (FP8, FP4, FP8)),
    ((384,), (FP8, FP4, FP8)),
    (tuple(3 * (e % 3) for e in range(128)), (FP8, FP8, FP8)),
]


class Experts(torch.nn.Module):
    """Weights and handles of one linear of some experts, as Transformer Engine's grouped linear names them."""

    def __init__(self, count: int, formats: Formats, backend: GemmBackend = REFERENCE, n: int = N, k: int = K) -> None:
        super().__init__()
        self.context = StepContext(step=3, seed=11, backend=backend, expert_dp_rank=1, expert_dp_size=2)
        draws = torch.Generator().manual_seed(count)
        for e in range(count):
            weight = torch.nn.Parameter((torch.randn(n, k, generator=draws) * k**-0.5).bfloat16())
            weight.main_grad = torch.ones(n, k)  # type: ignore[attr-defined]
            self.register_parameter(f"weight{e}", weight)
        self.handles = [
            handle_of(
                "decoder.layers.2.mlp.experts.linear_fc1", n, k, self.context, module=self, expert=e,
                parameter=f"weight{e}", state=LinearState(formats=formats),
            )
            for e in range(count)
        ]  # fmt: skip

    def forward(self, x: Tensor, splits: Sequence[int]) -> Tensor:
        return grouped_product(self.handles, list(self.parameters()), x, splits)

    def call(self, rows: Rows, on_wgrad_complete: Callable[[], None] | None = None) -> GroupedCall:
        order = slice(None, None, -1 if rows.backwards else 1)
        return grouped_call(self.handles[order], list(self.parameters())[order], on_wgrad_complete)


def operands(splits: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    draws, rows = torch.Generator().manual_seed(len(splits)), sum(splits)
    spread = torch.randn(rows, 1, generator=draws).exp()
    x = (torch.randn(rows, K, generator=draws) * spread).to(dtype).requires_grad_()
    return x, (torch.randn(rows, N, generator=draws) * spread * 1e-3).to(dtype)


def expected(experts: Experts, x: Tensor, g: Tensor, splits: Sequence[int], formats: Formats) -> list[Tensor]:
    """Y, ∂L/∂X and the stacked ∇W in float64. Each expert draws with keys of its own."""
    rows, index = (x.split(list(splits)), g.split(list(splits))), experts.handles[0].index

    def seed(expert: int, gemm: int) -> int:
        return derive_seed(derive_seed(11, 3, 1, index, gemm), expert)

    of_each = [
        reference(xs, w, gs, formats, experts.context, seed_of=partial(seed, e))
        for e, (w, xs, gs) in enumerate(zip(experts.parameters(), *rows, strict=True))
    ]
    y, d, gw = zip(*of_each, strict=True)
    return [torch.cat(y), torch.cat(d), torch.stack(gw)]


@pytest.mark.parametrize(("splits", "formats"), CASES)
@pytest.mark.parametrize("name", ["reference", "emulated"])
def test_three_products_of_every_expert(splits: tuple[int, ...], formats: Formats, name: str) -> None:
    experts, (x, g) = Experts(len(splits), formats, BACKENDS[name]()), operands(splits)
    y = experts(x, splits)
    y.backward(g)
    main_grads = torch.stack([weight.main_grad for weight in experts.parameters()])  # type: ignore[misc]
    result = (y, x.grad, main_grads - 1)
    for actual, exact, least in zip(result, expected(experts, x, g, splits, formats), (45, 45, 90), strict=True):
        assert actual.shape == exact.shape
        assert not exact.numel() or not exact.any() or decibel(exact, actual) > least
    assert [weight.grad for weight in experts.parameters()] == [None] * len(splits)


def test_rotated_operands_of_wgrad_give_the_gradient() -> None:
    """The Hadamard transforms of X and G cancel: with signs that agree, an error of 4 bits is left."""
    splits = (128, 0, 96)
    experts, (x, g) = Experts(3, (NVFP4, NVFP4, NVFP4)), operands(splits)
    experts(x, splits).backward(g)
    exact = [t.double() for t in expected(experts, x, g, splits, (BF16, BF16, BF16))]
    actual = torch.stack([weight.main_grad for weight in experts.parameters()]) - 1  # type: ignore[misc]
    assert decibel(exact[2], actual) > 12


@pytest.mark.parametrize("formats", [(FP8, FP8, FP8), (BF16, FP8, BF16), (FP8, BF16, FP8)], ids=str)
def test_weights_that_are_gathered_for_each_pass(formats: Formats) -> None:
    """They are at another address in the backward, and autograd gets their gradients."""
    experts, (x, g) = Experts(2, formats), operands((128, 5))
    exact = expected(experts, x, g, (128, 5), formats)
    experts.context.fsdp_sharded = True
    y = experts(x, (128, 5))
    for weight in experts.parameters():
        freed, weight.data = weight.data, weight.data.clone()
        freed.fill_(torch.nan)
    y.backward(g)
    result = (y, x.grad, torch.stack([weight.grad for weight in experts.parameters()]))  # type: ignore[misc]
    for actual, of_all in zip(result, exact, strict=True):
        assert decibel(of_all, actual) > 45
    assert all((weight.main_grad == 1).all() for weight in experts.parameters())  # type: ignore[attr-defined]


def test_weights_are_quantised_once_and_again_if_one_changes() -> None:
    backend = Counting()
    experts, (x, g) = Experts(3, (FP8, FP8, FP8), backend), operands((4, 4, 4))
    for _ in range(2):
        experts(x, (4, 4, 4)).backward(g)
    assert backend.weights == 3
    with torch.no_grad():
        experts.weight1.mul_(2)
    y = experts(x, (4, 4, 4))
    assert backend.weights == 6
    with torch.no_grad():
        experts.weight2.mul_(2)
    with pytest.raises(SnipError, match="its weight was changed between the forward and the backward"):
        y.backward(g)


def test_a_probe_records_the_rows_of_each_expert() -> None:
    splits = (130, 0, 7)
    experts, (x, g) = Experts(3, (FP4, FP4, FP4)), operands(splits)
    recorders = [Recorder() for _ in splits]
    for handle, recorder in zip(experts.handles, recorders, strict=True):
        handle.state.recorder = recorder
    experts.context.probing = True
    experts(x, splits).backward(g)
    exact = expected(experts, x, g, splits, (BF16, BF16, BF16))
    assert decibel(exact[1], x.grad) > 45
    rows = zip(x.split(list(splits)), g.split(list(splits)), x.grad.split(list(splits)), strict=True)
    for recorder, weight, (of_x, of_g, of_d) in zip(recorders, experts.parameters(), rows, strict=True):
        for actual, arguments in zip(*recorder.calls, (of_x, weight, of_g, of_d, of_d), strict=True):
            assert torch.equal(actual, arguments)


def mlp(x: Tensor, weights: Sequence[Tensor], probs: Tensor, splits: Sequence[int]) -> Tensor:
    """SwiGLU of the first half of ``weights`` times ``probs``, times the others, in float64."""
    first, second = weights[: len(splits)], weights[len(splits) :]
    result = []
    for rows, factors, fc1, fc2 in zip(x.split(list(splits)), probs.split(list(splits)), first, second, strict=True):
        gate, up = (rows @ fc1.t()).chunk(2, -1)
        result.append((torch.nn.functional.silu(gate) * up * factors[:, None]) @ fc2.t())
    return torch.cat(result)


@pytest.mark.parametrize(
    ("of_fc1", "of_fc2"),
    [
        ((FP8, FP8, BF16), (BF16, FP8, BF16)),
        ((FP4, FP8, BF16), (FP8, FP8, BF16)),
        ((BF16, BF16, BF16), (FP8, BF16, BF16)),
        ((FP8, FP8, FP8), (FP8, FP8, FP8)),
        ((FP8, FP8, TENSOR), (BF16, FP8, FP4)),
    ],
)
@pytest.mark.parametrize("backwards", [False, True])
def test_swiglu_times_probabilities_between_two_linears(of_fc1: Formats, of_fc2: Formats, backwards: bool) -> None:
    """They agree with float64 for unpadded rows and empty experts: the result, and the gradients of X, of the
    probabilities and of weights.
    """
    splits, hidden, width = (130, 0, 7), 128, 256
    rows = group_rows(splits, torch.device("cpu"), backwards=backwards)
    backend = hopper(activations=swiglu, groups=emulated_grouped)
    fc1 = Experts(3, of_fc1, backend, n=2 * width, k=hidden)
    fc2 = Experts(3, of_fc2, backend, n=hidden, k=width)
    fc1.context.map_is_quantized = fc2.context.map_is_quantized = True
    draws = torch.Generator().manual_seed(5)
    x, g = (torch.randn(137, hidden, generator=draws).bfloat16() for _ in range(2))
    x.requires_grad_()
    probs = torch.rand(137, generator=draws).requires_grad_()
    assert may_fuse_experts(fc1.handles[0], fc2.handles[0])
    fc2.handles[0].state.formats = (TENSOR, FP8, BF16)
    assert not may_fuse_experts(fc1.handles[0], fc2.handles[0])
    fc2.handles[0].state.formats = of_fc2
    complete: list[str] = []
    calls = fc1.call(rows, lambda: complete.append("fc1")), fc2.call(rows, lambda: complete.append("fc2"))
    y = fused_experts(x, probs, rows, *calls)
    y.backward(g)
    assert complete == ["fc2", "fc1"]

    weights = [weight.detach().double().requires_grad_() for weight in (*fc1.parameters(), *fc2.parameters())]
    exact_x, exact_probs = (t.detach().double().requires_grad_() for t in (x, probs))
    expected = mlp(exact_x, weights, exact_probs, splits)
    gradients = torch.autograd.grad(expected, [exact_x, exact_probs, *weights], g.double())
    result = [weight.main_grad - 1 for weight in (*fc1.parameters(), *fc2.parameters())]  # type: ignore[operator]
    least = 12 if FP4 in (*of_fc1, *of_fc2) else 20
    for actual, exact in zip((y, x.grad, probs.grad, *result), (expected, *gradients), strict=True):
        assert not exact.any() or decibel(exact.detach(), actual.detach()) > least


SPLITS = [(130, 0, 7), (0, 0, 137), (1, 1, 135)]


@pytest.mark.parametrize(
    ("of_fc1", "of_fc2"),
    [
        ((FP8, FP8, BF16), (BF16, FP4, BF16)),
        ((FP4, FP4, BF16), (FP8, BF16, BF16)),
        ((FP8, FP8, FP8), (BF16, FP4, FP4)),
        ((FP4, FP4, FP4), (FP8, BF16, FP8)),
    ],
)
@pytest.mark.parametrize("backwards", [False, True])
def test_what_a_graph_holds_gives_the_bits_of_the_path_that_counts_on_the_host(
    of_fc1: Formats, of_fc2: Formats, backwards: bool
) -> None:
    """Numbers of rows, keys of stochastic rounding and quantised weights are read from the device."""
    results: list[list[Tensor]] = []
    for on_device in (False, True):
        backend, draws = hopper(activations=swiglu, groups=emulated_grouped), torch.Generator().manual_seed(5)
        both = Experts(3, of_fc1, backend, n=512, k=128), Experts(3, of_fc2, backend, n=128, k=256)
        for experts in both:  # as Megatron lays them out
            memory = torch.empty(3, *experts.weight0.shape, dtype=torch.bfloat16)
            for place, weight in zip(list(memory)[:: -1 if backwards else 1], experts.parameters(), strict=True):
                weight.data = place.copy_(weight.data)
        firsts = [experts.handles[0] for experts in both]
        device = DeviceStep(firsts, [0, 0], torch.device("cpu")) if on_device else None
        records: list[Tensor] = []
        for step in range(2):
            for experts in both:
                experts.context.step, experts.handles[0].state.backwards = step, 0
                experts.handles[0].state.weights.clear()
            if device is not None:
                device.start_step(11, step)
            for microbatch, splits in enumerate(SPLITS):
                if device is not None and microbatch:
                    device.weights_are_current(0)
                x, g = (torch.randn(137, 128, generator=draws).bfloat16() for _ in range(2))
                probs = torch.rand(137, generator=draws).requires_grad_()
                rows: Rows = group_rows(splits, torch.device("cpu"), backwards=backwards)
                if on_device:
                    rows = DeviceRows(torch.tensor(splits), 137, backwards=backwards)
                calls = [experts.call(rows) for experts in both]
                assert takes_device_rows(*calls)
                y = fused_experts(x.requires_grad_(), probs, rows, *calls)
                y.backward(g)
                assert x.grad is not None
                assert probs.grad is not None
                records += [y.detach(), x.grad, probs.grad]
            for weight in (*both[0].parameters(), *both[1].parameters()):
                records.append(weight.main_grad.clone())  # type: ignore[operator]
                weight.data -= (0.01 * weight.main_grad).bfloat16()  # type: ignore[operator]
        results.append(records)
    for expected, result in zip(*results, strict=True):
        assert torch.equal(expected, result)
    assert not torch.equal(results[0][0], results[0][len(results[0]) // 2])


def test_wgrads_that_run_expert_by_expert_need_the_numbers_of_rows() -> None:
    rows = group_rows((130, 7), torch.device("cpu"))
    for backend, formats in ((hopper(groups=emulated_grouped), (FP8, FP8, TENSOR)), (REFERENCE, (BF16, FP8, BF16))):
        assert not takes_device_rows(Experts(2, formats, backend, n=256, k=128).call(rows))


def test_saved_tensors_may_come_back_in_rows() -> None:
    """Offloading of activations brings a saved tensor back contiguous. Scales of tiles are read in columns."""
    gradients, splits = [], [256, 128]
    for offloaded in (False, True):
        experts = Experts(2, (FP8, FP8, FP8), hopper(groups=emulated_grouped), n=256, k=384)
        x = torch.randn(384, 384, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
        hooks = (lambda tensor: tensor.detach().contiguous().clone(), lambda tensor: tensor)
        with torch.autograd.graph.saved_tensors_hooks(*hooks) if offloaded else nullcontext():
            y = experts(x, splits)
        y.backward(torch.ones_like(y))
        gradients.append([weight.main_grad for weight in experts.parameters()])
    for direct, moved in zip(*gradients, strict=True):
        assert torch.equal(direct, moved)  # type: ignore[arg-type]


def test_experts_in_bf16_run_grouped_gemms_under_a_map_that_quantises() -> None:
    """Under an all-bf16 map, or if no library has grouped GEMMs, they run Megatron's own code."""
    grouped = hopper(groups=emulated_grouped)
    for backend, runs_grouped in ((grouped, True), (REFERENCE, False)):
        experts = Experts(2, (BF16, BF16, BF16), backend, n=256, k=128)
        assert experts.handles[0].is_stock
        experts.context.map_is_quantized = True
        assert experts.handles[0].is_stock is not runs_grouped
        experts.context.use_te_recipe = True
        assert experts.handles[0].is_stock


def test_a_measuring_pass_forces_the_format_and_the_backend_of_all_experts() -> None:
    splits = (130, 0, 7)
    x, g = operands(splits)

    def passed(override: Override | None, formats: Formats = (BF16, BF16, BF16)) -> tuple[Tensor, Tensor, list[Tensor]]:
        experts = Experts(3, formats)
        experts.context.override = None if override is None else lambda _: override
        y = experts(x, splits)
        (d,) = torch.autograd.grad(y, x, g, retain_graph=True)
        return y.detach(), d, [weight.detach() for weight in experts.parameters()]

    plain_y, plain_d, _ = passed(Override())
    forced_y, forced_d, _ = passed(Override((FP4, BF16, BF16)))
    assert torch.equal(forced_y, passed(None, (FP4, BF16, BF16))[0])
    assert torch.equal(forced_d, plain_d)
    *_, e4m3, e5m2 = (
        passed(Override((FP8, FP8, BF16), backend=RecipeGemms(HostRecipe("blockwise", hybrid=hybrid))))
        for hybrid in (False, True)
    )
    assert torch.equal(e4m3[0], e5m2[0])
    assert not torch.equal(e4m3[1], e5m2[1])
    for gemm, of_y in ((Gemm.FPROP, True), (Gemm.DGRAD, False)):
        y, d, _ = passed(Override(backend=NudgedGemm(REFERENCE, gemm)))
        assert torch.equal(y, plain_y) is not of_y
        assert torch.equal(d, plain_d) is of_y
    reported: list[Tensor] = []
    handle = Experts(3, (BF16, BF16, BF16)).handles[0]
    passed(Override(backend=ComparedFprop(REFERENCE, handle, FP4, reported.append)))
    expected = (g.float() * (forced_y.float() - plain_y.float())).double().sum()
    assert torch.stack(reported).sum() == pytest.approx(float(expected), rel=1e-2)


def test_placeholders_for_ddp_share_one_piece_of_memory() -> None:
    """Apart, these gradients would take as much memory as all experts' weights. Autograd does not copy them."""
    experts, calls = Experts(4, (FP8, FP8, FP8)), []
    for weight in experts.parameters():
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad))
    x, g = operands(UNEVEN)
    experts(x, UNEVEN).backward(g)
    assert len({gradient.untyped_storage().data_ptr() for gradient in calls}) == 1
    assert [gradient.shape for gradient in calls] == [(N, K)] * 4
    assert all(weight.grad_added_to_main_grad for weight in experts.parameters())  # type: ignore[attr-defined]
    assert len({id(gradient) for gradient in calls}) == 4


# -- padding ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("splits", [(3, 0, 128, 130), (0, 0), (256,), (128, 256)])
@pytest.mark.parametrize("backwards", [False, True])
def test_rows_stand_at_the_start_of_their_expert(splits: tuple[int, ...], backwards: bool) -> None:
    rows = group_rows(splits, torch.device("cpu"), backwards=backwards)
    x = torch.randn(sum(splits), 4, requires_grad=True)
    padded = pad(x, rows)
    order = reversed(list(x.split(list(splits)))) if backwards else x.split(list(splits))
    for actual, expected in zip(padded.split(rows.tolist()), order, strict=True):
        assert len(actual) % 128 == 0
        assert len(actual) - len(expected) < 128
        assert torch.equal(actual[: len(expected)], expected)
        assert not actual[len(expected) :].any()
    experts = [expert for expert, count in enumerate(rows) for _ in range(count)]
    assert rows.map.experts.tolist() == experts
    y = unpad(padded * 3, rows)
    assert torch.equal(y, x * 3)
    weight = torch.randn_like(y)
    y.backward(weight)
    assert torch.equal(x.grad, weight * 3)
