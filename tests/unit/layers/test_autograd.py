"""The quantised linear on one rank: every GEMM in every format, gradients, main_grad, recomputation."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from handles import Recorder, handle_of
from linears import FC1, convert, operands, our_linear, passed, reference, stock_linear
from torch.utils.checkpoint import checkpoint

from benchmarks.quality.oracle import ComparedFprop
from snip_megatron.layers.autograd import LinearCall, QuantizedLinear
from snip_megatron.layers.context import LinearHandle, LinearState, Override, StepContext
from snip_megatron.numerics.products.backend import REFERENCE
from snip_megatron.numerics.products.check import decibel
from snip_megatron.numerics.products.host_recipe import HostRecipe, RecipeGemms
from snip_megatron.precision import ALL_BF16, Format, Formats
from snip_megatron.precision.errors import SnipError
from tests.unit.numerics.products.products import hopper

pytestmark = pytest.mark.usefixtures("one_rank")
BF16, FP8, FP4 = Format.BF16, Format.FP8, Format.FP4
ONE_GEMM: list[Formats] = [
    formats for fmt in (FP8, FP4) for formats in ((fmt, BF16, BF16), (BF16, fmt, BF16), (BF16, BF16, fmt))
]
MIXED: list[Formats] = [(FP8, FP4, FP4), (FP4, FP8, BF16)]
SAME: list[Formats] = [(fmt, fmt, fmt) for fmt in Format if fmt is not BF16]
ODD = (37, 3, 200, 136)  # T = 111, N, K: no multiple of any tile


def name(value: Any) -> str | None:
    return "-".join(f.value for f in value) if isinstance(value, tuple) else None


@pytest.fixture
def context() -> StepContext:
    return StepContext(step=5, seed=77)


def with_main_grad(linear: Any, *, zero_out: bool = False) -> torch.Tensor:
    """Give the weight the attributes that DDP gives a parameter. Returns main_grad."""
    weight = linear.weight
    weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32)
    weight.grad_added_to_main_grad = False
    if zero_out:
        weight.zero_out_wgrad = True
    main_grad: torch.Tensor = weight.main_grad
    return main_grad


# -- numbers ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", [False, True], ids=["column", "row"])
@pytest.mark.parametrize("formats", ONE_GEMM + MIXED + SAME, ids=name)
def test_output_and_gradients(context: StepContext, formats: Formats, row: bool) -> None:
    """FP32 tensors: nothing but FP32 summation stands between our GEMMs and the float64 composition."""
    s, b, n, k = ODD
    linear = our_linear(context, formats, n, k, row=row, dtype=torch.float32)
    main_grad = with_main_grad(linear)
    x, g, y = passed(linear, s, b)
    expected_y, expected_d, expected_gw = reference(x, linear.weight, g, formats, context)
    assert y.shape == (s, b, n)
    assert decibel(expected_y, y) > 120
    assert decibel(expected_d, x.grad) > 120
    assert decibel(expected_gw, main_grad) > 120


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", [False, True], ids=["column", "row"])
def test_all_bf16_is_megatron_s_own_linear_bitwise(context: StepContext, row: bool, dtype: torch.dtype) -> None:
    results = []
    for converted in (False, True):
        linear = stock_linear(96, 64, row=row, dtype=dtype)
        if converted:
            assert convert(linear, context, ALL_BF16).is_stock
        x, _, y = passed(linear, 16, 2)
        results.append((y, x.grad, linear.weight.grad))
    for stock, ours in zip(*results, strict=True):
        assert torch.equal(stock, ours)


def test_bias(context: StepContext) -> None:
    s, b, n, k = ODD
    linear = our_linear(context, (FP4, FP4, FP4), n, k, bias=True, dtype=torch.float32)
    x, g, y = passed(linear, s, b)
    expected, _, _ = reference(x, linear.weight, g, (FP4, FP4, FP4), context)
    assert decibel(expected + linear.bias.double(), y) > 120
    torch.testing.assert_close(linear.bias.grad, g.sum((0, 1)), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("shape", [(64,), (0, 64), (5, 64), (3, 0, 64), (0, 3, 64), (2, 3, 5, 64)])
def test_the_output_has_the_leading_dimensions_of_the_input(context: StepContext, shape: tuple[int, ...]) -> None:
    """``torch.nn.functional.linear`` does the same."""
    x, weight = torch.zeros(shape, requires_grad=True), torch.nn.Parameter(torch.zeros(96, 64))
    call = LinearCall(handle_of(FC1, 96, 64, context, state=LinearState(formats=(FP8, FP4, FP8))))
    y = QuantizedLinear.apply(x, weight, None, call)  # type: ignore[no-untyped-call]
    assert y.shape == torch.nn.functional.linear(x, weight).shape
    y.sum().backward()
    assert x.grad.shape == shape


def test_the_output_may_be_changed_in_place(context: StepContext) -> None:
    """Megatron adds the bias of an expert to it in place."""
    x, g = operands(16, 2, 96, 64, torch.float32)
    gradients = []
    for change in (lambda y: y * 2, lambda y: y.mul_(2)):
        linear = our_linear(context, (FP8, FP8, FP8), 96, 64, row=True, dtype=torch.float32)
        leaf = x.detach().requires_grad_()
        change(linear._forward_impl(input=leaf, weight=linear.weight)).backward(g)
        gradients.append((leaf.grad, linear.weight.grad))
    for expected, actual in zip(*gradients, strict=True):
        assert torch.equal(expected, actual)


def test_a_weight_that_is_changed_before_the_backward_is_refused(context: StepContext) -> None:
    """torch, whose linears save their weight, refuses it too."""
    linear = our_linear(context, (FP8, FP8, FP8), 96, 64, dtype=torch.float32)
    x, g = operands(16, 2, 96, 64, torch.float32)
    y, _ = linear(x)
    with torch.no_grad():
        linear.weight.mul_(2)
    with pytest.raises(SnipError, match=r"linear_fc1: its weight was changed between the forward and the backward"):
        y.backward(g)


@pytest.mark.parametrize("formats", [(FP8, FP8, FP8), (FP8, BF16, BF16)], ids=name)
def test_second_derivatives_are_refused(context: StepContext, formats: Formats) -> None:
    """Rounding has no derivative; without a refusal, some or all terms would be missing."""
    linear = our_linear(context, formats, 96, 64, dtype=torch.float32)
    x, g = operands(16, 2, 96, 64, torch.float32)
    y, _ = linear(x)
    with pytest.raises(SnipError, match="linear_fc1: create_graph=True is not supported"):
        torch.autograd.grad(y, x, g.requires_grad_(), create_graph=True)


# -- gradients of weights --------------------------------------------------------------------------------------
def test_main_grad_accumulates_over_microbatches_with_fresh_draws(context: StepContext) -> None:
    formats: Formats = (BF16, BF16, FP4)
    linear = our_linear(context, formats, 128, 128, dtype=torch.bfloat16)
    main_grad = with_main_grad(linear)
    context.dp_size, context.dp_rank = 3, 2
    expected = torch.zeros(128, 128, dtype=torch.float64)
    for microbatch in range(2):
        x, g, _ = passed(linear, 32, 2, seed=4)  # the same tensors: only the draws differ
        expected += reference(x, linear.weight, g, formats, context, microbatch * 3 + 2)[2]
    assert decibel(expected, main_grad) > 120
    same_draws = 2 * reference(x, linear.weight, g, formats, context, 2)[2]
    assert decibel(same_draws, main_grad) < 40


@pytest.mark.parametrize("formats", [(FP8, FP8, FP8), (FP8, FP8, BF16)], ids=name)
def test_the_protocol_with_ddp(context: StepContext, formats: Formats) -> None:
    """DDP asserts a gradient under overlap_grad_reduce and must not add it once more."""
    linear = our_linear(context, formats, 64, 96, dtype=torch.bfloat16)
    with_main_grad(linear)
    passed(linear, 16, 2)
    assert linear.weight.grad_added_to_main_grad is True
    assert linear.weight.grad.shape == linear.weight.shape
    assert linear.weight.grad.dtype == linear.weight.dtype

    linear.weight.grad = None
    main_grad = with_main_grad(linear, zero_out=True)  # DDP then adds the dummy: it must be zeros
    passed(linear, 16, 2)
    assert main_grad.abs().sum() > 0
    assert torch.equal(linear.weight.grad, torch.zeros_like(linear.weight))

    linear.weight.grad = None
    del linear.weight.grad_added_to_main_grad
    passed(linear, 16, 2)
    assert linear.weight.grad is None


# -- one map a step --------------------------------------------------------------------------------------------
def test_the_backward_uses_the_formats_of_its_forward(context: StepContext) -> None:
    s, b, n, k = ODD
    linear = our_linear(context, (FP8, FP4, FP8), n, k, dtype=torch.float32)
    main_grad = with_main_grad(linear)
    x, g = operands(s, b, n, k, torch.float32)
    y, _ = linear(x)
    linear.snip.state.formats = (FP4, FP8, FP4)
    y.backward(g)
    _, expected_d, expected_gw = reference(x, linear.weight, g, (FP8, FP4, FP8), context)
    assert decibel(expected_d, x.grad) > 120
    assert decibel(expected_gw, main_grad) > 120


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("formats", [(FP4, FP4, FP4), (FP8, FP4, FP8), ALL_BF16], ids=name)
def test_recomputation_gives_the_same_bits(context: StepContext, formats: Formats, reentrant: bool) -> None:
    """The forward runs twice, the draws of stochastic rounding stay those of the microbatch."""
    s, b, n, k = 32, 2, 128, 128
    results = []
    for recompute in (False, True):
        linear = our_linear(context, formats, n, k, dtype=torch.bfloat16)
        main_grad = with_main_grad(linear)
        outputs = []
        for microbatch in range(2):
            x, g = operands(s, b, n, k, torch.bfloat16, seed=microbatch)
            y = checkpoint(linear, x, use_reentrant=reentrant)[0] if recompute else linear(x)[0]
            y.backward(g)
            if formats == ALL_BF16:  # the stock path leaves the gradient to DDP's hook
                main_grad += linear.weight.grad
                linear.weight.grad = None
            outputs += [y.detach(), x.grad]
        assert linear.snip.state.backwards == (0 if formats == ALL_BF16 else 2)
        results.append([*outputs, main_grad])
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("formats", [(FP8, FP8, FP8), (FP8, FP4, FP8), (Format.FP8_TENSOR,) * 3], ids=name)
def test_saved_tensors_may_come_back_in_rows(context: StepContext, formats: Formats) -> None:
    """Offloading of activations brings a saved tensor back contiguous. Scales of tiles are read in columns."""
    context.backend = hopper()
    gradients = []
    for offloaded in (False, True):
        linear = our_linear(context, formats, 256, 384, dtype=torch.bfloat16)
        with_main_grad(linear)
        torch.manual_seed(1)
        x = (torch.randn(128, 2, 384) * torch.logspace(-2, 2, 384)).bfloat16().requires_grad_()
        hooks = (lambda tensor: tensor.detach().contiguous().clone(), lambda tensor: tensor)
        with torch.autograd.graph.saved_tensors_hooks(*hooks) if offloaded else nullcontext():
            y, _ = linear(x)
        y.backward(torch.randn(y.shape).bfloat16())
        gradients.append((x.grad, linear.weight.main_grad.clone()))
    for direct, moved in zip(*gradients, strict=True):
        assert torch.equal(direct, moved)


def test_draws_depend_on_seed_step_microbatch_rank_and_gemm() -> None:
    s, b, n, k = 32, 2, 128, 128
    x, g = operands(s, b, n, k, torch.float32)

    def gradients(**fields: int) -> tuple[torch.Tensor, ...]:
        backwards = fields.pop("backwards", 0)
        context = StepContext(**{"step": 5, "seed": 77, **fields})
        linear = our_linear(context, (FP4, FP4, FP4), n, k, dtype=torch.float32)
        linear.snip.state.backwards = backwards
        x.grad = None
        linear(x)[0].backward(g)
        return x.grad.clone(), linear.weight.grad

    variants = [
        gradients(),
        gradients(seed=78),
        gradients(step=6),
        gradients(dp_size=2, dp_rank=1),
        gradients(dp_size=2, backwards=1),  # global microbatch 2
    ]
    for first, second in itertools.combinations(variants, 2):
        assert not torch.equal(first[0], second[0])
        assert not torch.equal(first[1], second[1])
    # Microbatch 1 of one rank is microbatch 0 of the second of two ranks: layouts draw alike.
    for one_rank_s, two_ranks in zip(gradients(backwards=1), gradients(dp_size=2, dp_rank=1), strict=True):
        assert torch.equal(one_rank_s, two_ranks)


# -- evaluation and probes -------------------------------------------------------------------------------------
def test_validation_in_bf16(context: StepContext) -> None:
    stock = stock_linear(96, 64, dtype=torch.bfloat16)
    linear = our_linear(context, (FP4, FP4, FP4), 96, 64, dtype=torch.bfloat16)
    x, _ = operands(8, 2, 96, 64, torch.bfloat16)
    linear.eval()
    with torch.no_grad():
        assert not torch.equal(linear(x)[0], stock(x)[0])
        context.bf16_eval = True
        assert torch.equal(linear(x)[0], stock(x)[0])
    assert not torch.equal(linear(x)[0], stock(x)[0])  # a training forward keeps its map


def test_a_training_forward_that_is_recomputed_keeps_its_map_beside_validation_in_bf16(context: StepContext) -> None:
    """Under recomputation, the first forward of a training step has no gradients, like that of a validation."""
    linear = our_linear(context, (FP4, FP4, FP4), 96, 64, dtype=torch.bfloat16)
    x, _ = operands(8, 2, 96, 64, torch.bfloat16)
    expected = linear(x)[0]
    context.bf16_eval = True
    assert torch.equal(checkpoint(linear, x, use_reentrant=True)[0], expected)


def test_a_probe_runs_in_bf16_and_shows_its_recorder_the_operands(context: StepContext) -> None:
    s, b, n, k = ODD
    linear = our_linear(context, (FP4, FP4, FP4), n, k, dtype=torch.float32)
    main_grad = with_main_grad(linear)
    context.probing = True
    assert linear.snip.is_stock
    recorder = Recorder()
    linear.snip.state.recorder = recorder
    assert not linear.snip.is_stock
    x, g = operands(s, b, n, k, torch.float32)
    y = checkpoint(linear, x, use_reentrant=False)[0]
    y.backward(g)
    exact_y, exact_d, exact_gw = reference(x, linear.weight, g, ALL_BF16, context)
    assert decibel(exact_y, y) > 120
    assert decibel(exact_d, x.grad) > 120
    assert decibel(exact_gw, main_grad) > 120
    (recorded,) = recorder.calls
    x, g, d = (tensor.flatten(0, 1) for tensor in (x, g, exact_d))
    for shown, expected in zip(recorded, (x, linear.weight, g, d, d), strict=True):
        assert shown.shape == expected.shape
        assert decibel(expected.detach(), shown) > 120


@pytest.mark.parametrize(
    "argument", [{"grad_output_buffer": []}, {"wgrad_deferral_limit": 2}, {"gtp_remat_size": 4}, {"new_in_2027": True}]
)
def test_what_the_quantised_path_does_not_implement_is_refused(context: StepContext, argument: dict[str, Any]) -> None:
    linear = our_linear(context, (FP8, FP8, FP8), 96, 64, dtype=torch.bfloat16)
    x, _ = operands(8, 2, 96, 64, torch.bfloat16)
    with pytest.raises(SnipError, match=f"{FC1}.*{next(iter(argument))}"):
        linear._forward_impl(input=x, weight=linear.weight, **argument)


# -- what a measuring pass forces on a linear --------------------------------------------------------------------
N, K, S, B = 192, 160, 40, 2


def linear(dtype: torch.dtype, context: StepContext) -> LinearHandle:
    handle = convert(stock_linear(N, K, dtype=dtype), context, ALL_BF16)
    handle.weight.main_grad = torch.zeros(N, K)  # type: ignore[attr-defined]
    return handle


def forced_pass(handle: LinearHandle, forced: Override | None, x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    """Y, ∂L/∂X and ∇W of one pass under ``forced``."""
    handle.context.override = None if forced is None else lambda _: forced
    handle.weight.main_grad.zero_()  # type: ignore[attr-defined]
    x = x.detach().requires_grad_()
    y, _ = handle.module(x)
    handle.context.override = None  # a backward keeps the override of its forward
    y.backward(g)
    assert x.grad is not None
    return [y.detach(), x.grad, handle.weight.main_grad.clone()]  # type: ignore[operator]


def test_a_forced_format_is_the_map_s_and_draws_the_bits_of_the_microbatch() -> None:
    context = StepContext(step=3, seed=5, dp_rank=1, dp_size=2)
    handle = linear(torch.float32, context)
    x, g = operands(S, B, N, K, torch.float32)
    results = []
    for microbatch in (0, 2, 0):
        handle.state.backwards = microbatch
        results.append(forced_pass(handle, Override((FP4,) * 3), x, g))
        expected = reference(x, handle.weight, g, (FP4,) * 3, context, microbatch * 2 + 1)
        for name, a, b in zip(("y", "d", "gw"), results[-1], expected, strict=True):
            torch.testing.assert_close(a.reshape(b.shape).double(), b, rtol=2e-5, atol=2e-6, msg=name)
    assert not torch.equal(results[0][2], results[1][2])
    assert torch.equal(results[0][2], results[2][2])


def test_nothing_forced_is_the_plain_linear_with_wgrad_in_fp32() -> None:
    """A bf16 weight gradient would drown what is measured."""
    handle = linear(torch.bfloat16, StepContext())
    x, g = operands(S, B, N, K, torch.bfloat16)
    y, d, gw = forced_pass(handle, Override(), x, g)
    flat_x, flat_g = x.detach().reshape(-1, K), g.reshape(-1, N)
    assert torch.equal(y.view(-1, N), flat_x @ handle.weight.t())
    assert torch.equal(d.view(-1, K), flat_g @ handle.weight)
    exact = flat_g.double().t() @ flat_x.double()
    assert float((gw - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backend_that_compares_reports_the_first_order_term_of_the_forced_output(dtype: torch.dtype) -> None:
    handle = linear(dtype, StepContext())
    x, g = operands(S, B, N, K, dtype)
    actual: list[torch.Tensor] = []
    plain = forced_pass(handle, Override(backend=ComparedFprop(REFERENCE, handle, FP4, actual.append)), x, g)
    for a, b in zip(plain, forced_pass(handle, Override(), x, g), strict=True):
        assert torch.equal(a, b)  # comparing changes nothing
    forced = forced_pass(handle, replace(Override(), formats=(Format.FP4, Format.BF16, Format.BF16)), x, g)
    expected = (g.double() * (forced[0].double() - plain[0].double())).sum()
    assert len(actual) == 1
    torch.testing.assert_close(actual[0], expected, rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=1e-12)


def test_the_backend_of_a_pass_multiplies_in_it_alone() -> None:
    """Transformer Engine's recipe with gradients in E5M2, which no format of a map has."""
    handle, recipe = linear(torch.bfloat16, StepContext()), HostRecipe("tensorwise", hybrid=True)
    x, g = operands(S, B, N, K, torch.bfloat16)
    formats = (Format.FP8_TENSOR,) * 3
    y, d, gw = forced_pass(handle, Override(formats, backend=RecipeGemms(recipe)), x, g)
    matrices = {"x": x.detach().reshape(-1, K), "w": handle.weight.detach(), "g": g.reshape(-1, N)}
    q = {name: recipe.quantize(matrix, name, 1).dequantize() for name, matrix in matrices.items()}
    assert torch.equal(y.view(-1, N), (q["x"] @ q["w"].t()).bfloat16())
    assert torch.equal(d.view(-1, K), (q["g"] @ q["w"]).bfloat16())
    torch.testing.assert_close(gw, q["g"].t() @ q["x"])
    differences = [
        float((a - b).float().norm() / b.float().norm())
        for a, b in zip(forced_pass(handle, Override(formats), x, g), (y, d, gw), strict=True)
    ]
    assert differences[0] < 5e-3  # E4M3 both, with scales that differ in the last bit
    assert min(differences[1:]) > 2e-2
