"""A forward and a backward of a linear as one replay each: the bits of Python and of their parts, and what is replayed.

Quantisers run in torch, and stochastic ones by a launch, whose key words differ from call to call.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from snip_megatron.errors import SnipError
from snip_megatron.gemm.hopper import HopperBackend
from snip_megatron.gemm.operands import GradientKeys, Plain, disassemble
from snip_megatron.gemm.replayed import TYPES, ReplayedHopperBackend
from snip_megatron.gemm.scaled import ScaledProducts
from snip_megatron.layers import autograd
from snip_megatron.layers.autograd import LinearCall, QuantizedLinear
from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.precision import LinearId
from snip_megatron.quantization.hadamard import Rotation
from snip_megatron.quantization.kernels import replay_build

from .emulated_cublaslt import emulated_cublaslt
from .emulated_scaled_mm import scaled_mm
from .launched_quantizers import LaunchedQuantizers
from .test_hopper import BF16, EVEN, FP4, FP8, MIXED, NVFP4, REFUSED, TAILS, TENSOR, UNIFORM, operands
from .test_replayed import CALLS, aligned, microbatch, same

pytest.importorskip("triton")
PASSES = ("forward", "input_gradient", "backward")


@pytest.fixture(scope="module")
def quantizers() -> LaunchedQuantizers:
    return LaunchedQuantizers()


@pytest.fixture(scope="module")
def extension(quantizers: LaunchedQuantizers) -> Any:
    found = replay_build.compiled_extension()
    replay_build.configure(found, launch=quantizers.driver, types=TYPES, hooks=None, stream=lambda _: 0)
    return found


Pair = tuple[ReplayedHopperBackend, HopperBackend]


@pytest.fixture
def pair(extension: Any, quantizers: LaunchedQuantizers) -> Pair:
    python = HopperBackend(quantizers, ScaledProducts(scaled_mm))  # type: ignore[arg-type]
    return ReplayedHopperBackend(extension, python), python


def replays(backend: ReplayedHopperBackend) -> dict[str, int]:
    return {name: each.replays for name, each in backend.replayed.items() if each.replays}


def passes(
    b: HopperBackend, x: Tensor, w: Tensor, g: Tensor, formats: Any, out: Tensor | None, seeds: GradientKeys
) -> list[Any]:
    """Y; ∂L/∂X before a reduction; ∂L/∂X and ∇W; and the operand of G. What calls get is at aligned addresses."""
    fprop, dgrad, wgrad = formats
    w_row, w_col = map(aligned, b.quantize_weight(w, fprop, dgrad))
    y, kept = b.forward(x, w_row, fprop, wgrad)
    assert kept is not None
    d_local, col = b.input_gradient(g, w_col, dgrad, wgrad, seeds)
    whole = b.backward(g, w_col, (same(kept[0]), kept[1]), dgrad, wgrad, seeds, out=out)
    return [y, d_local, *whole, *vars(col).values()]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for place, (ours, truth) in enumerate(zip(found, expected, strict=True)):
        if isinstance(truth, Tensor):
            assert torch.equal(ours.float(), truth.float()), place
            assert (ours.dtype, ours.stride()) == (truth.dtype, truth.stride()), place
        else:
            assert ours == truth, place


# -- the methods of the backend ----------------------------------------------------------------------------------
@pytest.mark.parametrize("accumulates", [True, False], ids=["main_grad", "no main_grad"])
@pytest.mark.parametrize("formats", UNIFORM + MIXED, ids=str)
@pytest.mark.parametrize("shape", [EVEN, TAILS, REFUSED[2]], ids=str)
def test_a_pass_has_the_bits_of_python_and_of_its_parts(
    pair: Pair, shape: tuple[int, int, int], formats: Any, accumulates: bool
) -> None:
    replayed, python = pair
    _, n, k = shape
    cols = torch.arange(n)
    for call in range(CALLS):
        x, w, g = same(tuple(each + call for each in operands(*shape)))
        outs = [aligned(torch.full((n, k), 0.5)) if accumulates else None for _ in range(3)]
        seeds = GradientKeys(2**63 + call, call, cols)
        cubes = x.view(1, *x.shape), w, g.view(1, *g.shape)
        found, expected = (passes(b, *cubes, formats, out, seeds) for b, out in zip(pair, outs[:2], strict=True))
        assert_equal(found, expected)
        y, d, grad_weight = microbatch(python, x, w, g, formats, outs[2], seeds)  # type: ignore[arg-type]
        assert_equal(found[:4], [y[None], d[None], d[None], grad_weight])
        assert not any(each._is_view() for each in found[:3])
        assert outs[0] is None or found[3].data_ptr() == outs[0].data_ptr()
    counts = replays(replayed)
    assert {name: counts[name] for name in PASSES[::2]} == dict.fromkeys(PASSES[::2], CALLS - 2)
    assert counts["input_gradient"] >= CALLS - 2  # the first backward calls it as well


def test_keys_of_every_call_are_used(pair: Pair, quantizers: LaunchedQuantizers) -> None:
    _, w, g = same(operands(*EVEN))
    side, cols = aligned(pair[1].quantize_weight(w, None, FP4)[1]), torch.arange(EVEN[1])
    before, seen = quantizers.launches, set()
    for call in range(CALLS):
        keys = GradientKeys(2**64 - 1 - call, 2**40 + call, cols)
        (d, col), expected = (b.input_gradient(g, side, FP4, FP4, keys) for b in pair)
        assert_equal([d, col.values], [expected[0], expected[1].values])
        seen.add(float(d.float().sum()))
    assert len(seen) == CALLS
    assert quantizers.launches == before + CALLS - 2


def test_a_pass_that_cannot_be_recorded_is_replayed_in_parts(
    extension: Any, quantizers: LaunchedQuantizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library without addresses multiplies."""
    python = HopperBackend(quantizers, ScaledProducts(scaled_mm, emulated_cublaslt(monkeypatch)))  # type: ignore[arg-type]
    replayed = ReplayedHopperBackend(extension, python)
    for call in range(2 * CALLS):
        x, w, g = same(operands(*EVEN))
        seeds = GradientKeys(call, call + 1, torch.arange(EVEN[1]))
        assert_equal(*(passes(b, x, w, g, (FP4,) * 3, None, seeds) for b in (replayed, python)))
    assert [replayed.replayed[name].kept for name in (*PASSES, "fprop")] == [0] * 4
    assert {"weight", "input", "gradient"} == set(replays(replayed))


