"""Calibration on a CPU: sizes, and what is called by the reference and by the Hopper backend over emulated cuBLAS."""

import itertools
from collections.abc import Hashable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snip_megatron.numerics.products.backend import REFERENCE, GemmBackend
from snip_megatron.numerics.products.hopper import HopperBackend
from snip_megatron.numerics.quantize import operands, swiglu
from snip_megatron.numerics.quantize.operands import Operand
from snip_megatron.planner.layout import Layout
from snip_megatron.planner.models import MODELS
from snip_megatron.precision import Format, Gemm
from snip_megatron.precision.errors import SnipError
from snip_megatron.timing.calibration import Workload, calibrate, coarse_first, grid_workload, run_once, shapes_workload
from snip_megatron.timing.cost_model import LinearShape
from snip_megatron.timing.log_grid import LogGrid
from snip_megatron.timing.measure import Call, HostClock, Measurer, uneven_splits
from snip_megatron.timing.table import TimingTable
from tests.unit.numerics.products import emulated_grouped
from tests.unit.numerics.products.emulated_scaled_mm import scaled_mm

FORMATS = (Format.FP8, Format.FP8_TENSOR, Format.FP4)
WORKLOAD = Workload(
    gemms=((128, 128, 128), (128, 128, 256)),
    activations=((128, 128),),
    weights=((128, 128),),
    attention=((32, 2, 16),),
    grouped=((3, 128, 128, 256),),
)
BACKENDS = [REFERENCE, HopperBackend(operands, scaled_mm=scaled_mm, activations=swiglu, groups=emulated_grouped)]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_whole_calibration_makes_a_table(backend: GemmBackend) -> None:
    table = calibrate(Measurer(backend, HostClock(), FORMATS), WORKLOAD, {"date": "today"}, 600.0)
    assert table.device == "cpu"
    assert (table.about["complete"], table.about["notes"]) == (True, [])
    assert table.about["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert (set(table.gemms), set(table.grouped)) == (set(WORKLOAD.gemms), set(WORKLOAD.grouped))
    assert TimingTable.from_json(table.to_json()) == table


def test_what_is_run_once_is_what_is_timed() -> None:
    """Kernels are listed by it, before anything is timed."""
    seen: set[object] = set()

    class Noting(HopperBackend):
        def quantize(self, x: Any, spec: Any, cached: Any = None) -> Any:
            seen.add((tuple(x.shape), spec.formats, spec.weight))
            return super().quantize(x, spec, cached)

        def multiply(self, gemm: Gemm, a: Any, b: Any, *more: Any) -> Any:
            seen.add((gemm, type(a), a.values.shape if isinstance(a, Operand) else None))
            return super().multiply(gemm, a, b, *more)

    backend = Noting(operands, scaled_mm=scaled_mm, activations=swiglu, groups=emulated_grouped)
    run_once(backend, FORMATS, WORKLOAD, torch.device("cpu"))
    listed = set(seen)
    seen.clear()
    calibrate(Measurer(backend, HostClock(), FORMATS), WORKLOAD, {}, 600.0)
    assert len(listed) > 20
    assert listed == seen


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


def test_a_calibration_stopped_too_early_says_so() -> None:
    with pytest.raises(SnipError, match=r"^no size of gemms could be measured: stopped: its 0 s are over; 6 of 6"):
        calibrate(Measurer(REFERENCE, HostClock(), FORMATS), WORKLOAD, {}, 0.0)


class Hanging:
    """Processes that never end."""

    def __init__(self) -> None:
        self.waited, self.closed = list[float](), False

    def running(self, wait: float = 0.0) -> bool:
        self.waited.append(wait)
        return True

    def close(self) -> None:
        self.closed = True


def test_a_compiler_that_hangs_takes_less_than_half_of_the_time() -> None:
    compilation: Any = Hanging()
    table = calibrate(Measurer(REFERENCE, HostClock(), FORMATS), WORKLOAD, {}, 600.0, compilation)
    assert table.about["complete"] is True
    assert compilation.closed
    (waited,) = compilation.waited
    assert waited < 300.0


@pytest.mark.parametrize("kind", ["activations", "weights", "gemms"])
def test_a_kind_without_any_size_makes_no_table(kind: str) -> None:
    """A table without rows of one kind cannot be read."""

    def refuse(_: object) -> None:
        raise RuntimeError("out of memory")

    measurer = Measurer(REFERENCE, HostClock(), FORMATS)
    setattr(measurer, kind, refuse)
    with pytest.raises(SnipError, match=rf"^no size of {kind} could be measured: {kind} \(128, 128.*: out of memory"):
        calibrate(measurer, WORKLOAD, {})


def test_a_size_that_a_library_refuses_is_left_out_and_named() -> None:
    class Refusing(HopperBackend):
        def multiply(self, gemm: Gemm, x: Any, b: Any, dtype: torch.dtype, out: Any = None) -> torch.Tensor:
            result = super().multiply(gemm, x, b, dtype, out)
            if gemm is Gemm.FPROP and isinstance(x, Operand) and x.depth == 256:
                raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
            return result

    backend = Refusing(operands, scaled_mm=scaled_mm)
    table = calibrate(Measurer(backend, HostClock(), FORMATS), WORKLOAD, {})
    assert set(table.gemms) == {(128, 128, 128)}
    assert table.about["complete"] is False
    refused = ("gemms (128, 128, 256)", "grouped (3, 128, 128, 256)")
    assert table.about["notes"] == [f"{size}: CUBLAS_STATUS_NOT_SUPPORTED" for size in refused]


@pytest.mark.parametrize(("experts", "tokens", "multiple"), [(1, 1000, 128), (16, 4096, 1), (128, 100, 128)])
def test_rows_of_experts_are_uneven_and_padded(experts: int, tokens: int, multiple: int) -> None:
    splits = uneven_splits(experts, tokens, multiple)
    assert len(splits) == experts
    assert not any(count % multiple for count in splits)
    assert tokens <= sum(splits) < tokens + experts * multiple
    assert len(set(splits)) > 1 or experts == 1


# -- sizes --------------------------------------------------------------------------------------------------------
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_coarse_first_is_the_whole_product_ends_first(lengths: list[int]) -> None:
    axes = [list(range(10, 10 + length)) for length in lengths]
    ordered = coarse_first(axes)
    assert sorted(ordered) == sorted(itertools.product(*axes))
    ends = {tuple(corner) for corner in itertools.product(*([axis[0], axis[-1]] for axis in axes))}
    assert set(ordered[: len(ends)]) == ends


def test_a_calibration_cut_short_still_spans_everything() -> None:
    gemms = grid_workload("cuda").gemms
    for count in (8, 27, len(gemms)):
        grid = LogGrid(dict.fromkeys(gemms[:count]))
        assert not grid.place((8192, 7168, 8192)).extrapolated


def test_kinds_advance_together() -> None:
    """Wherever a calibration is stopped, each kind has its share of what was measured."""
    workload = grid_workload("cuda")
    ordered = workload.ordered()[len(workload.attention) : -len(workload.grouped)]
    assert len({kind for kind, _ in ordered[:3]}) == 3
    half = [kind for kind, _ in ordered[: len(ordered) // 2]]
    for kind in ("gemms", "activations", "weights"):
        assert half.count(kind) == pytest.approx(len(getattr(workload, kind)) / 2, abs=2)


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
