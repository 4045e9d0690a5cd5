"""The part of a solve request for runs with phases: the remaining phases of the run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from snip_megatron.errors import SnipError, cut
from snip_megatron.precision.phases import Schedule


@dataclass(frozen=True)
class PhasedRequest:
    """The remaining phases of a run, as plain data: it is sent to the sidecar process with its SolveRequest.

    All tuples have one entry per phase, in the order of time. Past phases are not included.

    Attributes:
        begins: first training step of each phase. The first phase may have begun earlier and counts from this step on.
        steps: number of training steps of each phase, 1 or more.
        budgets: the smallest fp4 share that a phase must reach on its own, in addition to the average over the run
            (``SolveRequest.target``); or the smallest speedup if ``SolveRequest.speedup`` is set. None: no requirement.
        change: globs over ``<linear>`` and ``<linear>:<gemm>`` of the options whose format may differ from the
            preceding phase's. None: all of them. The first entry is not used.
        standing: weight of the standing loss: ``persistence.STANDING_WEIGHTS`` for the last phase of a run, and 0.0
            for its other phases.
        carried: weight of the carried loss (``persistence.carried_weights``): the loss of an option that is imprecise
            throughout the phase, relative to one that is imprecise throughout the run.
        spent_steps: number of past steps of the run. They count towards the average.
        spent: mean fp4 share of these steps; for a budget of time their speedup, the harmonic mean over the steps.
    """

    begins: tuple[int, ...]
    steps: tuple[int, ...]
    budgets: tuple[float | None, ...]
    change: tuple[tuple[str, ...] | None, ...]
    standing: tuple[float, ...]
    carried: tuple[float, ...]
    spent_steps: int = 0
    spent: float = 0.0

    def __post_init__(self) -> None:
        count = len(self.steps)
        if not count:
            raise SnipError("phases: at least one phase must remain")
        for name in ("begins", "budgets", "change", "standing", "carried"):
            if len(getattr(self, name)) != count:
                raise SnipError(f"phases.{name}: must have one entry for each of the {count} phases")
        if any(steps < 1 for steps in self.steps):
            raise SnipError(f"phases.steps {cut(self.steps)}: each must be 1 or more")
        if any(b <= a for a, b in zip(self.begins, self.begins[1:], strict=False)):
            raise SnipError(f"phases.begins {cut(self.begins)}: must ascend")
        for name in ("standing", "carried"):
            if not all(math.isfinite(x) and x >= 0.0 for x in getattr(self, name)):
                raise SnipError(f"phases.{name} {cut(getattr(self, name))}: must be finite numbers, 0 or more")
        if not all(x is None or (math.isfinite(x) and x >= 0.0) for x in self.budgets):
            raise SnipError(f"phases.budgets {cut(self.budgets)}: must be finite numbers, 0 or more")
        if self.spent_steps < 0 or not (math.isfinite(self.spent) and self.spent >= 0.0):
            raise SnipError(f"phases.spent {cut(self.spent)} in {self.spent_steps} steps: must be finite, 0 or more")

    @classmethod
    def of_schedule(
        cls,
        schedule: Schedule,
        run: tuple[int, int],
        step: int,
        *,
        carried: Callable[[Sequence[int]], Sequence[float]],
        standing: float,
        spent_steps: int = 0,
        spent: float = 0.0,
    ) -> PhasedRequest:
        """Return the phases of ``schedule`` that remain at ``step``.

        Args:
            schedule: the phases of the whole run.
            run: the first step of the run, and the step before which it ends.
            step: the step from which phases are planned, before the end of the run.
            carried: returns the weights of the carried loss, given the first steps of the remaining phases.
            standing: weight of the standing loss in the last phase.
            spent_steps, spent: as the attributes.
        """
        rest = schedule.remaining(*run, step)
        phases = [schedule.phases[index] for index, _, _ in rest]
        begins = tuple(begin for _, begin, _ in rest)
        return cls(
            begins=begins,
            steps=tuple(steps for _, _, steps in rest),
            budgets=tuple(None if phase.budget is None else phase.budget.value for phase in phases),
            change=tuple(phase.change for phase in phases),
            standing=(*[0.0] * (len(rest) - 1), standing),
            carried=tuple(carried(begins)),
            spent_steps=spent_steps,
            spent=spent,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields in a form that JSON can store."""
        body = {name: list(getattr(self, name)) for name in ("begins", "steps", "budgets", "standing", "carried")}
        globs = [None if each is None else list(each) for each in self.change]
        return body | {"change": globs, "spent_steps": self.spent_steps, "spent": self.spent}

    @classmethod
    def from_dict(cls, body: Any, where: str) -> PhasedRequest:
        """Read :meth:`as_dict`. ``where`` names the source in errors. Raises SnipError on anything else."""
        if not isinstance(body, dict) or not set(body) <= {f.name for f in dataclasses.fields(cls)}:
            raise SnipError(f"{where}: not phases that this version knows")
        try:
            return cls(
                begins=tuple(int(x) for x in body["begins"]),
                steps=tuple(int(x) for x in body["steps"]),
                budgets=tuple(None if x is None else float(x) for x in body["budgets"]),
                change=tuple(None if x is None else tuple(str(glob) for glob in x) for x in body["change"]),
                standing=tuple(float(x) for x in body["standing"]),
                carried=tuple(float(x) for x in body["carried"]),
                spent_steps=int(body.get("spent_steps", 0)),
                spent=float(body.get("spent", 0.0)),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise SnipError(f"{where}: not phases ({cut(repr(error))})") from None
