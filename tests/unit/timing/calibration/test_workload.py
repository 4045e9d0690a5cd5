"""What is measured: prefixes that hold whole grids, and a model's own linears."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.models import MODELS
from snip_megatron.timing.calibration.workload import coarse_first, grid_workload, shapes_workload
from snip_megatron.timing.log_grid import LogGrid
from snip_megatron.timing.shapes import LinearShape


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
