"""Interpolation: exact at the points, bounded and monotone between them, honest outside."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snip_megatron.timing.cost_model import LogGrid

AXES = ((64, 256, 1024), (128, 512), (100, 1000, 5000))
POINTS = list(itertools.product(*AXES))
Rates = dict[tuple[int, ...], float]
QUERIES = st.tuples(*(st.integers(axis[0], axis[-1]) for axis in AXES))
RATES = st.fixed_dictionaries(dict.fromkeys(POINTS, st.floats(1e-3, 1e15)))


def rate(rates: Rates, query: tuple[int, ...]) -> float:
    """Return the interpolated rate. The grid itself has seconds."""
    return math.prod(query) / grid_of(rates).seconds(query, lambda seconds: seconds)


def grid_of(rates: Rates) -> LogGrid[float]:
    return LogGrid({point: math.prod(point) / rate for point, rate in rates.items()})


@given(RATES, st.sampled_from(POINTS))
def test_points_are_met_exactly(rates: Rates, point: tuple[int, ...]) -> None:
    assert rate(rates, point) == pytest.approx(rates[point])


@given(RATES, QUERIES)
def test_between_points_rates_stay_within_the_cell(rates: Rates, query: tuple[int, ...]) -> None:
    grid = grid_of(rates)
    place = grid.place(query)
    around = [rates[point] for point, _ in place.weights]
    assert not place.extrapolated
    assert math.fsum(weight for _, weight in place.weights) == pytest.approx(1.0, abs=1e-12)
    for point, _ in place.weights:
        for x, y, axis in zip(query, point, AXES, strict=True):
            between = [v for v in axis if min(x, y) < v < max(x, y)]
            assert not between, "a corner beyond the next measured value"
    assert min(around) * (1 - 1e-12) <= rate(rates, query) <= max(around) * (1 + 1e-12)


@given(
    st.lists(st.floats(0.05, 0.95), min_size=7, max_size=7),
    st.tuples(*(st.integers(axis[0], axis[-1]) for axis in AXES)),
    st.integers(0, 2),
    st.integers(1, 4000),
)
def test_time_grows_with_every_edge_where_it_does_at_the_points(
    exponents: list[float], query: tuple[int, ...], axis: int, more: int
) -> None:
    """Rates that grow by less than the work: a larger shape never takes less time."""
    steps = iter(exponents)
    growth = [[0.0] for _ in AXES]
    for values, logs in zip(AXES, growth, strict=True):
        for low, high in itertools.pairwise(values):
            logs.append(logs[-1] + next(steps) * math.log(high / low))
    rates = {
        tuple(values[i] for values, i in zip(AXES, place, strict=True)): math.exp(
            sum(logs[i] for logs, i in zip(growth, place, strict=True))
        )
        for place in itertools.product(*(range(len(a)) for a in AXES))
    }
    larger = tuple(min(x + more, AXES[d][-1]) if d == axis else x for d, x in enumerate(query))
    slow, fast = math.prod(larger) / rate(rates, larger), math.prod(query) / rate(rates, query)
    assert slow >= fast * (1 - 1e-12)


def test_outside_the_edge_is_kept_and_said() -> None:
    rates = {point: float(i + 1) for i, point in enumerate(POINTS)}
    grid = grid_of(rates)
    assert grid.place((32, 128, 100)).extrapolated
    assert rate(rates, (32, 128, 100)) == pytest.approx(rates[64, 128, 100])
    assert rate(rates, (4096, 4096, 10_000)) == pytest.approx(rates[1024, 512, 5000])
    assert not grid.place((64, 300, 100)).extrapolated


def test_points_that_fill_no_grid_count_exactly_and_nearby() -> None:
    odd = (8192, 7168, 8192)
    grid_points = list(itertools.product((1024, 2048), (1024, 2048), (1024, 2048)))
    rates = dict.fromkeys(grid_points, 1.0) | {odd: 7.0}
    grid = grid_of(rates)
    assert rate(rates, odd) == pytest.approx(7.0)
    assert not grid.place(odd).extrapolated
    assert rate(rates, (8192, 8192, 8192)) == pytest.approx(7.0)  # nearer to it than to the grid
    assert grid.place((8192, 8192, 8192)).extrapolated
    assert rate(rates, (1500, 1500, 1500)) == pytest.approx(1.0)


@given(st.sets(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=25), st.data())
def test_any_set_of_points_gives_bounded_answers(points: set[tuple[int, int]], data: st.DataObject) -> None:
    rates = {point: data.draw(st.floats(0.1, 10)) for point in sorted(points)}
    query = data.draw(st.tuples(st.integers(1, 60), st.integers(1, 60)))
    assert min(rates.values()) * 0.999 <= rate(rates, query) <= max(rates.values()) * 1.001
