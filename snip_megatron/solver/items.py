"""The parts of a problem: a budget, and items with a choice of formats."""

from __future__ import annotations

from dataclasses import dataclass

from snip_megatron.precision import Format

KINDS = ("target", "speedup", "loss")
"""Kinds of budgets."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One format that an item may run in.

    Attributes:
        format: the number format.
        loss: the loss of quality in any unit. It may be negative.
        saving: the part of the item's cost that the format saves. It is negative if the format is slower than the
            reference.
    """

    format: Format
    loss: float
    saving: float


@dataclass(frozen=True, slots=True)
class Item:
    """One decision: the format of a GEMM (granularity ``gemm``) or of a whole linear (``layer``).

    Attributes:
        id: unique non-empty text. A training run uses names such as ``decoder.layers.0.mlp.linear_fc1:fprop``.
        stage: pipeline stage. All chunks of a virtual pipeline have the same stage.
        cost: FLOPs or seconds in the reference format, at most 1e18.
        choices: at least one; each format at most once.
        group: name of a group. All items of a group take the same format, also if they lie on different stages. None:
            the item belongs to no group.
        pin: the format that the item must take, one of its choices. None: any choice.
    """

    id: str
    stage: int
    cost: float
    choices: tuple[Choice, ...]
    group: str | None = None
    pin: Format | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """The budget of a problem. Exactly one of ``target``, ``speedup`` and ``loss`` is set.

    With ``speedup`` and ``loss``, costs are times. A stage takes the cost of its items less their savings, plus its
    ``fixed_cost``. A step takes as long as its slowest stage. The reference time is that of a step without any saving.

    Attributes:
        target: minimise Σ loss so that Σ saving ≥ target · Σ cost over all items; in [0, 1].
        stage_tolerance: with ``target``, on every stage Σ saving ≥ (target − tolerance) · cost of the stage. None: no
            constraint on stages.
        speedup: minimise Σ loss so that reference time / time ≥ speedup; 1 or more.
        loss: minimise the time so that Σ loss ≤ loss.
        fixed_cost: (stage, cost) pairs of the time that no choice changes, such as attention. Stages that are not named
            have 0.
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
        """The value of the budget."""
        return float(getattr(self, self.kind))

    def with_wanted(self, wanted: float) -> Budget:
        """Return a budget of the same kind with another value."""
        figures = {kind: wanted if kind == self.kind else None for kind in KINDS}
        return Budget(stage_tolerance=self.stage_tolerance, fixed_cost=self.fixed_cost, **figures)
