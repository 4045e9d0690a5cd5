"""Cost models, which predict the seconds that a rank spends in one GEMM of one linear, from a table or from FLOPs.

X is quantised for fprop and wgrad, G for dgrad and wgrad. :meth:`CostModel.seconds` charges each GEMM what quantising
for it alone takes, and :meth:`CostModel.joint` is what one call for both saves if they have one format. W is quantised
once a step for fprop and dgrad, each of which is charged half.

Where Megatron's own linear adds ∇W in a kernel of its own, a bf16 wgrad is charged this kernel. That is exact if all
three GEMMs are bf16. Otherwise SNIP's linear runs, which adds in the GEMM, and the charge is too high.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snip_megatron.precision import VARIANTS, Format, Gemm
from snip_megatron.precision.errors import SnipError
from snip_megatron.timing.table import OPERANDS, STOCK, TimingTable, Triple, load_table


@dataclass(frozen=True, slots=True)
class LinearShape:
    """The size of a linear as one rank runs it in one training step."""

    tokens: int  # tokens of one microbatch, after the all-gather of sequence parallelism
    # n, k: rows and columns of the rank's shard of W, its output and input features
    n: int
    k: int
    microbatches: int = 1  # how often the rank runs such a GEMM in a step: microbatches of a step, times its experts
    # whether X is gathered from token shards (column-parallel linears under sequence parallelism). fprop and wgrad then
    # quantise it separately
    gathered: bool = False
    forwards: int = 1  # 2 if activations are recomputed in the backward, else 1
    # whether Megatron's linear, which runs where all GEMMs are bf16, adds ∇W to ``main_grad`` in its GEMM instead of in
    # another kernel
    fused_accumulation: bool = True
    matrices: int = 1  # W of so many experts. Each is quantised once a step
    # whether a GEMM of all these experts is one grouped GEMM. ``tokens`` is the mean over experts
    grouped: bool = False
    # the operand that is quantised with SwiGLU, in a grouped linear: ``input`` if SwiGLU makes X, ``gradient`` if its
    # gradient makes G. None if neither is
    fused: str | None = None

    @property
    def group(self) -> tuple[int, int, int, int]:
        """The size of a grouped GEMM: number of experts, tokens of all experts, n, k."""
        return self.matrices, self.matrices * self.tokens, self.n, self.k

    @property
    def flops(self) -> float:
        """FLOPs of one GEMM in one microbatch. The three GEMMs have equal FLOPs."""
        return 2.0 * self.tokens * self.n * self.k


STATED_COPY = 4.0e12  # assumed bytes a second of a copy, if the table has none
ACCUMULATION = 0.58
"""Bandwidth of the kernel that adds a bf16 gradient to ``main_grad``, as a share of a copy's: 0.55, 0.58 and 0.62 in
three trainings on H200s (``kernels`` of bf16 in ``job_1b_h200_2026-11-23.json``, ``job_8b-blocks_h200_2026-11-23.json``
and ``job_8b-blocks-4k-tp2_2xh200_2026-11-22.json``)."""
_ACCUMULATION_BYTES = 10  # per parameter: the gradient is read in bf16, main_grad is read and written in FP32
FLOPS_RATE = 1e15  # the bf16 FLOP/s of :class:`FlopsModel`. The value only scales its times
_COPIED_BYTES = 4  # per element: read and written in bf16
_GEMMS = tuple(Gemm)
Point = tuple[int, ...]
_GROUP_WORK: dict[str, Callable[[Point], float]] = {
    "gemms": lambda group: math.prod(group[1:]),
    "input": lambda group: group[1] * group[3],
    "gradient": lambda group: group[1] * group[2],
    "weights": lambda group: group[0] * group[2] * group[3],
}
_GROUP_WORK |= {f"fused_{operand}": _GROUP_WORK[operand] for operand in OPERANDS} | {STOCK: _GROUP_WORK["gemms"]}
"""Part of a grouped linear's times → the work of (experts, tokens, n, k)."""


