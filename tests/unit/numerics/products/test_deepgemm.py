"""DeepGEMM behind the products: the layouts it is given, what it is not asked for, and when it is trusted."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from snip_megatron.numerics.products import deepgemm
from snip_megatron.numerics.products.deepgemm import DeepGemm
from snip_megatron.numerics.quantize import operands
from snip_megatron.numerics.quantize.kernels.launch import list_launches
from snip_megatron.numerics.quantize.operands import Operand, OperandSpec
from snip_megatron.precision import Format, Gemm
from tests.unit.numerics.quantize.specs import matrix

from .emulated_cublaslt import TILE, EmulatedCublasLt
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


def operand(x: Tensor, fmt: Format, *, weight: bool = False) -> Operand:
    return operands.quantize_operands(x, OperandSpec(fmt, None, weight=weight))[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("rows", [48, 256])  # one row of blocks and two
@pytest.mark.parametrize("depth", [512, 1000])  # blocks with and without cuBLASLt's padding
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_equal_the_other_librarys(rows: int, depth: int, dtype: torch.dtype) -> None:
    a, b = operand(matrix(64, depth), Format.FP8), operand(matrix(rows, depth, 1), Format.FP8, weight=True)
    result = hopper(deepgemm=DeepGemm(fp8_gemm_nt, lambda call: 1.0)).multiply(Gemm.FPROP, a, b, dtype)
    assert torch.equal(result, hopper().multiply(Gemm.FPROP, a, b, dtype))


def test_what_it_has_no_layout_for_runs_elsewhere() -> None:
    def gemm(*args: Any, **options: Any) -> None:
        raise AssertionError("must not be asked")

    backend = hopper(deepgemm=DeepGemm(gemm))
    whole, other = (operand(matrix(rows, 256), Format.FP8_TENSOR) for rows in (64, 48))
    assert backend.multiply(Gemm.FPROP, whole, other, torch.bfloat16).shape == (64, 48)


@pytest.mark.parametrize("seconds", [(2.0, 1.0), (1.0, 2.0)], ids=["cuBLASLt", "DeepGEMM"])
def test_the_library_that_is_faster_for_a_size_multiplies_it(
    seconds: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong products of cuBLASLt tell which of the two multiplied."""
    timed: list[Any] = []
    library: Any = EmulatedCublasLt(wrong=64.0)

    def clock(call: Any) -> float:
        call()
        timed.append(call)
        return seconds[(len(timed) - 1) % 2]

    monkeypatch.setattr(deepgemm, "_MOST_SIZES", 3)
    backend = hopper(library=library, deepgemm=DeepGemm(fp8_gemm_nt, clock))
    for rows in (64, 32, 64, 128, 16, 8):
        a, b = operand(matrix(rows, 256), Format.FP8), operand(matrix(48, 256, 1), Format.FP8, weight=True)
        result = backend.multiply(Gemm.FPROP, a, b, torch.bfloat16)
        is_cublas = seconds[0] > seconds[1] and rows not in (16, 8)  # these two are more sizes than are timed
        assert torch.equal(result, hopper().multiply(Gemm.FPROP, a, b, torch.bfloat16) + (64 if is_cublas else 0))
    assert len(timed) == 3 * 6
    with list_launches():  # nothing is timed where kernels are listed
        DeepGemm(fp8_gemm_nt, clock).multiply(a, b, torch.bfloat16, library)
    assert len(timed) == 3 * 6


@pytest.mark.parametrize("wrong", [0.0, 1.0])
def test_another_result_than_cublas_is_not_trusted(wrong: float) -> None:
    library: Any = EmulatedCublasLt(wrong=wrong)
    backend = hopper(library=library, deepgemm=DeepGemm(fp8_gemm_nt, lambda call: 1.0), groups=SimpleNamespace())
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
    result, products = deepgemm.deepgemm()
    assert result is None
    assert f"DeepGEMM cannot be imported ({said})" in products
