"""The binding of cuBLASLt as far as a CPU can test it: the real library checks every attribute and its size."""

import ctypes
import json
import re
import sysconfig
import weakref
from pathlib import Path

import pytest
import torch

from snip_megatron.numerics.products import cublaslt
from snip_megatron.numerics.products.cublaslt import CublasLt, measured_choices


@pytest.fixture(scope="module")
def library() -> CublasLt:
    result = cublaslt.cublaslt()
    if result is None:
        pytest.skip("torch came without cuBLASLt 12.9 or later")
    return result


def product(scaling: str | None, dtype: torch.dtype, *, scaled: bool = False) -> cublaslt._Problem:
    x, out = torch.empty(256, 256), torch.empty(256, 256, dtype=dtype)
    a = cublaslt._matrix(x, True, "tile" if scaling == "block" else scaling)
    return cublaslt._Problem(a, cublaslt._matrix(x, False, scaling), cublaslt._matrix(out), False, 0, scaled)


@pytest.mark.parametrize("scaling", ["tile", "block", "tensor", None])
def test_descriptors_are_accepted(library: CublasLt, scaling: str | None) -> None:
    for dtype, scaled in ((torch.float32, False), (torch.bfloat16, scaling is None)):
        problem = product(scaling, dtype, scaled=scaled)
        assert library._operation(problem).value
        assert library._preference(problem).value
    assert library.layout(cublaslt._TYPES[torch.float8_e4m3fn], 256, 512, 256).value


def test_plans_and_their_descriptors_are_bounded(library: CublasLt, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of experts differ from step to step."""
    monkeypatch.setattr(cublaslt, "_MOST_PLANS", 3)
    monkeypatch.setattr(library, "_plans", {})
    monkeypatch.setattr(CublasLt, "_proposal", lambda *_: cublaslt._Heuristic())
    problem, plans = product(None, torch.float32), []
    for rows in (16, 32, 48, 64, 80):
        plan = library._plan(0, problem._replace(a=problem.a._replace(rows=rows)), None)
        assert plan is not None
        plans.append([weakref.ref(each) for each in (plan.operation, plan.a, plan.b, plan.c)])
        assert library._plan(0, problem._replace(a=problem.a._replace(rows=rows)), None) is plan
    del plan
    assert len(library._plans) == 3
    assert [any(each() is not None for each in plan) for plan in plans] == [False, False, True, True, True]


def test_heuristic_result_has_the_size_of_the_header() -> None:
    assert ctypes.sizeof(cublaslt._Heuristic) == 64 + 8 + 4 + 4 + 16


def test_numbers_are_those_of_the_header() -> None:
    header = Path(sysconfig.get_paths()["purelib"]) / "nvidia/cu13/include/cublasLt.h"
    if not header.exists():
        pytest.skip("cublasLt.h is not installed")
    numbers = dict(re.findall(r"^\s*(CUBLASLT_\w+) = (\d+),", header.read_text(), re.MULTILINE))
    names = {
        "DESC": "POINTER_MODE TRANSA TRANSB A_SCALE_POINTER B_SCALE_POINTER FAST_ACCUM A_SCALE_MODE B_SCALE_MODE",
        "MATRIX_SCALE": "SCALAR_32F VEC128_32F BLK128x128_32F",
        "PREF": "REDUCTION_SCHEME_MASK MAX_WORKSPACE_BYTES"
        + "".join(f" MIN_ALIGNMENT_{matrix}_BYTES" for matrix in "ABCD"),
    }
    actual = [int(numbers[f"CUBLASLT_MATMUL_{of}_{name}"]) for of, each in names.items() for name in each.split()]
    assert actual == [
        cublaslt._POINTER_MODE, cublaslt._TRANSA, cublaslt._TRANSB, cublaslt._A_SCALE, cublaslt._B_SCALE,
        cublaslt._FAST_ACCUMULATION, cublaslt._A_SCALE_MODE, cublaslt._B_SCALE_MODE,
        *(cublaslt._SCALE_MODES[scaling] for scaling in ("tensor", "tile", "block")), cublaslt._REDUCTION_SCHEMES,
        cublaslt._MAX_WORKSPACE, cublaslt._ALIGN_A, cublaslt._ALIGN_B, cublaslt._ALIGN_C, cublaslt._ALIGN_D,
    ]  # fmt: skip
    types = dict(re.findall(r"^\s*CUDA_(R_\w+)\s*=\s*(\d+),", (header.parent / "library_types.h").read_text(), re.M))
    kinds = {torch.float32: "R_32F", torch.float16: "R_16F", torch.bfloat16: "R_16BF", torch.float8_e4m3fn: "R_8F_E4M3"}
    assert {dtype: int(types[name]) for dtype, name in kinds.items()} == cublaslt._TYPES


def test_a_table_holds_for_its_library_and_device_only(tmp_path: Path) -> None:
    path = tmp_path / "proposals.json"
    rows = [{"a_rows": 8192, "b_rows": 4096, "depth": 14336, "choice": 5, "gain": 1.1}]
    path.write_text(json.dumps({"cublaslt": 130100, "device": "NVIDIA H200", "rows": rows}))
    assert measured_choices(130100, "NVIDIA H200", path) == {(8192, 4096, 14336): 5}
    assert measured_choices(130200, "NVIDIA H200", path) == {}
    assert measured_choices(130100, "NVIDIA H100 80GB HBM3", path) == {}
