"""The Hopper backend replayed in C++, on a CPU: the bits of the backend that runs in Python, and what is replayed.

Quantisers run in torch, and products by functions of C addresses that emulate cuBLASLt on host memory. What Triton
launches is tested in tests/gpu/test_host_path.py.
"""

from __future__ import annotations

import ctypes
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from snip_megatron.gemm import cublaslt
from snip_megatron.gemm.cublaslt import CublasLt
from snip_megatron.gemm.deepgemm import DeepGemm
from snip_megatron.gemm.hopper import HopperBackend
from snip_megatron.gemm.operands import GradientKeys
from snip_megatron.gemm.replayed import TYPES, ReplayedHopperBackend, difference
from snip_megatron.gemm.scaled import ScaledProducts
from snip_megatron.quantization import packed
from snip_megatron.quantization.hadamard import Rotation
from snip_megatron.quantization.kernels import replay_build
from snip_megatron.quantization.kernels.replay import Replayed

from .emulated_cublaslt import EmulatedLibrary, emulated_cublaslt
from .emulated_scaled_mm import scaled_mm
from .test_hopper import BF16, EVEN, FP4, FP8, MIXED, NVFP4, REFUSED, TAILS, TENSOR, UNIFORM, operands

pytest.importorskip("triton")
CALLS = 4  # in Python, recorded, and replayed


@pytest.fixture(scope="module")
def extension() -> Any:
    found = replay_build.compiled_extension()
    replay_build.configure(found, launch=0, types=TYPES, hooks=None, stream=lambda _: 0)
    return found


class AddressedLibrary(EmulatedLibrary):
    """The emulated functions that a replay calls, as C functions."""

    def __init__(self) -> None:
        super().__init__()
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.products = 0
        self.cublasLtMatmul = ctypes.CFUNCTYPE(ctypes.c_int, *[pointer] * 14, size, pointer)(self._multiply)  # type: ignore[assignment]
        kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer, ctypes.c_int, pointer, size)
        self.cublasLtMatmulDescSetAttribute = kind(self._set_by_address)  # type: ignore[assignment]

    def _multiply(self, *given: Any) -> int:
        self.products += 1
        pointers = [ctypes.c_void_p(each) for each in given]
        op = self.objects[given[1]]
        factors = (given[2], given[7])
        if op.get(cublaslt._POINTER_MODE) == cublaslt._ON_DEVICE:
            pointers[2], pointers[7] = (ctypes.c_void_p(each) for each in factors)
        else:
            pointers[2], pointers[7] = (ctypes.byref(ctypes.c_float.from_address(each)) for each in factors)  # type: ignore[assignment]
        algorithm: Any = ctypes.byref(cublaslt._Heuristic.from_address(given[12]))
        workspace = None if given[13] is None else pointers[13]
        with _disable_current_modes():  # a recording does not see what a library computes
            return EmulatedLibrary.cublasLtMatmul(self, *pointers[:12], algorithm, workspace, *given[14:])

    def _set_by_address(self, operation: int, name: int, value: int, size: int) -> int:
        kind = {1: ctypes.c_int8, 4: ctypes.c_int32, 8: ctypes.c_void_p}[size]
        self.objects[operation][name] = kind.from_address(value).value
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> CublasLt:
    return emulated_cublaslt(monkeypatch, AddressedLibrary)


def pair(extension: Any, products: ScaledProducts) -> tuple[ReplayedHopperBackend, HopperBackend]:
    python = HopperBackend(packed, products)
    return ReplayedHopperBackend(extension, python), python


def aligned(value: Any) -> Any:
    """Copies of a tensor, or of the tensors of an operand, whose addresses have the same alignment, as on a GPU."""
    if isinstance(value, Tensor):
        return same((value,))[0]
    if not is_dataclass(value):
        return value
    return replace(value, **{f.name: aligned(getattr(value, f.name)) for f in fields(value)})  # type: ignore[type-var]