class CostModel:
    """Predicts the seconds that a training step spends in one GEMM of one linear on one rank, from measured times."""

    def __init__(self, table: TimingTable) -> None:
        self.table: TimingTable | None = table  # None if nothing was measured
        self.name = table.device  # or ``flops``
        self.formats = table.formats  # those that have times. A variant that has none takes those of its base
        self._copy_rate = table.copy_rate
        self.assumptions: tuple[str, ...] = (  # a sentence each
            f"GEMMs and quantisation as measured on {table.device} ({table.about.get('date', 'no date')}); between"
            " measured shapes by multilinear interpolation of log rates",
            "one microbatch after the other: nothing of a linear overlaps with anything else",
        )
        rows: dict[str, Mapping[Point, Any]] = {"gemms": table.gemms, "weights": table.weights}
        rows |= {operand: {size: row[operand] for size, row in table.activations.items()} for operand in OPERANDS}
        self._linear = {part: LogGrid(times) for part, times in rows.items() if times}
        self._grouped = {
            part: LogGrid({size: row[part] for size, row in table.grouped.items()}, work)
            for part, work in _GROUP_WORK.items()
            if table.grouped and all(part in row for row in table.grouped.values())
        }

    # -- a step --------------------------------------------------------------------------------------------------
    def seconds(self, shape: LinearShape, gemm: Gemm, fmt: Format) -> float:
        """Return the seconds of one GEMM in a step, including quantisation for this GEMM alone (see :meth:`joint`).

        Raises SnipError if ``fmt`` is unknown.
        """
        time = self.gemm_seconds(shape, gemm, fmt)
        once = 0.0
        if fmt is not Format.BF16:
            if gemm is Gemm.WGRAD:
                time += self._portion(shape, fmt, "input", 1) + self._portion(shape, fmt, "gradient", 1)
            else:
                time += self._portion(shape, fmt, "input" if gemm is Gemm.FPROP else "gradient", 0)
                once = self._weight(shape, fmt)
        elif gemm is Gemm.WGRAD and not shape.fused_accumulation:  # Megatron's own linear adds ∇W outside of its GEMM
            time += accumulation_seconds(shape.n * shape.k, self._copy_rate)
        if gemm is Gemm.FPROP and shape.forwards > 1:  # recomputation quantises X for fprop only
            alone = 0.0 if fmt is Format.BF16 else self._quantise(shape, fmt, "input")[0]
            time += (shape.forwards - 1) * (self.gemm_seconds(shape, Gemm.FPROP, fmt) + alone)
        return shape.microbatches * time + shape.matrices * once

    def joint(self, shape: LinearShape, gemm: Gemm, fmt: Format) -> float:
        """Return the seconds that a step saves if ``gemm`` and wgrad are both in ``fmt``, because one call quantises
        the operand that they share.
        """
        if fmt is Format.BF16 or gemm is Gemm.WGRAD:
            return 0.0
        operand = "input" if gemm is Gemm.FPROP else "gradient"
        if (self._is_grouped(shape) and shape.fused == operand) or (operand == "input" and shape.gathered):
            return 0.0
        first, second, both = self._quantise(shape, fmt, operand)
        return shape.microbatches * max(0.0, first + second - both)

    def stock(self, shape: LinearShape) -> float:
        """Return the seconds by which a step is longer if no GEMM of a grouped linear is quantised.

        Megatron's own code then launches each expert. 0 if the linear is not grouped or was not measured.
        """
        if not shape.grouped or STOCK not in self._grouped:
            return 0.0
        grouped = math.fsum(self.gemm_seconds(shape, gemm, Format.BF16) for gemm in Gemm)
        return shape.microbatches * max(0.0, self._seconds(shape, STOCK, lambda times: times[Format.BF16]) - grouped)

    def extrapolated(self, shape: LinearShape) -> bool:
        """Return whether ``shape`` lies outside of the measured range."""
        if self._is_grouped(shape):
            return self._grouped["gemms"].place(shape.group).extrapolated
        return shape.grouped or self._linear["gemms"].place((shape.tokens, shape.n, shape.k)).extrapolated

    # -- single calls --------------------------------------------------------------------------------------------
    def gemm_seconds(self, shape: LinearShape, gemm: Gemm, fmt: Format) -> float:
        """Return the seconds of one GEMM of one microbatch and matrix, without quantisation.

        What leaves an MLP of experts, Y of its second linear and ∂L/∂X of its first, is copied to rows without padding.
        """
        fmt, place = self._known(fmt), _GEMMS.index(gemm)
        seconds = self._seconds(shape, "gemms", lambda times: times[fmt][place])
        leaves = {"input": (Gemm.FPROP, shape.n), "gradient": (Gemm.DGRAD, shape.k)}
        last, features = leaves.get(shape.fused or "", (None, 0))
        if gemm is last and self._is_grouped(shape):
            seconds += _COPIED_BYTES * shape.tokens * features / (self._copy_rate or STATED_COPY)
        return seconds

    def _is_grouped(self, shape: LinearShape) -> bool:
        """Return whether the shape has the times of grouped GEMMs: a table without any has those of one expert."""
        return shape.grouped and bool(self._grouped)

    def _seconds(self, shape: LinearShape, part: str, of: Callable[[Any], float]) -> float:
        """Return the seconds of a part of the table for one matrix. ``of`` reads what was measured at a size."""
        if self._is_grouped(shape):
            return self._grouped[part].seconds(shape.group, of) / shape.matrices
        m, n, k = shape.tokens, shape.n, shape.k
        sizes = {"gemms": (m, n, k), "input": (m, k), "gradient": (m, n), "weights": (n, k)}
        return self._linear[part].seconds(sizes[part], of)

    def _quantise(self, shape: LinearShape, fmt: Format, operand: str) -> Triple:
        fmt, seconds = self._known(fmt), functools.partial(self._seconds, shape, operand)
        return seconds(lambda row: row[fmt][0]), seconds(lambda row: row[fmt][1]), seconds(lambda row: row[fmt][2])

    def _weight(self, shape: LinearShape, fmt: Format) -> float:
        """Return the seconds of quantising W that one of its two GEMMs is charged: half of the call that serves both,
        or a whole call of the base of a variant that was not measured and has a W of its own.
        """
        measured = self._known(fmt)
        both = self._seconds(shape, "weights", lambda times: times[measured])
        return both if measured is not fmt and VARIANTS[fmt].separate_weight else both / 2

    def _portion(self, shape: LinearShape, fmt: Format, operand: str, side: int) -> float:
        """Return the seconds of a quantisation for its first GEMM (``side`` 0) or wgrad (1) alone.

        Where it is fused, the first GEMM is charged what it adds to SwiGLU, and wgrad the rest, as if it ended the
        fusion. In fp8 and fp4 it does not, and is a little faster.
        """
        times = self._quantise(shape, fmt, operand)
        if self._is_grouped(shape) and shape.fused == operand:
            measured = self._known(fmt)
            fused = self._seconds(shape, f"fused_{operand}", lambda seconds: seconds[measured])
            return max(times[1], times[2] - fused) if side else fused
        return times[side]

    def _known(self, fmt: Format) -> Format:
        """Return ``fmt`` if the table has it, otherwise the base that it is a variant of."""
        if fmt not in self.formats:
            if fmt.base in self.formats:
                return fmt.base
            measured = ", ".join(f.value for f in self.formats)
            raise SnipError(
                f"the timings of {self.name} have no {fmt.value} (they have {measured}):"
                " measure it with snip calibrate, or leave the format out"
            )
        return fmt


