"""The comparison of libraries on a CPU: every case runs by emulated libraries, and the table follows from the times."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kernels import library_gemms
from snip_megatron.numerics.quantize.operands import quantize_operands
from snip_megatron.precision import Format, Gemm
from tests.unit.numerics.products.emulated_scaled_mm import scaled_mm
from tests.unit.numerics.products.emulated_te import gemms

SHAPE = (256, 384, 512)  # M, N, K


class Library:
    """cuBLASLt, as far as the comparison calls it."""

    def multiply(
        self, a: Any, b: Any, dtype: Any, *, transposed: Any = None, fast: Any = 0, choice: int = 0, out: Any = None,
        add: bool = False,
    ) -> Tensor:  # fmt: skip
        if isinstance(a, Tensor):
            assert transposed == (True, False)
            product = a.float().t() @ b.float()
        else:
            product = a.dequantize() @ b.dequantize().t()
        return out.add_(product) if add else product.to(dtype)


def clock(calls: Any, rounds: int, **_: Any) -> dict[str, float]:
    """One millisecond for ours, two for the next, ...; every call runs."""
    for call in calls.values():
        for _ in range(rounds):
            call()
    return {name: float(i + 1) for i, name in enumerate(calls)}


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_gemms, "scaled_mm", scaled_mm)


@pytest.mark.parametrize("case", library_gemms.CASES, ids=library_gemms.name_of)
def test_every_library_multiplies_the_same_product(case: Any) -> None:
    row = library_gemms.row_of(
        case, SHAPE, quantize_operands, Library(), gemms(), {}, 2, "cpu", clock  # type: ignore[arg-type]
    )  # fmt: skip
    gemm, fmt, dtype = case
    names = {"cublaslt", "torch", "te"}
    if fmt is Format.BF16 and dtype is torch.float32:  # a CPU has no GEMM with a result of another dtype
        assert set(row["failed"]) == {"torch addmm"}
    elif fmt is Format.BF16:
        names |= {"torch addmm"}
    assert set(row["ms"]) == names
    assert row["ratio"] == {name: ms / row["ms"]["cublaslt"] for name, ms in row["ms"].items()}
    bound = {Format.FP8: 0.05, Format.FP8_TENSOR: 0.05, Format.BF16: 1e-6}[fmt]
    bf16 = 0.005 if gemm is not Gemm.WGRAD or dtype is torch.bfloat16 else 1e-5  # the result's own rounding
    assert all(error < bound + bf16 for error in row["error"].values()), row["error"]
    assert all(error < bf16 for name, error in row["own_error"].items() if name != "te"), row["own_error"]
    assert row["same_bits"]["cublaslt"] == 1.0
    assert "error" in library_gemms.show(row)


def test_a_library_without_a_kernel_is_left_out() -> None:
    class WithoutKernels(Library):
        def multiply(self, *args: Any, **named: Any) -> None:  # type: ignore[override]
            return None

    case = (Gemm.FPROP, Format.FP8, None)
    row = library_gemms.row_of(case, SHAPE, quantize_operands, WithoutKernels(), None, {}, 1, "cpu", clock)  # type: ignore[arg-type]
    assert row["failed"] == {"cublaslt": "RuntimeError: no kernel"}
    assert row["ratio"] == {}
    assert "no kernel" in library_gemms.show(row)