def same(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    found = []
    for tensor in tensors:
        memory = torch.empty(tensor.numel() * tensor.itemsize + 512, dtype=torch.uint8)
        start = -memory.data_ptr() % 256
        whole = memory[start : start + tensor.numel() * tensor.itemsize].view(tensor.dtype)
        found.append(whole.as_strided(tensor.shape, tensor.stride(), whole.storage_offset()).copy_(tensor))
    return tuple(found)


def microbatch(
    b: HopperBackend, x: Tensor, w: Tensor, g: Tensor, formats: Any, out: Tensor, seeds: GradientKeys
) -> list[Tensor]:
    """Y, ∂L/∂X and ∇W as a linear gets them, from operands at aligned addresses."""
    fprop, dgrad, wgrad = formats
    x_row, x_col = map(aligned, b.quantize_input(x, fprop, wgrad))
    w_row, w_col = map(aligned, b.quantize_weight(w, fprop, dgrad))
    g_row, g_col = map(aligned, b.quantize_gradient(g, dgrad, wgrad, seeds))
    y, d = b.fprop(x_row, w_row, dtype=x.dtype), b.dgrad(g_row, w_col, dtype=g.dtype)
    return [y, d, b.wgrad(g_col, x_col, out=out)]


def assert_bits(
    replayed: ReplayedHopperBackend, python: HopperBackend, shape: tuple[int, int, int], formats: Any
) -> None:
    """Y, ∂L/∂X and main_grad of several microbatches."""
    _, n, k = shape
    cols = torch.arange(n)
    for call in range(CALLS):
        x, w, g = same(tuple(each + call for each in operands(*shape)))
        grads = [aligned(torch.full((n, k), 0.5)) for _ in range(2)]
        seeds = GradientKeys(2**63 + call, call, cols)
        found, expected = (
            microbatch(b, x, w, g, formats, out, seeds) for b, out in zip((replayed, python), grads, strict=True)
        )
        for name, ours, truth in zip(("Y", "dX", "dW"), found, expected, strict=True):
            assert torch.equal(ours, truth), name
            assert (ours.dtype, ours.stride()) == (truth.dtype, truth.stride()), name
        assert found[2].data_ptr() == grads[0].data_ptr()


@pytest.mark.parametrize("formats", UNIFORM + MIXED, ids=str)
@pytest.mark.parametrize("shape", [EVEN, TAILS, REFUSED[2]], ids=str)
def test_bits_are_those_of_python(extension: Any, shape: tuple[int, int, int], formats: Any) -> None:
    replayed, python = pair(extension, ScaledProducts(scaled_mm))
    assert_bits(replayed, python, shape, formats)
    counts = {name: replayed.replayed[name].replays for name in ("input", "weight", "fprop", "dgrad", "wgrad")}
    assert counts == dict.fromkeys(counts, CALLS - 2)


@pytest.mark.parametrize("formats", [(FP8, FP8, FP8), (TENSOR, TENSOR, TENSOR), (FP8, TENSOR, BF16)], ids=str)
def test_products_of_cublaslt_are_replayed_by_address(extension: Any, library: CublasLt, formats: Any) -> None:
    emulated: Any = library._library
    replayed, python = pair(extension, ScaledProducts(scaled_mm, library))
    assert_bits(replayed, python, EVEN, formats)
    names = ["fprop", "dgrad", "wgrad"][: 3 if formats[2] is not BF16 else 2]
    assert {name: replayed.replayed[name].replays for name in names} == dict.fromkeys(names, CALLS - 2)
    assert emulated.products == 2 * 3 * CALLS


def test_factors_in_device_memory_are_read_at_each_call(extension: Any, library: CublasLt) -> None:
    def scaled(_: Any, a: Tensor, b: Tensor, out: Tensor, factor: Tensor) -> Tensor:
        assert library.accumulate_scaled(a, b, out, factor)
        return out

    replayed = Replayed(extension, scaled, patience=0)
    for seed in range(4):
        draws = torch.Generator().manual_seed(seed)
        a, b, out = (torch.randn(64, 32, generator=draws) for _ in range(3))
        a, b, out, factor = same((a.bfloat16(), b.bfloat16(), out[:32].clone(), torch.tensor([2.0 + seed])))
        expected = out.double() + float(factor) * (a.double().t() @ b.double())
        torch.testing.assert_close(replayed.call((), a, b, out, factor).double(), expected, rtol=1e-5, atol=1e-5)
    assert replayed.replays == 3


def test_a_library_without_addresses_stays_in_python(extension: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed, python = pair(extension, ScaledProducts(scaled_mm, emulated_cublaslt(monkeypatch)))
    assert_bits(replayed, python, EVEN, (FP8, FP8, FP8))
    assert replayed.replayed["fprop"].kept == replayed.replayed["wgrad"].kept == 0
    assert replayed.replayed["input"].replays == CALLS - 2


def test_deepgemm_is_called_with_the_operands_of_the_call(extension: Any) -> None:
    calls = []

    def gemm(a: Any, b: Any, out: Tensor, c: Tensor | None = None, **named: Any) -> None:
        calls.append(named["recipe"])
        sides = []
        for (values, scale), tile in zip((a, b), (1, 1 if named["recipe"][1] == 1 else 128), strict=True):
            wide = scale.repeat_interleave(tile, 0)[: len(values)].repeat_interleave(128, 1)
            sides.append(values.float() * wide[:, : values.shape[1]])
        product = sides[0] @ sides[1].t()
        out.copy_(product if c is None else c + product)

    products = ScaledProducts(scaled_mm, faster=DeepGemm(gemm, accumulates=True))
    replayed, python = pair(extension, products)
    assert_bits(replayed, python, (256, 384, 640), (FP8, FP8, FP8))
    assert set(calls) == {(1, 128, 128), (1, 1, 128)}
    assert replayed.replayed["fprop"].replays == replayed.replayed["wgrad"].replays == CALLS - 2


def test_an_amax_of_all_shards_and_rotations_reach_the_quantiser(extension: Any) -> None:
    replayed, python = pair(extension, ScaledProducts(scaled_mm))
    for factor in (1.0, 3.0, 7.0):
        x, amax = same((operands(*EVEN)[0], torch.tensor(factor)))
        ours, truth = (b.quantize_input(x, TENSOR, TENSOR, amax=amax)[1] for b in (replayed, python))
        assert torch.equal(ours.scale, truth.scale)
    assert replayed.replayed["input"].replays == 1
    for signs in (1, 2, 3, 4):
        sides = [b.quantize_input(x, NVFP4, NVFP4, rotation=Rotation(signs)) for b in (replayed, python)]
        assert sides[0][1].rotation == sides[1][1].rotation == Rotation(signs)
    assert replayed.replayed["input"].kept == 1
    w = aligned(python.quantize_weight(operands(*EVEN)[1], NVFP4, NVFP4)[0])
    for signs in (1, 2, 3, 4):
        sides = [b.forward(x, w, NVFP4, NVFP4, rotation=Rotation(signs))[1] for b in (replayed, python)]
        assert sides[0][1](*sides[0][0]).rotation == sides[1][1](*sides[1][0]).rotation == Rotation(signs)
    assert replayed.replayed["forward"].kept == 0


def test_keys_on_the_device_and_columns_that_are_no_pairs_are_kept_apart(extension: Any) -> None:
    replayed, python = pair(extension, ScaledProducts(scaled_mm))
    _, _, g = same(operands(*EVEN))
    even, odd = torch.arange(EVEN[1]), torch.arange(EVEN[1]) * 3
    words = torch.tensor([3, -4], dtype=torch.int32)
    for keys in (GradientKeys(5, 6, even), GradientKeys(5, 6, odd), GradientKeys(words, words.clone(), even)):
        for _ in range(5):
            found = [b.quantize_gradient(g, FP4, FP4, keys) for b in (replayed, python)]
            for ours, truth in zip(*found, strict=True):
                assert torch.equal(ours.values.view(torch.uint8), truth.values.view(torch.uint8))
                assert torch.equal(ours.scale, truth.scale)


def test_other_bits_and_failures_are_found_before_the_first_use(
    extension: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed, python = pair(extension, ScaledProducts(scaled_mm))
    cpu = torch.device("cpu")
    assert difference(replayed, python, cpu) is None
    with monkeypatch.context() as patch:
        patch.setattr(ReplayedHopperBackend, "dgrad", lambda *a, **named: HopperBackend.dgrad(*a, **named) + 1)
        assert difference(replayed, python, cpu) == "C++ does not give the bits of Python on this device"

    for kind in (RuntimeError, TypeError, AttributeError):

        def fails(*_: Any, kind: type[Exception] = kind) -> Any:
            raise kind("a kernel cannot be launched")

        monkeypatch.setattr(replayed, "_fprop", fails)
        assert difference(replayed, python, cpu) == "C++ fails: a kernel cannot be launched"


def test_a_refused_argument_is_refused_as_in_python(extension: Any) -> None:
    replayed, python = pair(extension, ScaledProducts(scaled_mm))
    for b in (replayed, python):
        with pytest.raises(Exception, match=r"2-D tensor|shape") as error:
            b.quantize_input(torch.ones(2, 3, 4), FP8, FP8)
    assert replayed.name == python.name == "hopper"
    assert error.value is not None
