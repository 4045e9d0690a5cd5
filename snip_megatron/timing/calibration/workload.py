"""The sizes that a calibration measures: a grid that covers any model, or the linears of one."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from snip_megatron.timing.shapes import LinearShape

Size = tuple[int, ...]

# Tokens, features, attention (sequence, heads, head size), grouped (experts, tokens, n, k).
_GRID: tuple[Size, Size, tuple[Size, ...], tuple[Size, ...]] = (
    (2048, 8192, 16384),
    (512, 2048, 4096, 8192, 32768),
    ((2048, 16, 64), (8192, 16, 64), (2048, 16, 128), (8192, 16, 128)),
    ((8, 128), (8192, 65536), (1024, 4096), (1024, 4096)),
)
_CPU_GRID = ((32, 128), (64, 256), ((64, 2, 32),), ((2,), (128,), (64, 128), (64, 128)))


@dataclass(frozen=True)
class Workload:
    """The sizes to measure, in an order in which a calibration that is stopped leaves a coarser full grid: ``gemms``
    (tokens, n, k), ``activations`` (tokens, features), ``weights`` (n, k), ``attention`` (sequence, heads, head size),
    ``grouped`` (experts, tokens of all experts, n, k).
    """

    gemms: tuple[Size, ...]
    activations: tuple[Size, ...]
    weights: tuple[Size, ...]
    attention: tuple[Size, ...] = ()
    grouped: tuple[Size, ...] = ()

    def ordered(self) -> list[tuple[str, Size]]:
        """Return (attribute, size) for all sizes: attention, then single linears, whose kinds advance together, and
        last grouped ones, whose kernels take longest to compile.
        """
        kinds = ("activations", "weights", "gemms")
        places = [
            (i / len(getattr(self, kind)), kind, size) for kind in kinds for i, size in enumerate(getattr(self, kind))
        ]
        linears = [(kind, size) for _, kind, size in sorted(places, key=lambda place: place[0])]
        grouped = [("grouped", size) for size in self.grouped]
        return [*(("attention", size) for size in self.attention), *linears, *grouped]


def grid_workload(device_type: str) -> Workload:
    """Return a grid of powers of two. The grid of a CPU is tiny and only serves to try the command."""
    tokens, features, attention, grouped = _CPU_GRID if device_type == "cpu" else _GRID
    return Workload(
        gemms=coarse_first((tokens, features, features)),
        activations=coarse_first((tokens, features)),
        weights=coarse_first((features, features)),
        attention=attention,
        grouped=coarse_first(grouped),
    )


def shapes_workload(shapes: Iterable[LinearShape], attention: Iterable[Size] = ()) -> Workload:
    """Return the sizes of these linears and of ``attention``."""
    shapes = tuple(shapes)
    gemms = dict.fromkeys((shape.tokens, shape.n, shape.k) for shape in shapes if not shape.grouped)
    return Workload(
        gemms=tuple(gemms),
        activations=tuple(dict.fromkeys((m, edge) for m, n, k in gemms for edge in (n, k))),
        weights=tuple(dict.fromkeys((n, k) for _, n, k in gemms)),
        attention=tuple(dict.fromkeys(attention)),
        grouped=tuple(dict.fromkeys(shape.group for shape in shapes if shape.grouped)),
    )


def coarse_first(axes: Sequence[Sequence[int]]) -> tuple[Size, ...]:
    """Return the product of sorted axes, ends of axes first, then middles: a prefix contains a full coarser grid."""
    levels = [_levels(len(axis)) for axis in axes]
    places = itertools.product(*(range(len(axis)) for axis in axes))
    ordered = sorted(places, key=lambda place: (max(level[i] for level, i in zip(levels, place, strict=True)), place))
    return tuple(tuple(axis[i] for axis, i in zip(axes, place, strict=True)) for place in ordered)


def _levels(length: int) -> list[int]:
    """Return, for each place of an axis, how often the axis must be halved until the place is an end."""
    level = [0] * length
    spans, depth = [(0, length - 1)], 1
    while spans:
        halves = []
        for low, high in spans:
            if high - low > 1:
                middle = (low + high) // 2
                level[middle] = depth
                halves += [(low, middle), (middle, high)]
        spans, depth = halves, depth + 1
    return level
