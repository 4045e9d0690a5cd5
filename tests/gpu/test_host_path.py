"""Calls of the Hopper backend that C++ replays have the bits of those that run in Python, and are really replayed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from gpu_linear import Formats, Linear
from torch import Tensor

from snip_megatron.gemm.hopper import HopperBackend
from snip_megatron.gemm.operands import GradientKeys
from snip_megatron.gemm.replayed import ReplayedHopperBackend
from snip_megatron.gemm.selection import select_backend
from snip_megatron.precision import Format

BF16, FP8, FP4, TENSOR, NVFP4 = Format.BF16, Format.FP8, Format.FP4, Format.FP8_TENSOR, Format.NVFP4
FORMATS: list[Formats] = [
    (FP8,) * 3, (FP4,) * 3, (TENSOR,) * 3, (NVFP4,) * 3, (Format.MXFP8,) * 3,
    (FP8, FP4, BF16), (BF16, TENSOR, FP4), (TENSOR, FP8, FP4), (FP4, BF16, FP8),
]  # fmt: skip
SHAPES = [(256, 384, 512), (1000, 1040, 4224), (130, 136, 208), (4, 128, 128)]
MICROBATCHES = 3


@pytest.fixture(scope="module", autouse=True)
def _hopper() -> Iterator[None]:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU (sm_90)")
    yield
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def replayed() -> ReplayedHopperBackend:
    selection = select_backend("hopper")
    assert isinstance(selection.backend, ReplayedHopperBackend), selection.reason
    return selection.backend


@pytest.fixture(scope="module")
def python(replayed: ReplayedHopperBackend) -> HopperBackend:
    return replayed.python


def operands(t: int, n: int, k: int, seed: int, device: str = "cuda") -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device=device).manual_seed(seed)
    x, g = (torch.randn(t, size, device=device, generator=generator) for size in (k, n))
    return x.bfloat16().requires_grad_(), (1e-3 * g).bfloat16()


def step(backend: HopperBackend, shape: tuple[int, int, int], formats: Formats, device: str = "cuda") -> list[Tensor]:
    """Y and ∂L/∂X of each microbatch, then main_grad. The weight is quantised in the first one."""
    t, n, k = shape
    linear, found = Linear(backend, n, k, formats, device=device), []
    for microbatch in range(MICROBATCHES):
        x, g = operands(t, n, k, microbatch, device)
        y = linear(x)
        y.backward(g)
        assert x.grad is not None
        found += [y.detach(), x.grad]
    return [*found, linear.weight.main_grad]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for place, (ours, truth) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(ours, truth), place
        assert (ours.dtype, ours.stride()) == (truth.dtype, truth.stride()), place


def replays(backend: ReplayedHopperBackend) -> dict[str, int]:
    return {name: found.replays for name, found in backend.replayed.items()}


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_python(
    replayed: ReplayedHopperBackend, python: HopperBackend, shape: tuple[int, int, int], formats: Formats
) -> None:
    expected = step(python, shape, formats)
    for _ in range(2):
        assert_equal(step(replayed, shape, formats), expected)
    before = replays(replayed)
    step(replayed, shape, formats)
    taken = {name: count - before[name] for name, count in replays(replayed).items() if count != before[name]}
    if shape in SHAPES[:2]:  # others may be padded or dequantised in torch
        assert taken == {"weight": 1, "forward": MICROBATCHES, "backward": MICROBATCHES}


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_an_input_gradient_that_is_reduced_before_wgrad_is_one_replay(
    replayed: ReplayedHopperBackend, python: HopperBackend, formats: Formats
) -> None:
    t, n, k = SHAPES[0]
    x, g = (each.detach() for each in operands(t, n, k, 0))
    w, cols = torch.randn(n, k, device="cuda").bfloat16(), torch.arange(n, device="cuda")
    fprop, dgrad, wgrad = formats
    w_row, w_col = python.quantize_weight(w, fprop, dgrad)
    _, kept = python.forward(x, w_row, fprop, wgrad)
    assert kept is not None
    tensors, assemble = kept
    for call in range(4):
        keys, pair = GradientKeys(call, 2**63 + call, cols), []
        for backend in (replayed, python):
            d, col = backend.input_gradient(g.view(2, -1, n), w_col, dgrad, wgrad, keys)
            pair.append([d, backend.wgrad(col, assemble(*tensors), out=torch.ones(n, k, device="cuda"))])
        assert_equal(*pair)
        if call == 1:
            before = replays(replayed)
    after = replays(replayed)
    assert [after[name] - before[name] for name in ("input_gradient", "wgrad")] == [2, 2]


def test_seeds_of_every_microbatch_and_step_are_used(replayed: ReplayedHopperBackend, python: HopperBackend) -> None:
    cols = torch.arange(384, device="cuda")
    _, g = operands(256, 384, 512, 0)
    before, seen = replays(replayed)["gradient"], set()
    for seed in range(6):
        keys = GradientKeys(2**63 + seed, seed, cols)
        found, expected = ([s.values.view(torch.uint8) for s in b.quantize_gradient(g, FP4, FP4, keys)]
                           for b in (replayed, python))  # fmt: skip
        assert_equal(found, expected)
        seen.add(tuple(int(each.long().sum()) for each in found))
    assert len(seen) == 6
    assert replays(replayed)["gradient"] >= before + 4


def test_swiglu_is_replayed(replayed: ReplayedHopperBackend, python: HopperBackend) -> None:
    y, d = operands(512, 256, 512, 0)[0].detach(), operands(512, 256, 512, 1)[1]
    cols, before = torch.arange(512, device="cuda"), replays(replayed)
    for seed in range(4):
        keys = GradientKeys(seed, seed + 1, cols)
        for fmt in (FP8, FP4):
            pairs = [
                [*b.quantize_swiglu(y, fmt, fmt), *b.quantize_swiglu_gradient(d, y, fmt, fmt, keys)]
                for b in (replayed, python)
            ]
            for ours, truth in zip(*pairs, strict=True):
                assert torch.equal(ours.values.view(torch.uint8), truth.values.view(torch.uint8))
                assert torch.equal(ours.scale, truth.scale)
    after = replays(replayed)
    assert all(after[name] - before[name] >= 4 for name in ("swiglu", "swiglu_gradient"))


def test_swiglu_with_its_amax_is_replayed(replayed: ReplayedHopperBackend, python: HopperBackend) -> None:
    """A replay zeroes the amax again: each call has smaller numbers than the one before."""
    before = replays(replayed)
    for call in range(4):
        y, d = (each.detach() / 4**call for each in (operands(512, 256, 512, 0)[0], operands(512, 256, 512, 1)[1]))
        found, expected = ([*b.swiglu_with_amax(y), *b.swiglu_gradient_with_amax(d, y)] for b in (replayed, python))
        assert all(map(torch.equal, found, expected))
        assert found[1] == found[0].abs().amax()
        assert found[3] == found[2].abs().amax()
    after = replays(replayed)
    assert all(after[name] - before[name] >= 2 for name in ("swiglu_amax", "swiglu_gradient_amax"))


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_replays_can_be_captured_in_a_graph(
    replayed: ReplayedHopperBackend, python: HopperBackend, formats: Formats
) -> None:
    t, n, k = 256, 384, 512
    x, g = (each.detach() for each in operands(t, n, k, 0))
    w, cols = torch.randn(n, k, device="cuda").bfloat16(), torch.arange(n, device="cuda")
    words = torch.tensor([[3, -4], [5, 6]], dtype=torch.int32, device="cuda")
    out = torch.zeros(n, k, device="cuda")

    def run(b: HopperBackend) -> list[Tensor]:
        fprop, dgrad, wgrad = formats
        x_row, x_col = b.quantize_input(x, fprop, wgrad)
        w_row, w_col = b.quantize_weight(w, fprop, dgrad)
        g_row, g_col = b.quantize_gradient(g, dgrad, wgrad, GradientKeys(words[0], words[1], cols))
        y, d = b.fprop(x_row, w_row, dtype=x.dtype), b.dgrad(g_row, w_col, dtype=g.dtype)
        b.wgrad(g_col, x_col, out=out)
        whole, kept = b.forward(x, w_row, fprop, wgrad)
        assert kept is not None
        keys = GradientKeys(words[0], words[1], cols)
        return [y, d, whole, *b.backward(g, w_col, kept, dgrad, wgrad, keys, out=out)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(replayed)
    torch.cuda.current_stream().wait_stream(stream)
    graph, before = torch.cuda.CUDAGraph(), replays(replayed)
    with torch.cuda.graph(graph):
        captured = run(replayed)
    after = replays(replayed)
    names = ("input", "fprop", "dgrad", "wgrad", "forward", "backward")
    assert all(after[name] == before[name] + 1 for name in names)
    for seed in range(2):
        fresh = operands(t, n, k, seed + 5)
        x.copy_(fresh[0].detach())
        g.copy_(fresh[1])
        words.add_(7)
        out.zero_()
        graph.replay()
        found = [each.clone() for each in captured]
        out.zero_()
        assert_equal(found, run(python))


def test_a_thread_that_has_not_used_the_device_replays(replayed: ReplayedHopperBackend, python: HopperBackend) -> None:
    x = operands(256, 384, 512, 0)[0].detach()
    for _ in range(2):
        expected = replayed.quantize_input(x, FP8, FP8)
    found = []
    thread = threading.Thread(target=lambda: found.append(replayed.quantize_input(x, FP8, FP8)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(found[0][0].scale, expected[0].scale)


def test_another_device_than_the_current_one(replayed: ReplayedHopperBackend, python: HopperBackend) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for formats in FORMATS[:3]:
        expected = step(python, SHAPES[0], formats, "cuda:1")
        for _ in range(3):
            assert_equal(step(replayed, SHAPES[0], formats, "cuda:1"), expected)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("formats", FORMATS[:3], ids=str)
def test_memory_is_that_of_python_at_most(
    replayed: ReplayedHopperBackend, python: HopperBackend, formats: Formats
) -> None:
    peaks = []
    for backend in (python, replayed):
        for _ in range(3):  # the first calls compile and record
            gc.collect()  # a linear and its handle refer to each other
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step(backend, (1024, 1024, 2048), formats)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        gc.collect()
        assert torch.cuda.memory_allocated() == before
    assert peaks[1] <= peaks[0]


def test_memory_that_is_used_up_is_torch_s_own_error(replayed: ReplayedHopperBackend) -> None:
    """The preparation before the first step catches it."""
    x = torch.randn(8192, 8192, device="cuda").bfloat16()
    for _ in range(2):
        replayed.quantize_input(x, FP8, FP8)
    before = replays(replayed)["input"]
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (16 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            replayed.quantize_input(x, FP8, FP8)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert replays(replayed)["input"] == before + 1
    replayed.quantize_input(x, FP8, FP8)
