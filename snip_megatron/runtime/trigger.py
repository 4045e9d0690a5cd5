"""The trigger, which starts an update early when gradient norms change (``trigger``).

A map depends on the ranking of the linears' sensitivities, and these depend on gradients: ΔL on ‖G‖², ΔW on ‖∇W‖.
Every :data:`EVERY` steps the ranks sum ‖∇W‖² of each linear, in the collective that carries the loss. The drift
measures how much these norms have changed *relative to each other* since the map in force was adopted: it is the
coefficient of variation of the ratios of the norms, now over then. A common factor, for example of a falling loss, does
not count.

Every rank decides by itself from the same numbers. Only IEEE arithmetic is used, so that all ranks decide alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

EVERY = 10
"""Steps between two observations of the gradients."""

SETTLE = 3
"""Number of observations after an update or an adoption from which the reference is taken."""

_SMOOTH = 0.5  # weight of the newest observation in the running average, which reduces the noise of single steps


@dataclass
class TriggerState:
    """What the trigger of a run remembers. It is a part of the state in a checkpoint.

    Attributes:
        since: the step of the last update or adoption; None before the first.
        looks: observations since then.
        average: running average of ‖∇W‖² of every linear.
        reference: the average with which later ones are compared; empty before there is one.
    """

    since: int | None = None
    looks: int = 0
    average: tuple[float, ...] = ()
    reference: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.reference) not in (0, len(self.average)):
            raise ValueError("reference: must be as long as trigger.average")
        if self.looks > SETTLE and not self.reference:
            raise ValueError(f"reference: missing after {self.looks} looks")


class Trigger:
    """The trigger of one rank. All ranks have the same state, because they observe the same numbers.

    Args:
        threshold: the drift above which an update starts, greater than 0.
        state: the state of a checkpoint; None for a fresh run.
    """

    def __init__(self, threshold: float, state: TriggerState | None = None) -> None:
        self._threshold = threshold
        self.state = TriggerState() if state is None else dataclasses.replace(state)

    @staticmethod
    def looks_at(step: int) -> bool:
        """Return whether the gradients of ``step`` are observed."""
        return step % EVERY == 0

    def restart(self, step: int) -> None:
        """Take a new reference, because an update began before ``step`` or its map was adopted."""
        self.state = TriggerState(since=step)

    def observe(self, step: int, squares: Sequence[float]) -> None:
        """Observe ‖∇W‖² of every linear in ``step``.

        What is not finite is ignored, and so are the gradients of a step before the restart, which arrive after it.
        """
        state = self.state
        if state.since is None or step < state.since or not all(math.isfinite(s) for s in squares):
            return
        if len(state.average) != len(squares):
            state.average, state.reference, state.looks = tuple(squares), (), 0
        else:
            state.average = tuple(a + _SMOOTH * (s - a) for a, s in zip(state.average, squares, strict=True))
        state.looks += 1
        if state.looks == SETTLE:
            state.reference = state.average

    @property
    def drift(self) -> float:
        """Coefficient of variation of the ratios of norms, now over then; 0 while there is no reference."""
        if self.state.looks <= SETTLE:
            return 0.0
        pairs = zip(self.state.average, self.state.reference, strict=True)
        ratios = [math.sqrt(now / then) for now, then in pairs if now > 0.0 and then > 0.0]
        mean = math.fsum(ratios) / len(ratios) if ratios else 0.0
        if mean <= 0.0 or not math.isfinite(mean):
            return 0.0
        return math.sqrt(math.fsum((r / mean - 1.0) * (r / mean - 1.0) for r in ratios) / len(ratios))

    def reason(self) -> dict[str, Any] | None:
        """Return the fields of the ``trigger`` event if an update must start, else None."""
        drift = self.drift
        if drift <= self._threshold:
            return None
        return {
            "reason": f"gradient norms moved against each other by more than the setting trigger={self._threshold:g}",
            "drift": drift,
            "threshold": self._threshold,
            "since": self.state.since,
        }