class FlopsModel(CostModel):
    """Times that were not measured. The rate doubles when the bits halve; quantisation takes no time."""

    def __init__(self) -> None:
        self._grouped = {}
        self.table, self.name, self.formats = None, "flops", tuple(fmt for fmt in Format if fmt.base is fmt)
        self.assumptions = (
            f"GEMMs run at {FLOPS_RATE:g} FLOP/s in bf16, twice that in 8 bits, four times that in 4 bits; quantisation"
            " is free: no machine was measured",
        )

    def seconds(self, shape: LinearShape, gemm: Gemm, fmt: Format) -> float:
        runs = shape.microbatches * (shape.forwards if gemm is Gemm.FPROP else 1)
        return runs * shape.flops / FLOPS_RATE * fmt.bits / Format.BF16.bits

    def joint(self, shape: LinearShape, gemm: Gemm, fmt: Format) -> float:
        return 0.0

    def extrapolated(self, shape: LinearShape) -> bool:
        return False


def load_cost_model(name_or_path: str | Path, device_name: str | None = None) -> CostModel:
    """Load a cost model: ``flops``, or that of the table that :func:`load_table` loads. Raises SnipError as it does."""
    return FlopsModel() if str(name_or_path) == "flops" else CostModel(load_table(name_or_path, device_name))


def accumulation_seconds(parameters: float, copy_rate: float | None) -> float:
    """Return the seconds of a kernel that adds bf16 gradients of so many parameters to ``main_grad``. ``copy_rate`` is
    bytes a second of a copy, or None if it was not measured.
    """
    return _ACCUMULATION_BYTES * parameters / (ACCUMULATION * (copy_rate or STATED_COPY))


# -- interpolation of measured rates -------------------------------------------------------------------------------
# Values are logarithms of rates (work a second). Within a full grid of points, interpolation is multilinear in the
# logarithms of the coordinates. It is exact at the points and stays between the values of a cell's corners. The time,
# work / rate, increases with a coordinate if it does so between the measured points. Outside of the grid, the rate at
# the nearest edge or the nearest point is used, and the result is marked as extrapolated.
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
