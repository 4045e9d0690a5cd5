"""Measuring, on a CPU: what is called with what, for the reference and for the Hopper backend over emulated cuBLAS."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from gemm.emulated_scaled_mm import scaled_mm

from snip_megatron.commands.calibrate import calibrate
from snip_megatron.errors import SnipError
from snip_megatron.gemm.backend import REFERENCE, GemmBackend
from snip_megatron.gemm.hopper import HopperBackend
from snip_megatron.gemm.scaled import ScaledProducts
from snip_megatron.precision import Format, Gemm
from snip_megatron.quantization import packed
from snip_megatron.quantization.packed import Operand
from snip_megatron.timing.calibration.clock import HostClock
from snip_megatron.timing.calibration.measure import Measurer
from snip_megatron.timing.calibration.workload import Workload
from snip_megatron.timing.table import TimingTable

FORMATS = (Format.FP8, Format.FP8_TENSOR, Format.FP4)
WORKLOAD = Workload(
    gemms=((128, 128, 128), (128, 128, 256)),
    activations=((128, 128),),
    weights=((128, 128),),
    attention=((32, 2, 16),),
)
BACKENDS = [REFERENCE, HopperBackend(packed, ScaledProducts(scaled_mm))]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_whole_calibration_makes_a_table(backend: GemmBackend) -> None:
    table = calibrate(Measurer(backend, HostClock(), FORMATS), WORKLOAD, time.monotonic() + 60, {"rounds": 3})
    assert table.device == "cpu"
    assert table.about["complete"] is True
    assert set(table.gemms) == set(WORKLOAD.gemms)
    assert TimingTable.from_json(table.to_json()) == table


def test_without_time_one_size_of_each_kind_is_measured() -> None:
    table = calibrate(Measurer(REFERENCE, HostClock(), FORMATS), WORKLOAD, time.monotonic(), {})
    assert list(table.gemms) == [WORKLOAD.gemms[0]]
    assert table.about["complete"] is False
    assert "gemms: 1 of 2 sizes for lack of time" in table.about["notes"]


@pytest.mark.parametrize("kind", ["activations", "weights", "gemms"])
def test_a_kind_without_any_size_makes_no_table(kind: str) -> None:
    """A table without rows of one kind cannot be read."""

    def refuse(_: object) -> None:
        raise RuntimeError("out of memory")

    measurer = Measurer(REFERENCE, HostClock(), FORMATS)
    setattr(measurer, kind, refuse)
    with pytest.raises(SnipError, match=rf"^no size of {kind} could be measured: {kind} \(128, 128.*: out of memory"):
        calibrate(measurer, WORKLOAD, time.monotonic() + 60, {})


def test_a_size_that_a_library_refuses_is_left_out_and_named() -> None:
    class Refusing(HopperBackend):
        def multiply(self, gemm: Gemm, x: Any, b: Any, dtype: torch.dtype, out: Any = None) -> torch.Tensor:
            result = super().multiply(gemm, x, b, dtype, out)
            if gemm is Gemm.FPROP and isinstance(x, Operand) and x.depth == 256:
                raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
            return result

    backend = Refusing(packed, ScaledProducts(scaled_mm))
    table = calibrate(Measurer(backend, HostClock(), FORMATS), WORKLOAD, time.monotonic() + 60, {})
    assert set(table.gemms) == {(128, 128, 128)}
    assert table.about["complete"] is False
    assert table.about["notes"][-1] == "gemms (128, 128, 256): CUBLAS_STATUS_NOT_SUPPORTED"
