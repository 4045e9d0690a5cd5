"""What a calibration measures: a grid of shapes that any model lies in, or the very shapes of one model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from snip_megatron.errors import SnipError
from snip_megatron.planner.models import load_model
from snip_megatron.solver.costs import local_shape

Size = tuple[int, ...]

_TOKENS = (2048, 4096, 8192, 16384)
_FEATURES = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_ATTENTION = ((2048, 16, 64), (2048, 16, 128), (4096, 16, 64), (4096, 16, 128), (8192, 16, 64), (8192, 16, 128))
_CPU_TOKENS = (32, 128)
_CPU_FEATURES = (64, 256)
_CPU_ATTENTION = ((64, 2, 32),)


@dataclass(frozen=True)
class Workload:
    """Sizes to measure, the most useful ones first: a calibration that runs out of time leaves a coarser grid.

    Attributes:
        gemms: (tokens, n, k). activations: (tokens, features). weights: (n, k).
        attention: (sequence, heads, head size).
    """

    gemms: tuple[Size, ...]
    activations: tuple[Size, ...]
    weights: tuple[Size, ...]
    attention: tuple[Size, ...]


def grid_workload(device_type: str) -> Workload:
    """Every combination of powers of two: small on a CPU, whose times mean nothing but that the command works."""
    if device_type == "cpu":
        return _grid(_CPU_TOKENS, _CPU_FEATURES, _CPU_ATTENTION)
    return _grid(_TOKENS, _FEATURES, _ATTENTION)


def _grid(tokens: Sequence[int], features: Sequence[int], attention: tuple[Size, ...]) -> Workload:
    return Workload(
        gemms=coarse_first((tokens, features, features)),
        activations=coarse_first((tokens, features)),
        weights=coarse_first((features, features)),
        attention=attention,
    )


def model_workload(name: str, tokens: Sequence[int], tensor_parallel: int) -> Workload:
    """The four linears of a model as a rank runs them. Raises SnipError on an unknown model or an impossible split."""
    if tensor_parallel < 1 or any(count < 1 for count in tokens) or not tokens:
        raise SnipError("calibrate: --tp and --tokens must be whole numbers of 1 or more")
    model = load_model(name)
    if model.heads % tensor_parallel:
        raise SnipError(f"{name}: {model.heads} heads cannot be split over --tp {tensor_parallel}")
    shapes = [
        local_shape(kind, n, k, tokens=count, tensor_parallel=tensor_parallel)
        for count in tokens
        for kind, (n, k) in model.linears.items()
    ]
    gemms = dict.fromkeys((shape.tokens, shape.n, shape.k) for shape in shapes)
    return Workload(
        gemms=tuple(gemms),
        activations=tuple(dict.fromkeys((m, edge) for m, n, k in gemms for edge in (n, k))),
        weights=tuple(dict.fromkeys((n, k) for _, n, k in gemms)),
        attention=tuple(dict.fromkeys((m, model.heads // tensor_parallel, model.head_size) for m, _, _ in gemms)),
    )


def coarse_first(axes: Sequence[Sequence[int]]) -> tuple[Size, ...]:
    """The product of sorted axes, ordered so that every prefix holds a whole coarser grid: ends, then middles."""
    levels = [_levels(len(axis)) for axis in axes]
    places = itertools.product(*(range(len(axis)) for axis in axes))
    ordered = sorted(places, key=lambda place: (max(level[i] for level, i in zip(levels, place, strict=True)), place))
    return tuple(tuple(axis[i] for axis, i in zip(axes, place, strict=True)) for place in ordered)


def _levels(length: int) -> list[int]:
    """How often an axis must be halved before each of its places is an end."""
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
