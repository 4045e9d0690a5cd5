"""DeepGEMM behind the products: the layouts it is given, what it is not asked for, and when it is trusted."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from snip_megatron.errors import SnipError
from snip_megatron.gemm import deepgemm
from snip_megatron.gemm.deepgemm import DeepGemm, difference, find_nvcc
from snip_megatron.gemm.hopper import HopperBackend
from snip_megatron.gemm.operands import CachedPair, OperandSpec
from snip_megatron.gemm.scaled import ScaledProducts
from snip_megatron.precision import Format, Gemm
from snip_megatron.quantization import packed

from .emulated_scaled_mm import TILE, scaled_mm

Pair = tuple[Tensor, Tensor]


def fp8_gemm_nt(
    a: Pair, b: Pair, d: Tensor, c: Tensor | None = None, *, recipe: tuple[int, int, int], disable_ue8m0_cast: bool
) -> None:
    """``deep_gemm.fp8_gemm_nt`` in exact arithmetic, with the layouts that it demands on Hopper."""
    assert disable_ue8m0_cast
    sides = []
    for (values, scale), tile_rows in zip((a, b), recipe[:2], strict=True):
        rows, depth = values.shape
        assert values.is_contiguous()
        assert scale.shape == (-(-rows // tile_rows), depth // TILE), f"scales {tuple(scale.shape)}"
        assert scale.stride() == ((1, rows) if tile_rows == 1 else (depth // TILE, 1)), f"strides {scale.stride()}"
        wide = scale.double().repeat_interleave(tile_rows, 0)[:rows].repeat_interleave(TILE, 1)
        sides.append(values.double() * wide)
    assert c is None or c is d, "accumulates in place"
    assert d.dtype is (torch.float32 if recipe == (1, 1, 128) else torch.bfloat16), f"no kernel for {d.dtype}"
    product = sides[0] @ sides[1].t()
    d.copy_(product if c is None else c.double() + product)


class Library:
    """cuBLASLt in exact arithmetic; ``wrong``: added to every product."""

    def __init__(self, wrong: float = 0.0) -> None:
        self.wrong = wrong

    def multiply(self, a: Any, b: Any, dtype: torch.dtype) -> Tensor:
        return ScaledProducts(scaled_mm).multiply(a, b, dtype) + self.wrong

    def accumulate(self, a: Any, b: Any, out: Tensor) -> bool:
        out.copy_(out.double() + a.dequantize().double() @ b.dequantize().double().t() + self.wrong)
        return True


def matrix(rows: int, cols: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("depth", [128, 512, 640, 1000])  # blocks with and without cuBLASLt's padding
@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_equal_the_other_librarys(depth: int, fmt: str, dtype: torch.dtype) -> None:
    a = packed.quantize_tiles(matrix(64, depth), fmt, None).row
    b = packed.quantize_blocks(matrix(48, depth, 1), fmt, None).row
    found = ScaledProducts(scaled_mm, faster=DeepGemm(fp8_gemm_nt)).multiply(a, b, dtype)
    assert torch.equal(found, ScaledProducts(scaled_mm).multiply(a, b, dtype))


@pytest.mark.parametrize("accumulates", [False, True])
def test_wgrad_runs_there_only_where_it_is_asked_for(accumulates: bool) -> None:
    calls = []

    def gemm(*args: Any, **options: Any) -> None:
        calls.append(options["recipe"])
        fp8_gemm_nt(*args, **options)

    g, x = (packed.quantize_tiles(matrix(256, 64, seed), None, "fp8").col for seed in (0, 1))
    out = torch.ones(64, 64)
    ScaledProducts(scaled_mm, faster=DeepGemm(gemm, accumulates)).accumulate(g, x, out)
    assert calls == ([(1, 1, 128)] if accumulates else [])
    torch.testing.assert_close(out, 1 + g.dequantize() @ x.dequantize().t(), rtol=1e-5, atol=1e-4)


def test_what_it_has_no_layout_for_runs_elsewhere() -> None:
    def gemm(*args: Any, **options: Any) -> None:
        raise AssertionError("must not be asked")

    products = ScaledProducts(scaled_mm, faster=DeepGemm(gemm, accumulates=True))
    x = matrix(66, 256)  # rows: no multiple of 4
    blocks = packed.quantize_blocks(matrix(48, 256, 1), "fp8", None).row
    assert products.multiply(packed.quantize_tiles(x, "fp8", None).row, blocks, torch.bfloat16).shape == (66, 48)
    whole = packed.quantize_tensor(matrix(64, 256)).row
    other = packed.quantize_tensor(matrix(48, 256, 1)).row
    assert products.multiply(whole, other, torch.bfloat16).shape == (64, 48)


@pytest.mark.parametrize(("depth", "copied"), [(512, False), (640, True)])  # without and with cuBLASLt's padding
def test_scales_are_copied_once_a_weight_and_renewed_with_it(depth: int, copied: bool) -> None:
    read = []

    def gemm(a: Pair, b: Pair, *args: Any, **options: Any) -> None:
        read.append(b[1].data_ptr())
        fp8_gemm_nt(a, b, *args, **options)

    backend = HopperBackend(packed, ScaledProducts(scaled_mm, faster=DeepGemm(gemm)))
    x, _ = backend.quantize(matrix(64, depth), OperandSpec(Format.FP8, None))
    weight = backend.quantize(matrix(144, depth, 1), OperandSpec(Format.FP8, None, weight=True))
    assert (weight[0].unpadded is not None) is copied
    first, second = (backend.multiply(Gemm.FPROP, x, weight[0], torch.bfloat16) for _ in range(2))
    assert torch.equal(first, second)
    assert len(set(read)) == 1
    held = CachedPair(weight, torch.zeros(1, dtype=torch.int32))
    renewed, _ = backend.quantize(matrix(144, depth, 2) * 3, OperandSpec(Format.FP8, None, weight=True), held)
    other, _ = backend.quantize(matrix(144, depth, 2) * 3, OperandSpec(Format.FP8, None, weight=True))
    found, expected = (backend.multiply(Gemm.FPROP, x, side, torch.bfloat16) for side in (renewed, other))
    assert torch.equal(found, expected)
    assert not torch.equal(found, first)
    assert read[2] == read[0]  # a captured graph reads this address


def test_another_result_than_cublas_is_not_trusted() -> None:
    cpu = torch.device("cpu")
    assert difference(DeepGemm(fp8_gemm_nt, accumulates=True), Library(), cpu) is None
    assert "does not give cuBLASLt's bits" in difference(DeepGemm(fp8_gemm_nt), Library(wrong=1.0), cpu)

    def wrong_wgrad(*args: Any, **options: Any) -> None:
        fp8_gemm_nt(*args, **options)
        if options["recipe"] == (1, 1, 128):
            args[2].mul_(1 + 1e-4)

    assert difference(DeepGemm(wrong_wgrad), Library(), cpu) is None
    assert "wrong wgrad" in difference(DeepGemm(wrong_wgrad, accumulates=True), Library(), cpu)

    def broken(*args: Any, **options: Any) -> None:
        raise RuntimeError("dim == 2\nor dim == 3")

    assert "fails: RuntimeError: dim == 2 or dim == 3" in difference(DeepGemm(broken), Library(), cpu)


def test_why_it_cannot_be_used_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"version": deepgemm.VERSION}
    monkeypatch.setattr(deepgemm.importlib.metadata, "version", lambda name: installed["version"])
    monkeypatch.setattr(deepgemm.torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(deepgemm, "find_nvcc", lambda: None)
    reasons = []
    for change in (lambda: None, lambda: monkeypatch.setattr(deepgemm.torch, "__version__", "2.12.1")):
        change()
        deepgemm.why_not.cache_clear()
        reasons.append(deepgemm.why_not())
    installed["version"] = "0.1.5"
    deepgemm.why_not.cache_clear()
    reasons.append(deepgemm.why_not())
    deepgemm.why_not.cache_clear()
    assert "needs nvcc" in reasons[0]
    assert reasons[1] == "0.1.4 was built for torch 2.11, and this is 2.12.1"
    assert reasons[2] == "is sgl-deep-gemm 0.1.5, supported is 0.1.4"


def test_without_the_library_auto_goes_on_and_deepgemm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepgemm, "why_not", lambda: "is not there")
    assert deepgemm.deepgemm(None, required=False) == (None, "cuBLASLt; DeepGEMM is not there")
    with pytest.raises(SnipError, match="--snip-settings gemm_library=deepgemm: is not there"):
        deepgemm.deepgemm(None, required=True)


@pytest.mark.parametrize(
    ("package", "said"),
    [
        ("import something_that_it_needs", "No module named 'something_that_it_needs'"),
        ("assert None is not None, 'CUDA_HOME'", "CUDA_HOME"),  # it looks for the CUDA toolkit while it is imported
        ("raise RuntimeError('built for\\nanother driver')", "built for another driver"),
        ("fp8 = None  # another package of this name", "module 'deep_gemm' has no attribute 'fp8_gemm_nt'"),
    ],
)
def test_an_installation_that_does_not_load_is_passed_over(
    package: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "deep_gemm.py").write_text(f"{package}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    monkeypatch.setattr(deepgemm, "why_not", lambda: None)
    library: Any = object()
    found, products = deepgemm.deepgemm(library, required=False)
    assert found is None
    assert f"DeepGEMM cannot be imported ({said})" in products
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    with pytest.raises(SnipError, match="--snip-settings gemm_library=deepgemm: cannot be imported"):
        deepgemm.deepgemm(library, required=True)


def test_nvcc_is_found_where_cuda_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_nvcc() == str(compiler)
