"""DeepGEMM behind the products: the layouts it is given, what it is not asked for, and when it is trusted."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from snip_megatron.numerics.products import deepgemm
from snip_megatron.numerics.products.deepgemm import DeepGemm, difference
from snip_megatron.numerics.quantize import operands
from snip_megatron.numerics.quantize.kernels.launch import list_launches
from snip_megatron.numerics.quantize.operands import Operand, OperandSpec
from snip_megatron.precision import Format, Gemm

from .emulated_scaled_mm import TILE
from .products import hopper

Pair = tuple[Tensor, Tensor]


def fp8_gemm_nt(a: Pair, b: Pair, d: Tensor, *, recipe: tuple[int, int, int], disable_ue8m0_cast: bool) -> None:
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
    assert d.dtype is torch.bfloat16, f"no kernel for {d.dtype}"
    d.copy_(sides[0] @ sides[1].t())


class Library:
    """cuBLASLt in exact arithmetic; ``wrong``: added to every product."""

    def __init__(self, wrong: float = 0.0) -> None:
        self.wrong = wrong

    def multiply(self, a: Any, b: Any, dtype: torch.dtype, **_: Any) -> Tensor:
        return hopper().multiply(Gemm.FPROP, a, b, dtype) + self.wrong


def matrix(rows: int, cols: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).bfloat16()


def operand(x: Tensor, fmt: Format, *, weight: bool = False) -> Operand:
    return operands.quantize_operands(x, OperandSpec(fmt, None, weight=weight))[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("rows", [48, 256])  # one row of blocks and two
@pytest.mark.parametrize("depth", [512, 1000])  # blocks with and without cuBLASLt's padding
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_equal_the_other_librarys(rows: int, depth: int, dtype: torch.dtype) -> None:
    a, b = operand(matrix(64, depth), Format.FP8), operand(matrix(rows, depth, 1), Format.FP8, weight=True)
    found = hopper(faster=DeepGemm(fp8_gemm_nt)).multiply(Gemm.FPROP, a, b, dtype)
    assert torch.equal(found, hopper().multiply(Gemm.FPROP, a, b, dtype))


def test_what_it_has_no_layout_for_or_is_slow_in_runs_elsewhere() -> None:
    def gemm(*args: Any, **options: Any) -> None:
        raise AssertionError("must not be asked")

    backend = hopper(faster=DeepGemm(gemm))
    x = matrix(66, 256)  # rows: no multiple of 4
    blocks = operand(matrix(48, 256, 1), Format.FP8, weight=True)
    assert backend.multiply(Gemm.FPROP, operand(x, Format.FP8), blocks, torch.bfloat16).shape == (66, 48)
    whole, other = (operand(matrix(rows, 256), Format.FP8_TENSOR) for rows in (64, 48))
    assert backend.multiply(Gemm.FPROP, whole, other, torch.bfloat16).shape == (64, 48)
    square = matrix(2048, 128)
    many, weights = operand(square, Format.FP8), operand(square, Format.FP8, weight=True)
    assert backend.multiply(Gemm.FPROP, many, weights, torch.bfloat16).shape == (2048, 2048)


@pytest.mark.parametrize("wrong", [0.0, 1.0])
def test_another_result_than_cublas_is_not_trusted(wrong: float) -> None:
    library: Any = Library(wrong)
    backend = hopper(library=library, faster=DeepGemm(fp8_gemm_nt), groups=SimpleNamespace())
    with list_launches():  # results are uninitialised memory
        assert backend.check("cpu", ()) is None
    fault = backend.check("cpu", ())
    assert (fault is None) == (wrong == 0)
    assert fault is None or "does not give cuBLASLt's bits" in fault
    assert (Format.FP8 in backend.grouped(256, 256, torch.bfloat16).in_one_launch) == (wrong == 0)
    a, b = operand(matrix(64, 256), Format.FP8), operand(matrix(48, 256, 1), Format.FP8, weight=True)
    assert torch.equal(
        backend.multiply(Gemm.FPROP, a, b, torch.bfloat16), hopper().multiply(Gemm.FPROP, a, b, torch.bfloat16) + wrong
    )


def test_a_library_that_fails_is_not_trusted() -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise RuntimeError("dim == 2\nor dim == 3")

    fault = difference(DeepGemm(broken), Library(), "cpu")
    assert "fails: RuntimeError: dim == 2 or dim == 3" in fault


@pytest.mark.parametrize(
    ("package", "said"),
    [
        ("assert None is not None, 'CUDA_HOME'", "CUDA_HOME"),  # it looks for the CUDA toolkit while it is imported
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
    monkeypatch.setattr(
        "snip_megatron.numerics.quantize.kernels.compiler.replace_nvcc", lambda nvcc: None
    )  # sets variables
    library: Any = object()
    found, products = deepgemm.deepgemm(library)
    assert found is None
    assert f"DeepGEMM cannot be imported ({said})" in products
