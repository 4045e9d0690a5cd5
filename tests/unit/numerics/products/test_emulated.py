"""The backend that multiplies quantised numbers on bf16 tensor cores, on a CPU: numbers, layouts, what is kept."""

from typing import Any

import pytest
import torch
from torch import Tensor

from snip_megatron.numerics.products.check import wrong_numbers
from snip_megatron.numerics.products.emulated import EmulatedBackend
from snip_megatron.numerics.quantize.kernels.launch import list_launches
from snip_megatron.numerics.quantize.operands import ExactOperand, quantize_exact
from snip_megatron.precision import Format, Gemm
from snip_megatron.precision.errors import SnipError

from .products import BACKENDS, EVEN, QUANTISED, assert_reference, hopper, operands, sides

BF16, FP8, NVFP4, MXFP8 = Format.BF16, Format.FP8, Format.NVFP4, Format.MXFP8
backend = BACKENDS["emulated"]
MIXED = [(NVFP4, MXFP8, BF16), (BF16, Format.MXFP4, NVFP4), (FP8, NVFP4, Format.FP8_TENSOR)]
TAILS = (130, 144, 200)  # T, N, K


@pytest.mark.parametrize("formats", [*((fmt,) * 3 for fmt in QUANTISED), *MIXED])
@pytest.mark.parametrize("shape", [EVEN, TAILS, (0, 144, 208)])
def test_numbers_are_the_reference_s(shape: tuple[int, int, int], formats: Any) -> None:
    assert_reference(backend(), shape, formats)


@pytest.mark.parametrize("formats", MIXED)
def test_hopper_leaves_other_formats_to_it(formats: Any) -> None:
    """A map may mix native formats and others."""
    assert_reference(hopper(fallback=backend()), (136, 144, 208), formats)


class _Faulty(EmulatedBackend):
    """Products of ``gemm`` are 1.5 times too large, or raise an ``error``."""

    def __init__(self, gemm: Gemm = Gemm.DGRAD, error: Exception | None = None) -> None:
        super().__init__(quantize_exact)
        self._gemm, self._error = gemm, error

    def multiply(self, gemm: Gemm, a: Any, b: Any, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        if gemm is self._gemm and self._error is not None:
            raise self._error
        return super().multiply(gemm, a, b, dtype, out) * (1.5 if gemm is self._gemm else 1.0)


def test_wrong_numbers_and_failures_are_named() -> None:
    failing = _Faulty(Gemm.WGRAD, RuntimeError("no kernel image\nand more"))
    result = wrong_numbers(failing, "cpu", [BF16, MXFP8])
    assert result == "mxfp8 fails (RuntimeError: no kernel image) on this device"
    result = wrong_numbers(_Faulty(), "cpu", [NVFP4])
    assert result.startswith("nvfp4 gives a signal to noise ratio of ")
    assert "in dgrad (at least 12)" in result


def test_torch_multiplies_where_the_check_fails() -> None:
    result = _Faulty()
    with list_launches():
        assert result.check("cpu", [MXFP8]) is None
    fault = result.check("cpu", [NVFP4])
    assert fault is not None
    assert fault.endswith("torch emulates, slower than bf16")
    b = hopper(fallback=_Faulty())
    assert b.check("cpu", [FP8]) is None
    assert b.check("cpu", [FP8, NVFP4]) == fault
    for each in (result, b):
        results = sides(each, *operands(*EVEN), (NVFP4,) * 3)
        assert not any(isinstance(side, ExactOperand) for side in results)


@pytest.mark.parametrize("message", ["CUDA error: an illegal memory access was encountered\nand more", ""])
def test_a_device_that_fails_ends_the_run(message: str) -> None:
    backend = _Faulty(Gemm.FPROP, torch.AcceleratorError(message))
    reason = "AcceleratorError: CUDA error: an illegal memory access was encountered" if message else "AcceleratorError"
    with pytest.raises(SnipError, match=rf"the device fails \({reason}\); .*--snip-gemm reference$"):
        wrong_numbers(backend, "cpu", [MXFP8])
