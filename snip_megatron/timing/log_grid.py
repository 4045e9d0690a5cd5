"""Interpolation of measured rates in log space.

Values are logarithms of rates (work a second). Within a full grid of points, interpolation is multilinear in the
logarithms of the coordinates. It is exact at the points and stays between the values of a cell's corners. The time,
work / rate, increases with a coordinate if it does so between the measured points. Outside of the grid, the rate at the
nearest edge or the nearest point is used, and the result is marked as extrapolated.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Point = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """The points whose logarithms are averaged, with weights that sum to 1, and whether they are only the nearest."""

    weights: tuple[tuple[Point, float], ...]
    extrapolated: bool


class LogGrid[Row]:
    """The measured points, between which times are interpolated.

    ``rows`` is point of positive integer coordinates → what was measured there. Points that do not belong to a full
    grid serve exact queries, and queries outside of the grid. ``work`` of a point is what rates refer to.
    """

    def __init__(self, rows: Mapping[Point, Row], work: Callable[[Point], float] = math.prod) -> None:
        self._rows, self._work = rows, work
        self._points = frozenset(rows)
        self._axes = _complete_axes(self._points)
        self.place = functools.lru_cache(maxsize=1024)(self._find)

    def seconds(self, query: Point, of: Callable[[Row], float]) -> float:
        """Return the seconds of a query at the weighted geometric mean of the rates around it; ``of`` reads a row."""
        weights = self.place(query).weights
        if weights[0][0] == query:
            return of(self._rows[query])
        logs = [math.log(self._work(point) / of(self._rows[point])) for point, _ in weights]
        mean = math.fsum(weight * log for (_, weight), log in zip(weights, logs, strict=True))
        return self._work(query) / math.exp(min(max(mean, min(logs)), max(logs)))

    def _find(self, query: Point) -> Place:
        if query in self._points:
            return Place(((query, 1.0),), extrapolated=False)
        inside = tuple(min(max(x, axis[0]), axis[-1]) for x, axis in zip(query, self._axes, strict=True))
        outside = inside != query
        if outside:
            nearest = min(sorted(self._points), key=lambda point: _distance(point, query))
            if _distance(nearest, query) < _distance(inside, query):
                return Place(((nearest, 1.0),), extrapolated=True)
        sides = [_bracket(x, axis) for x, axis in zip(inside, self._axes, strict=True)]
        corners = []
        for corner in itertools.product(*sides):
            weight = math.prod(share for _, share in corner)
            if weight > 0:
                corners.append((tuple(value for value, _ in corner), weight))
        return Place(tuple(corners), extrapolated=outside)


def _bracket(x: int, axis: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    """Return the axis values around x and their weights in log space. x must lie within the axis."""
    if x in axis:
        return ((x, 1.0),)
    above = next(i for i, value in enumerate(axis) if value > x)
    low, high = axis[above - 1], axis[above]
    share = math.log(x / low) / math.log(high / low)
    return ((low, 1.0 - share), (high, share))


def _distance(a: Point, b: Point) -> float:
    return math.hypot(*(math.log(x / y) for x, y in zip(a, b, strict=True)))


def _complete_axes(points: frozenset[Point]) -> tuple[tuple[int, ...], ...]:
    """Return the axes of a full grid of measured points. Coordinates with the fewest points are dropped."""
    remaining = points
    while True:
        axes = [sorted({point[d] for point in remaining}) for d in range(len(next(iter(remaining))))]
        whole = math.prod(len(axis) for axis in axes)
        if whole == len(remaining):
            return tuple(tuple(axis) for axis in axes)
        _, d, value = min(
            (sum(point[d] == value for point in remaining) * len(axis) / whole, d, value)
            for d, axis in enumerate(axes)
            if len(axis) > 1
            for value in axis
        )
        remaining = frozenset(point for point in remaining if point[d] != value)
