"""The binding of cuBLASLt as far as a CPU can test it: the real library checks every attribute and its size."""

from __future__ import annotations

import ctypes
import re
import sysconfig
from pathlib import Path

import pytest
import torch

from snip_megatron.gemm import cublaslt
from snip_megatron.gemm.cublaslt import CublasLt, CublasLtError
from snip_megatron.quantization import packed
from snip_megatron.quantization.packed import Operand

from .emulated_cublaslt import emulated_cublaslt


@pytest.fixture(scope="module")
def library() -> CublasLt:
    found = cublaslt.cublaslt()
    if found is None:
        pytest.skip("torch came without cuBLASLt 12.9 or later")
    return found


@pytest.mark.parametrize("scaling", ["tile", "block", "tensor", None])
def test_descriptors_are_accepted(library: CublasLt, scaling: str | None) -> None:
    operation = library.operation(True, False, "tile" if scaling == "block" else scaling, scaling)
    assert operation.value
    assert library.layout(cublaslt._TYPES[torch.float8_e4m3fn], 256, 512, 256).value
    assert library.preference((256, 256, 16)).value
    assert library.operation(True, False, None, None, scaled=True).value
    assert library.preference((256, 256, 16), exact=True).value


def test_a_wrong_attribute_is_an_error(library: CublasLt) -> None:
    operation = library.operation(True, False, "tile", "tile")
    with pytest.raises(CublasLtError, match="cublasLtMatmulDescSetAttribute failed with status"):
        library._set(operation, cublaslt._FAST_ACCUMULATION, ctypes.c_int32(0))  # it is one byte


def test_heuristic_result_has_the_size_of_the_header() -> None:
    assert ctypes.sizeof(cublaslt._Heuristic) == 64 + 8 + 4 + 4 + 16


def test_numbers_are_those_of_the_header() -> None:
    header = Path(sysconfig.get_paths()["purelib"]) / "nvidia/cu13/include/cublasLt.h"
    if not header.exists():
        pytest.skip("cublasLt.h is not installed")
    numbers = dict(re.findall(r"^\s*(CUBLASLT_\w+) = (\d+),", header.read_text(), re.MULTILINE))
    expected = {
        "MATMUL_DESC_POINTER_MODE": cublaslt._POINTER_MODE,
        "MATMUL_PREF_REDUCTION_SCHEME_MASK": cublaslt._REDUCTION_SCHEMES,
        "MATMUL_DESC_TRANSA": cublaslt._TRANSA,
        "MATMUL_DESC_TRANSB": cublaslt._TRANSB,
        "MATMUL_DESC_A_SCALE_POINTER": cublaslt._A_SCALE,
        "MATMUL_DESC_B_SCALE_POINTER": cublaslt._B_SCALE,
        "MATMUL_DESC_FAST_ACCUM": cublaslt._FAST_ACCUMULATION,
        "MATMUL_DESC_A_SCALE_MODE": cublaslt._A_SCALE_MODE,
        "MATMUL_DESC_B_SCALE_MODE": cublaslt._B_SCALE_MODE,
        "MATMUL_MATRIX_SCALE_SCALAR_32F": cublaslt._SCALE_MODES["tensor"],
        "MATMUL_MATRIX_SCALE_VEC128_32F": cublaslt._SCALE_MODES["tile"],
        "MATMUL_MATRIX_SCALE_BLK128x128_32F": cublaslt._SCALE_MODES["block"],
        "MATMUL_PREF_MAX_WORKSPACE_BYTES": cublaslt._MAX_WORKSPACE,
        "MATMUL_PREF_MIN_ALIGNMENT_A_BYTES": cublaslt._ALIGN_A,
        "MATMUL_PREF_MIN_ALIGNMENT_B_BYTES": cublaslt._ALIGN_B,
        "MATMUL_PREF_MIN_ALIGNMENT_C_BYTES": cublaslt._ALIGN_C,
        "MATMUL_PREF_MIN_ALIGNMENT_D_BYTES": cublaslt._ALIGN_D,
    }
    assert {name: int(numbers[f"CUBLASLT_{name}"]) for name in expected} == expected
    types = dict(re.findall(r"^\s*CUDA_(R_\w+)\s*=\s*(\d+),", (header.parent / "library_types.h").read_text(), re.M))
    names = {torch.float32: "R_32F", torch.float16: "R_16F", torch.bfloat16: "R_16BF", torch.float8_e4m3fn: "R_8F_E4M3"}
    assert {dtype: int(types[name]) for dtype, name in names.items()} == cublaslt._TYPES


