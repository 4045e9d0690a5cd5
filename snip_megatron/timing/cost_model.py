"""Cost models, which predict the time of GEMMs.

A cost model predicts the time that one rank spends in one GEMM of one linear. :func:`with_times` makes these times the
costs of a Problem, for budgets of ``speedup`` and ``loss``. Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format, Gemm, LinearId, split_option_id
from snip_megatron.precision.budget import Budget
from snip_megatron.solver.items import Choice, Item
from snip_megatron.solver.problem import Problem
from snip_megatron.timing.shapes import Formats, LinearShape

FLOPS_RATE = 1e15
"""The bf16 FLOP/s that the ``flops`` model assumes. The value only scales its times."""


class CostModel(Protocol):
    """A prediction of the seconds that a training step spends in one GEMM of one linear on one rank.

    Attributes:
        name: the model's name for logs: ``flops``, or the device of the table.
        formats: the formats that the model knows times of. The times of another variant are those of its base.
        assumptions: the assumptions behind the predictions, a sentence each.
    """

    @property
    def name(self) -> str: ...

    @property
    def formats(self) -> tuple[Format, ...]: ...

    @property
    def assumptions(self) -> tuple[str, ...]: ...

    def seconds(self, shape: LinearShape, gemm: Gemm, fmt: Format) -> float:
        """Return the seconds of one GEMM in one training step, including quantisation.

        Raises:
            SnipError: the model knows neither ``fmt`` nor, if it is a variant, its base.
        """

    def linear_seconds(self, shape: LinearShape, formats: Formats) -> float:
        """Return the seconds of the linear's three GEMMs in one training step.

        Two GEMMs may share a quantisation. This method charges it exactly. :meth:`seconds` must split it without
        knowing the format of the other GEMM.
        """

    def extrapolated(self, shape: LinearShape) -> bool:
        """Return whether ``shape`` lies outside of the measured range."""


@dataclass(frozen=True)
class FlopsModel:
    """A cost model for machines without a table. The rate doubles when the bits halve; quantisation takes no time."""

    name: str = "flops"
    formats: tuple[Format, ...] = tuple(fmt for fmt in Format if fmt.base is fmt)
    assumptions: tuple[str, ...] = (
        f"GEMMs run at {FLOPS_RATE:g} FLOP/s in bf16, twice that in 8 bits, four times that in 4 bits; quantisation is"
        " free: no machine was measured",
    )

    def seconds(self, shape: LinearShape, gemm: Gemm, fmt: Format) -> float:
        """See :class:`CostModel`."""
        runs = shape.microbatches * (shape.forwards if gemm is Gemm.FPROP else 1)
        return runs * shape.flops / FLOPS_RATE * fmt.bits / Format.BF16.bits

    def linear_seconds(self, shape: LinearShape, formats: Formats) -> float:
        """See :class:`CostModel`."""
        return math.fsum(self.seconds(shape, gemm, fmt) for gemm, fmt in zip(Gemm, formats, strict=True))

    def extrapolated(self, shape: LinearShape) -> bool:
        """See :class:`CostModel`."""
        return False


# -- problems ------------------------------------------------------------------------------------------------------
def option_seconds(model: CostModel, shape: LinearShape, gemm: Gemm | None, fmt: Format) -> float:
    """Return the seconds of one GEMM in a step, or of all three if ``gemm`` is None (granularity ``layer``)."""
    return math.fsum(model.seconds(shape, g, fmt) for g in ((gemm,) if gemm is not None else Gemm))


def with_times(
    problem: Problem,
    shapes: Mapping[str, LinearShape],
    model: CostModel,
    budget: Budget,
    exchanges: Callable[[str, Gemm, Format], float] | None = None,
    fixed_cost: Mapping[int, float] | None = None,
) -> Problem:
    """Return a Problem with the same items and losses, and with seconds as costs.

    The cost of an item is its time in bf16. The saving of a choice is that cost minus the time in its format.

    Args:
        problem: the Problem.
        shapes: shapes by the name of a linear, or by its kind if all blocks are alike.
        model: predicts the times.
        budget: the new budget, of time.
        exchanges: kind of linear, GEMM, format → seconds of a step in which ranks exchange what this GEMM takes or
            makes. None: no exchange depends on a format.
        fixed_cost: stage → seconds of a step that no choice changes; none by default.

    Raises:
        SnipError: an item has no shape, or the model cannot predict a format.
    """
    times: dict[tuple[str, LinearShape, Gemm | None, Format], float] = {}

    def seconds(kind: str, shape: LinearShape, gemm: Gemm | None, fmt: Format) -> float:
        key = (kind, shape, gemm, fmt)
        if key not in times:
            times[key] = option_seconds(model, shape, gemm, fmt)
            if exchanges is not None:
                times[key] += math.fsum(exchanges(kind, g, fmt) for g in ((gemm,) if gemm is not None else Gemm))
        return times[key]

    def timed(item: Item) -> Item:
        linear, gemm = split_option_id(item.id)
        key = (linear.path, _shape_of(linear, shapes), gemm)
        cost = seconds(*key, Format.BF16)
        choices = tuple(Choice(c.format, c.losses, cost - seconds(*key, c.format)) for c in item.choices)
        return replace(item, cost=cost, choices=choices)

    fixed = tuple((fixed_cost or {}).items())
    return Problem(budget, tuple(timed(item) for item in problem.items), fixed_cost=fixed)


def _shape_of(linear: LinearId, shapes: Mapping[str, LinearShape]) -> LinearShape:
    shape = shapes.get(str(linear)) or shapes.get(linear.path)
    if shape is None:
        raise SnipError(f"{linear}: its shape on a rank is not known")
    return shape
