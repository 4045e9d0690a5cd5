"""What a problem consists of: a budget, and items with a choice of formats each."""

from __future__ import annotations

from dataclasses import dataclass

from snip_megatron.precision import Format

KINDS = ("target", "speedup", "loss")
"""Kinds of budgets."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One format an item may run in.

    Attributes:
        format: the number format.
        loss: what it costs in quality, any unit, may be negative.
        saving: what it saves, in the unit of the item's cost; negative where the format is slower than the reference.
    """

    format: Format
    loss: float
    saving: float


@dataclass(frozen=True, slots=True)
class Item:
    """One decision: a GEMM (granularity ``gemm``) or a whole linear (``layer``).

    Attributes:
        id: unique, any non-empty text; a training run uses the names of docs/method.md.
        stage: pipeline stage, all chunks of a virtual pipeline together.
        cost: FLOPs or seconds in the reference format, at most 1e18.
        choices: at least one, each format once.
        group: items of one group take the same format, on whichever stages they lie. None: on its own.
        pin: the format it must take, one of its choices. None: free.
    """

    id: str
    stage: int
    cost: float
    choices: tuple[Choice, ...]
    group: str | None = None
    pin: Format | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """What is wanted: exactly one of ``target``, ``speedup`` and ``loss``.

    Under ``speedup`` and ``loss`` costs are times. A step takes as long as its slowest stage: what the stage's items
    still cost plus ``fixed_cost``; the reference is the same with no saving at all.

    Attributes:
        target: least Σ loss with Σ saving ≥ target · Σ cost over everything; in [0, 1].
        stage_tolerance: on every stage Σ saving ≥ (target − tolerance) · that stage's cost; None: no such constraint.
        speedup: least Σ loss with reference time / time ≥ speedup; 1 or more.
        loss: least time with Σ loss ≤ loss.
        fixed_cost: (stage, cost) of what no choice changes, such as attention; 0 where not named.
    """

    target: float | None = None
    stage_tolerance: float | None = None
    speedup: float | None = None
    loss: float | None = None
    fixed_cost: tuple[tuple[int, float], ...] = ()

    @property
    def kind(self) -> str:
        """``target``, ``speedup`` or ``loss``."""
        return next((k for k in KINDS if getattr(self, k) is not None), KINDS[0])

    @property
    def wanted(self) -> float:
        """The figure of that kind."""
        return float(getattr(self, self.kind))

    def with_wanted(self, wanted: float) -> Budget:
        """The same budget with another figure of its kind."""
        figures = {kind: wanted if kind == self.kind else None for kind in KINDS}
        return Budget(stage_tolerance=self.stage_tolerance, fixed_cost=self.fixed_cost, **figures)
