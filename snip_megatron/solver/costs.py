"""What a GEMM costs, in FLOPs or in seconds, and a Problem's costs in those units.

A cost model answers for one GEMM of one linear as one rank runs it; :func:`with_times` puts its answers into a Problem,
whose ``speedup`` and ``loss`` budgets then speak of real time. Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format, Gemm, LinearId, split_option_id
from snip_megatron.solver.problem import Budget, Choice, Item, Problem

TIMINGS = Path(__file__).with_name("timings")
"""Tables of measured seconds that come with the package, one a device: ``<name>.json``."""

FLOPS_RATE = 1e15
"""FLOP/s of bf16 that the ``flops`` model pretends to have: its seconds are FLOPs in another unit."""

BITS: Mapping[Format, int] = {
    Format.BF16: 16,
    Format.FP8: 8,
    Format.FP8_TENSOR: 8,
    Format.MXFP8: 8,
    Format.FP4: 4,
    Format.NVFP4: 4,
    Format.MXFP4: 4,
}
"""Bits of an element."""


Formats = tuple[Format, Format, Format]
"""Of fprop, dgrad and wgrad."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One linear as one rank runs it in one training step.

    Attributes:
        tokens: of one microbatch, after the gather of sequence parallelism.
        n, k: the rank's shard of W [n, k].
        microbatches: of a step on this rank; W is quantised once a step.
        gathered: X is gathered over token shards (sequence parallelism, column-parallel linears), so that fprop and
            wgrad quantise it separately.
        forwards: 2 where activations are recomputed in the backward, else 1.
    """

    tokens: int
    n: int
    k: int
    microbatches: int = 1
    gathered: bool = False
    forwards: int = 1

    @property
    def flops(self) -> float:
        """FLOPs of one of its three GEMMs in one microbatch (all three are equal)."""
        return 2.0 * self.tokens * self.n * self.k


class CostModel(Protocol):
    """Seconds that a training step spends in one GEMM of one linear on one rank.

    Attributes:
        name: for logs: ``flops``, or the table's device.
        formats: those it can answer for.
        assumptions: what stands behind its answers, a sentence each.
    """

    @property
    def name(self) -> str: ...

    @property
    def formats(self) -> tuple[Format, ...]: ...

    @property
    def assumptions(self) -> tuple[str, ...]: ...

    def seconds(self, shape: LinearShape, gemm: Gemm, fmt: Format) -> float:
        """Of one training step, the format's quantisation included. Raises SnipError on a format without figures."""

    def linear_seconds(self, shape: LinearShape, formats: Formats) -> float:
        """Of the linear's three GEMMs together. A quantisation that two of them share is charged as it really runs,
        while :meth:`seconds` has to split it before the other's format is known."""

    def extrapolated(self, shape: LinearShape) -> bool:
        """Whether ``shape`` lies outside of what was measured."""


@dataclass(frozen=True)
class FlopsModel:
    """FLOPs as time, for machines without a table: the rate doubles when the bits halve, quantisation is free."""

    name: str = "flops"
    formats: tuple[Format, ...] = tuple(Format)
    assumptions: tuple[str, ...] = (
        f"GEMMs run at {FLOPS_RATE:g} FLOP/s in bf16, twice that in 8 bits, four times that in 4 bits; quantisation is"
        " free: no machine was measured",
    )

    def seconds(self, shape: LinearShape, gemm: Gemm, fmt: Format) -> float:
        """See :class:`CostModel`."""
        runs = shape.microbatches * (shape.forwards if gemm is Gemm.FPROP else 1)
        return runs * shape.flops / FLOPS_RATE * BITS[fmt] / BITS[Format.BF16]

    def linear_seconds(self, shape: LinearShape, formats: Formats) -> float:
        """See :class:`CostModel`."""
        return math.fsum(self.seconds(shape, gemm, fmt) for gemm, fmt in zip(Gemm, formats, strict=True))

    def extrapolated(self, shape: LinearShape) -> bool:
        """See :class:`CostModel`."""
        return False


def load_cost_model(name_or_path: str | Path, device_name: str | None = None) -> CostModel:
    """A cost model by name.

    Args:
        name_or_path: ``flops``; ``time``: the package's table of ``device_name``; the name of a table of the package,
            such as ``h200``; or the path of a ``snip.timings/1`` file (one that ``snip calibrate`` wrote).
        device_name: the GPU's name as torch gives it (``NVIDIA H200``); None: not known, no check.

    Raises:
        SnipError: no such table, one of another device than ``device_name``, or a bad file.
    """
    if str(name_or_path) == "flops":
        return FlopsModel()
    from snip_megatron.solver.timing_model import TimingModel
    from snip_megatron.solver.timing_table import TimingTable

    table = TimingTable.load(_table_path(str(name_or_path), device_name))
    if device_name is not None and table.device != device_name:
        raise SnipError(
            f"the timings of {name_or_path} were measured on {table.device}, this is {device_name}:"
            " measure it with snip calibrate --out FILE.json and name that file, or use flops"
        )
    return TimingModel(table)


