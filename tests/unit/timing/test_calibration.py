"""Calibration on a CPU: sizes, and what is called by the reference and by the Hopper backend over emulated cuBLAS."""

from collections.abc import Hashable, Mapping
from typing import Any

import pytest
import torch

from snip_megatron.numerics.products.backend import REFERENCE, GemmBackend
from snip_megatron.numerics.products.hopper import HopperBackend
from snip_megatron.numerics.quantize import operands, swiglu
from snip_megatron.numerics.quantize.operands import Operand
from snip_megatron.planner.layout import Layout
from snip_megatron.planner.models import MODELS
from snip_megatron.precision import Format, Gemm
from snip_megatron.timing.calibration import Workload, calibrate, grid_workload, shapes_workload
from snip_megatron.timing.cost_model import LinearShape, LogGrid
from snip_megatron.timing.measure import Call, HostClock, Measurer
from snip_megatron.timing.table import TimingTable
from tests.unit.numerics.products import emulated_grouped
from tests.unit.numerics.products.emulated_cublaslt import EmulatedCublasLt

FORMATS = (Format.FP8, Format.FP8_TENSOR, Format.FP4)
WORKLOAD = Workload(
    gemms=((128, 128, 128), (128, 128, 256)),
    activations=((128, 128),),
    weights=((128, 128),),
    attention=((32, 2, 16),),
    grouped=((3, 128, 128, 256),),
)
BACKENDS = [REFERENCE, HopperBackend(operands, EmulatedCublasLt(), activations=swiglu, groups=emulated_grouped)]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_whole_calibration_makes_a_table(backend: GemmBackend) -> None:
    table = calibrate(Measurer(backend, HostClock(), FORMATS), WORKLOAD, {"date": "today"}, 600.0)
    assert table.device == "cpu"
    assert (table.about["complete"], table.about["notes"]) == (True, [])
    assert table.about["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert (set(table.gemms), set(table.grouped)) == (set(WORKLOAD.gemms), set(WORKLOAD.grouped))
    assert TimingTable.from_json(table.to_json()) == table


class InterruptedClock(HostClock):
    """Ctrl-C arrives while the last size is timed; the copy and attention are timed first."""

    measurements = 0

    def seconds[Key: Hashable](self, calls: Mapping[Key, Call]) -> dict[Key, float]:
        self.measurements += 1
        if self.measurements == 6:
            raise KeyboardInterrupt
        return super().seconds(calls)


def test_a_stopped_calibration_keeps_what_it_has() -> None:
    table = calibrate(Measurer(REFERENCE, InterruptedClock(), FORMATS), WORKLOAD, {}, 600.0)
    assert (set(table.activations), set(table.weights)) == ({(128, 128)}, {(128, 128)})
    assert list(table.gemms) == [WORKLOAD.gemms[0]]
    assert set(table.attention) == {(32, 2, 16)}
    assert table.about["complete"] is False
    assert table.about["notes"] == ["stopped: interrupted; 2 of 6 sizes are not measured"]
    assert TimingTable.from_json(table.to_json()) == table
    with pytest.raises(KeyboardInterrupt):  # a training is stopped
        calibrate(Measurer(REFERENCE, InterruptedClock(), FORMATS), WORKLOAD, {})


def test_a_size_that_a_library_refuses_is_left_out_and_named() -> None:
    class Refusing(HopperBackend):
        def multiply(self, gemm: Gemm, x: Any, b: Any, dtype: torch.dtype, out: Any = None) -> torch.Tensor:
            result = super().multiply(gemm, x, b, dtype, out)
            if gemm is Gemm.FPROP and isinstance(x, Operand) and x.depth == 256:
                raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
            return result

    backend = Refusing(operands, EmulatedCublasLt())
    table = calibrate(Measurer(backend, HostClock(), FORMATS), WORKLOAD, {})
    assert set(table.gemms) == {(128, 128, 128)}
    assert table.about["complete"] is False
    refused = ("gemms (128, 128, 256)", "grouped (3, 128, 128, 256)")
    assert table.about["notes"] == [f"{size}: CUBLAS_STATUS_NOT_SUPPORTED" for size in refused]


@pytest.mark.parametrize(
    ("model", "tp"),
    [("llama-1b", 1), ("llama-3b", 1), ("llama-7b", 2), ("llama-8b", 1), ("llama-70b", 8), ("llama-405b", 8)],
)
def test_the_grid_covers_the_linears_of_the_models(model: str, tp: int) -> None:
    grid = LogGrid(dict.fromkeys(grid_workload("cuda").gemms))
    layout = Layout(MODELS[model].model(), tp, 1, 1, 1, 8192, 1, 1)
    for kind, row in layout.kinds.items():
        shape = layout.shapes[row.name]
        assert not grid.place((shape.tokens, shape.n, shape.k)).extrapolated, kind


def test_the_linears_of_a_model() -> None:
    """Each size once; quantisation has the sizes of inputs and outputs."""
    fc1, fc2 = LinearShape(4096, 7168, 8192, microbatches=4), LinearShape(4096, 8192, 3584)
    experts = LinearShape(256, 1536, 2048, microbatches=64, matrices=16, grouped=True)
    workload = shapes_workload([fc1, fc2, experts, fc1], [(4096, 8, 128)])
    assert workload.gemms == ((4096, 7168, 8192), (4096, 8192, 3584))
    assert set(workload.activations) == {(4096, 7168), (4096, 8192), (4096, 3584)}
    assert workload.weights == ((7168, 8192), (8192, 3584))
    assert workload.attention == ((4096, 8, 128),)
    assert workload.grouped == ((16, 4096, 1536, 2048),)