def test_alignment_is_the_largest_power_of_two_up_to_256() -> None:
    storage = torch.empty(4096, dtype=torch.uint8)
    base = -storage.data_ptr() % 512
    found = [cublaslt._alignment(storage[base + offset :]) for offset in (0, 1, 8, 48, 256, 512)]
    assert found == [256, 1, 8, 16, 256, 256]


def test_no_library_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "_LIBRARY", "libno_such_library.so.{major}")
    assert cublaslt.cublaslt.__wrapped__() is None
    monkeypatch.undo()
    monkeypatch.setattr(cublaslt, "_FIRST_VERSION", 10**9)
    assert cublaslt.cublaslt.__wrapped__() is None


# -- layouts, on an emulated library -------------------------------------------------------------------------------
@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> CublasLt:
    return emulated_cublaslt(monkeypatch)


def operand(rows: int, depth: int, scaling: str, seed: int) -> Operand:
    x = torch.randn(rows, depth, generator=torch.Generator().manual_seed(seed))
    if scaling == "tensor":
        found = packed.quantize_tensor(x).row
    else:
        found = (packed.quantize_blocks if scaling == "block" else packed.quantize_tiles)(x, "fp8", None).row
    assert found is not None
    return found


@pytest.mark.parametrize("scalings", [("tile", "tile"), ("tile", "block"), ("tensor", "tensor")])
@pytest.mark.parametrize("add", [True, False])
def test_layouts_of_quantised_operands(emulated: CublasLt, scalings: tuple[str, str], add: bool) -> None:
    a, b = operand(20, 300, scalings[0], 1), operand(144, 300, scalings[1], 2)
    out = torch.randn(20, 144)
    expected = (out.double() if add else 0) + a.dequantize().double() @ b.dequantize().double().t()
    if add:
        assert emulated.accumulate(a, b, out)
    else:
        out = emulated.multiply(a, b, torch.float32)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layouts_of_plain_operands(emulated: CublasLt, dtype: torch.dtype) -> None:
    g, x = torch.randn(50, 20).to(dtype), torch.randn(50, 64).to(dtype)[:, :48]
    out = torch.randn(20, 48)
    expected = out.double() + g.double().t() @ x.double()
    assert emulated.accumulate_plain(g, x, out)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-5)


def test_a_plan_is_made_once_a_shape(emulated: CublasLt) -> None:
    """Scales move from call to call; what is planned does not depend on them."""
    a, b = operand(32, 128, "tile", 1), operand(64, 128, "tile", 2)
    for factor in (1.0, 2.0, 3.0):
        scaled = a._replace(scale=a.scale * factor)
        out = emulated.multiply(scaled, b, torch.float32)
        torch.testing.assert_close(out, scaled.dequantize() @ b.dequantize().t(), rtol=1e-5, atol=1e-4)
    assert emulated._library.heuristics == 1
    assert emulated.multiply(a, b, torch.float32, choice=3) is not None
    assert emulated.multiply(a, b, torch.float32, fast=True) is not None
    assert emulated._library.heuristics == 3


def test_no_kernel_changes_and_allocates_nothing(emulated: CublasLt, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, out = operand(32, 128, "tile", 1), operand(18, 128, "tile", 2), torch.ones(32, 18)
    assert not emulated.accumulate(a, b, out)
    assert bool((out == 1).all())
    monkeypatch.setattr(torch, "empty", None)
    assert emulated.multiply(a, b, torch.float32) is None
