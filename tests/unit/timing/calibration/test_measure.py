"""Measuring, on a CPU: what is called with what, for the reference and for the Hopper backend over emulated cuBLAS."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
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
from snip_megatron.timing.calibration.clock import Call, HostClock
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


class CountingClock:
    """Runs every call twice and takes as long as there are calls."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[tuple[Hashable, object]] = []

    def seconds[Key: Hashable](self, calls: Mapping[Key, Call]) -> dict[Key, float]:
        for turn in range(2):
            self.calls += [(key, call(turn)) for key, call in calls.items()]
        return {key: float(i + 1) for i, key in enumerate(calls)}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_every_format_runs_its_three_gemms(backend: GemmBackend) -> None:
    clock = CountingClock()
    times = Measurer(backend, clock, FORMATS).gemms((128, 128, 256))
    assert set(times) == {Format.BF16, *FORMATS}
    assert sorted(second for triple in times.values() for second in triple) == [float(i) for i in range(1, 13)]
    shapes = {key: tuple(result.shape) for key, result in clock.calls}  # type: ignore[attr-defined]
    assert {shapes[fmt, 0] for fmt in times} == {(128, 128)}
    assert {shapes[fmt, 1] for fmt in times} == {(128, 256)}
    assert {shapes[fmt, 2] for fmt in times} == {(128, 256)}


def test_quantisation_is_measured_side_by_side_and_together() -> None:
    clock = CountingClock()
    times = Measurer(BACKENDS[1], clock, FORMATS).activations((128, 256))
    assert set(times) == {"input", "gradient"}
    sides: dict[Any, Any] = dict(clock.calls)
    for operand in times:
        for fmt in FORMATS:
            made = [[isinstance(side, Operand) for side in sides[operand, fmt, i]] for i in range(3)]
            assert made == [[True, False], [False, True], [True, True]]


def test_weights_are_measured_both_ways() -> None:
    clock = CountingClock()
    assert set(Measurer(BACKENDS[1], clock, FORMATS).weights((128, 256))) == set(FORMATS)
    assert all(isinstance(side, Operand) for _, sides in clock.calls for side in sides)  # type: ignore[attr-defined]


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
