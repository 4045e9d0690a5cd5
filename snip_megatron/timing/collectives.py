"""Measured seconds of collectives, and what they say about other sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all")
DTYPES = ("bf16", "uint8")


class Exchange(NamedTuple):
    """One measured collective.

    Attributes:
        collective: one of ``COLLECTIVES``.
        dtype: of its elements, one of ``DTYPES``. Quantised operands are exchanged as uint8.
        ranks: size of the group.
        bytes: what each rank sends, as a ring sends it: its shard to every other rank.
    """

    collective: str
    dtype: str
    ranks: int
    bytes: int


class MeasuredCollectives:
    """Predicts the seconds of collectives inside a node.

    Args:
        seconds: the measurements.
    """

    def __init__(self, seconds: Mapping[Exchange, float]) -> None:
        self._series: dict[tuple[str, str], dict[int, list[tuple[int, float]]]] = {}
        for exchange, taken in sorted(seconds.items()):
            by_ranks = self._series.setdefault(exchange[:2], {})
            by_ranks.setdefault(exchange.ranks, []).append((exchange.bytes, taken))

    def seconds(self, collective: str, dtype: str, ranks: int, sent: float) -> float | None:
        """Return the seconds in which each of ``ranks`` sends ``sent`` bytes. None if the kind was not measured.

        Between two measured sizes the seconds are interpolated linearly. Fewer bytes take as long as the smallest size,
        and more bytes are sent at the rate of the largest. Of several sizes of groups, the nearest one is used.
        """
        by_ranks = self._series.get((collective, dtype))
        if by_ranks is None:
            return None
        points = by_ranks[min(by_ranks, key=lambda size: abs(math.log(size / ranks)))]
        if sent <= points[0][0]:
            return points[0][1]
        for (low, first), (high, second) in pairwise(points):
            if sent <= high:
                return first + (second - first) * (sent - low) / (high - low)
        size, taken = points[-1]
        return taken * sent / size

    def ranks(self) -> list[int]:
        """Return the sizes of the measured groups."""
        return sorted({size for by_ranks in self._series.values() for size in by_ranks})
