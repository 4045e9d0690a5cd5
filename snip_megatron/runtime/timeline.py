"""The timeline of a run, which is known before it begins: its end, its phases, and the weights of their errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from snip_megatron.precision.phases import PrecisionPlan, Schedule


def even_weights(origin: int, begins: Sequence[int], last: int) -> tuple[float, ...]:
    """Return the weights of phases under a constant learning rate, if nothing is forgotten: their shares of the run."""
    return tuple((end - begin) / (last - origin) for begin, end in itertools.pairwise([*begins, last]))


@dataclass(frozen=True)
class Timeline:
    """The timeline of a run, equal on all ranks.

    Attributes:
        last: the step before which training ends.
        schedule: the phases in which updates may choose different maps; None for maps that do not depend on time.
        fixed: returns the plan of a policy that needs no statistics. Its arguments are the first step of the run,
            ``last``, the first step of the plan, and the Σ of the fp4 shares of the steps before it. None for other
            policies.
        carried: returns the weight of the carried loss in every phase (``sensitivity.phased``). Its arguments are
            the first step of the run, the first steps of its remaining phases, and ``last``.
        standing: weight of the standing loss in the last phase (``sensitivity.phased.STANDING_WEIGHTS``).
        timed: whether the average over the run is one of predicted time instead of the fp4 share.
    """

    last: int
    schedule: Schedule | None = None
    fixed: Callable[[int, int, int, float], PrecisionPlan] | None = None
    carried: Callable[[int, Sequence[int], int], Sequence[float]] = even_weights
    standing: float = 1.0
    timed: bool = False