def test_transforms_and_token_shards_run_in_parts(pair: Pair) -> None:
    """Their signs and first rows differ from call to call, or from rank to rank."""
    x, w, g = same(operands(*EVEN))
    sides = tuple(map(aligned, pair[1].quantize_weight(w, NVFP4, FP4)))
    cols = torch.arange(EVEN[1])
    for signs in range(CALLS):
        kept = [b.forward(x, sides[0], NVFP4, NVFP4, rotation=Rotation(signs))[1] for b in pair]
        assert all(each is not None and each[1](*each[0]).rotation == Rotation(signs) for each in kept)
        keys = GradientKeys(signs, signs, cols, first_row=128)
        assert_equal(*([b.input_gradient(g, sides[1], FP4, FP4, keys)[0]] for b in pair))
        assert_equal(*([*b.backward(g, sides[1], ((x,), kept[0][1]), FP4, BF16, keys, out=None)][:1] for b in pair))  # type: ignore[index]
    assert not set(PASSES) & set(replays(pair[0]))


def test_gradients_in_other_layouts_and_a_single_token(pair: Pair) -> None:
    """G as autograd expands or transposes it, and X without a dimension of tokens."""
    replayed, python = pair
    x, w, g = same(operands(*EVEN))
    cols = torch.arange(EVEN[1])
    sides = tuple(map(aligned, python.quantize_weight(w, FP4, FP4)))
    layouts = [g[:1, :1].expand(EVEN[0], EVEN[1]), g.t().contiguous().t(), g.view(2, -1, EVEN[1]).transpose(0, 1)]
    for given in (aligned(each) for each in layouts[1:]):
        for call in range(CALLS):
            keys = GradientKeys(call, call, cols)
            found, expected = (b.input_gradient(given, sides[1], FP4, FP4, keys)[0] for b in pair)
            assert_equal([found], [expected])
            assert found.shape == (*given.shape[:-1], EVEN[2])
    assert replays(replayed)["input_gradient"] == 2 * (CALLS - 2)
    for call in range(CALLS):
        assert_equal(
            *([b.input_gradient(layouts[0], sides[1], FP8, FP8, GradientKeys(None, None, cols))[0]] for b in pair)
        )
        (token,) = same((x[call],))
        found, expected = (b.forward(token, sides[0], FP4, None)[0] for b in pair)
        assert found.shape == (EVEN[1],)
        assert_equal([found], [expected])
    assert replays(replayed)["forward"] == CALLS - 2


def test_operands_that_differ_in_their_tensors_alone_are_made_by_one_function(pair: Pair) -> None:
    x = operands(*EVEN)[0]
    for fmt in (FP8, FP4, TENSOR, BF16, NVFP4):
        first, second = (pair[1].quantize_input(x + i, None, fmt)[1] for i in range(2))
        assert disassemble(first)[1] is disassemble(second)[1]
    first, second = (Plain(x, NVFP4, rotation=Rotation(0, torch.ones(()))) for _ in range(2))
    assert disassemble(first)[1] is not disassemble(second)[1]