def _table_path(name: str, device_name: str | None) -> Path:
    from snip_megatron.solver.timing_table import TimingTable

    if name == "time":
        if device_name is None:
            raise SnipError("timings of which device? Name a table (such as h200), a file, or flops")
        for path in sorted(TIMINGS.glob("*.json")):
            if TimingTable.load(path).device == device_name:
                return path
        raise SnipError(
            f"there is no table of timings of {device_name}: measure one with snip calibrate --out FILE.json"
            " and name that file, or use flops"
        )
    packaged = TIMINGS / f"{name}.json"
    if name == Path(name).name and packaged.exists():
        return packaged
    if not Path(name).exists():
        known = ", ".join(["flops", "time", *sorted(path.stem for path in TIMINGS.glob("*.json"))])
        raise SnipError(f"{name}: neither a file of timings nor one of {known}")
    return Path(name)


# -- shapes --------------------------------------------------------------------------------------------------------
_COLUMN_PARALLEL = ("self_attention.linear_qkv", "mlp.linear_fc1", "mlp.experts.linear_fc1")


def local_shape(
    kind: str,
    n: int,
    k: int,
    *,
    tokens: int,
    tensor_parallel: int = 1,
    microbatches: int = 1,
    sequence_parallel: bool = False,
    recompute: bool = False,
) -> LinearShape:
    """The shape of one rank of a linear of ``kind`` (:data:`snip_megatron.precision.LINEAR_KINDS`) with weight [n, k].

    Args:
        tokens: sequence length × micro batch size.
        microbatches: of a training step on one data parallel rank.
        recompute: whether the linear's forward runs again in the backward.

    Raises:
        SnipError: a feature count that the tensor parallel size does not divide.
    """
    column = kind in _COLUMN_PARALLEL
    split = n if column else k
    if split % tensor_parallel:
        raise SnipError(f"{kind} [{n}, {k}]: {split} features cannot be split over {tensor_parallel} ranks")
    return LinearShape(
        tokens=tokens,
        n=n // tensor_parallel if column else n,
        k=k if column else k // tensor_parallel,
        microbatches=microbatches,
        gathered=column and sequence_parallel and tensor_parallel > 1,
        forwards=2 if recompute else 1,
    )


# -- problems ------------------------------------------------------------------------------------------------------
def option_seconds(model: CostModel, shape: LinearShape, gemm: Gemm | None, fmt: Format) -> float:
    """Seconds a step of one GEMM, or of all three (``gemm`` None: granularity ``layer``)."""
    return math.fsum(model.seconds(shape, g, fmt) for g in ((gemm,) if gemm is not None else Gemm))


def with_times(problem: Problem, shapes: Mapping[str, LinearShape], model: CostModel, budget: Budget) -> Problem:
    """The same items and losses with seconds as costs: cost is bf16's, a choice saves what it takes less.

    Args:
        shapes: by linear name or by kind of linear (all blocks alike).
        budget: what is asked; its ``fixed_cost`` in seconds a step of each stage.

    Raises:
        SnipError: an item without a shape, or a format without figures.
    """
    times: dict[tuple[LinearShape, Gemm | None, Format], float] = {}

    def seconds(shape: LinearShape, gemm: Gemm | None, fmt: Format) -> float:
        key = (shape, gemm, fmt)
        if key not in times:
            times[key] = option_seconds(model, shape, gemm, fmt)
        return times[key]

    def timed(item: Item) -> Item:
        linear, gemm = split_option_id(item.id)
        shape = _shape_of(linear, shapes)
        cost = seconds(shape, gemm, Format.BF16)
        choices = tuple(Choice(c.format, c.loss, cost - seconds(shape, gemm, c.format)) for c in item.choices)
        return replace(item, cost=cost, choices=choices)

    return Problem(budget=budget, items=tuple(timed(item) for item in problem.items))


def _shape_of(linear: LinearId, shapes: Mapping[str, LinearShape]) -> LinearShape:
    shape = shapes.get(str(linear)) or shapes.get(linear.kind)
    if shape is None:
        raise SnipError(f"{linear}: its shape on a rank is not known")
    return shape