# -- a linear ----------------------------------------------------------------------------------------------------
def linear(b: HopperBackend, formats: Any, group: Any = None) -> tuple[torch.nn.Parameter, LinearCall]:
    """A weight with a ``main_grad``, and the call of its linear; with a group, whose input gradient is reduced."""
    _, n, k = EVEN
    weight = torch.nn.Parameter(same((operands(*EVEN)[1],))[0])
    weight.main_grad = same((torch.zeros(n, k),))[0]  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    context, features = StepContext(backend=b, seed=3, step=4), (torch.arange(n), torch.arange(k))
    handle = LinearHandle(
        LinearId(1, "mlp.linear_fc1"), "column", n, k, 0, 0, 1, *features, context, torch.nn.Module(), formats
    )
    call = LinearCall(handle, b, sequence_parallel=False, allreduce_dgrad=group is not None, tp_group=group)
    handle.weights.get(b, weight, *formats[:2])
    handle.weights._sides = tuple(map(aligned, handle.weights._sides))  # type: ignore[arg-type, assignment]
    return weight, call


def trained(weight: torch.nn.Parameter, call: LinearCall, microbatches: int) -> list[Tensor]:
    """Y and ∂L/∂X of each microbatch, then main_grad. Saved tensors come back at aligned addresses, as on a GPU."""
    found: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, aligned):
        for index in range(microbatches):
            x, _, g = same(tuple(each.view(2, -1, each.shape[1]) + index for each in operands(*EVEN)))
            y = QuantizedLinear.apply(x.requires_grad_(), weight, None, call)  # type: ignore[no-untyped-call]
            y.backward(g)
            assert x.grad is not None
            assert weight.grad is not None  # a dummy
            weight.grad = None
            found += [y.detach(), x.grad]
    assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    return [*found, weight.main_grad.clone()]  # type: ignore[operator]


@pytest.mark.parametrize("formats", [*UNIFORM, MIXED[0], MIXED[2], MIXED[4]], ids=str)
def test_a_forward_and_a_backward_of_a_linear_are_one_replay_each(pair: Pair, formats: Any) -> None:
    ours, truth = (linear(b, formats) for b in pair)
    assert_equal(trained(*ours, CALLS), trained(*truth, CALLS))
    before = replays(pair[0])
    assert_equal(trained(*ours, 5), trained(*truth, 5))
    after = replays(pair[0])
    assert after == before | {"forward": before["forward"] + 5, "backward": before["backward"] + 5}
    assert ours[1].handle.backwards == truth[1].handle.backwards == CALLS + 5


def test_a_linear_starts_the_reduction_of_its_input_gradient_before_wgrad(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(owner: Any, name: str) -> None:
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **named: (order.append(name), method(*a, **named))[1])

    for name in ("forward", "input_gradient", "wgrad", "backward"):
        noted(pair[0], name)
    noted(autograd, "start_all_reduce")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = [trained(*linear(b, (FP4,) * 3, dist.group.WORLD), CALLS) for b in pair]
    finally:
        dist.destroy_process_group()
    assert_equal(*found)
    assert order[: 4 * CALLS] == ["forward", "input_gradient", "start_all_reduce", "wgrad"] * CALLS
    counts = replays(pair[0])
    assert (counts["forward"], counts["input_gradient"]) == (CALLS - 2, CALLS - 2)


def test_forwards_without_a_backward_quantise_for_fprop_alone(pair: Pair) -> None:
    """As validation and recomputation do, also in inference mode."""
    weight, call = linear(pair[0], (FP4,) * 3)
    alone = call._replace(has_backward=False)
    (x,) = same((operands(*EVEN)[0],))
    expected = QuantizedLinear.apply(x, weight, None, call).detach()  # type: ignore[no-untyped-call]
    for mode in (torch.no_grad, torch.inference_mode):
        for _ in range(CALLS):
            with mode():
                y = QuantizedLinear.apply(x, weight, None, alone)  # type: ignore[no-untyped-call]
            assert torch.equal(y, expected)
            assert y.is_inference() == (mode is torch.inference_mode)
    assert replays(pair[0])["forward"] == 2 * (CALLS - 2)


def test_an_input_that_was_changed_is_refused_though_a_replay_saved_it(pair: Pair) -> None:
    """In bf16 X itself is saved."""
    weight, call = linear(pair[0], (FP8, FP4, BF16))
    for index in range(CALLS):
        x, _, g = same(operands(*EVEN))
        y = QuantizedLinear.apply(x, weight, None, call)  # type: ignore[no-untyped-call]
        if index < CALLS - 1:
            y.backward(g)
            continue
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(g)
        y = QuantizedLinear.apply(x, weight, None, call)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            weight.add_(1)
        with pytest.raises(SnipError, match="its weight was changed"):
            y.backward(g)
    assert replays(pair[0])["forward"] >= 2
