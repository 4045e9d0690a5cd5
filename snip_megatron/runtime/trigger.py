"""The trigger, which starts an update early when gradient norms change (``--snip-trigger``).

A map depends on the ranking of the linears' sensitivities, and these depend on gradients: ΔL on ‖G‖², ΔW on ‖∇W‖.
Every :data:`EVERY` steps the ranks sum ‖∇W‖² of each linear, in the collective that carries the loss. The drift
measures how much these norms have changed *relative to each other* since the map in force was adopted: it is the
coefficient of variation of the ratios of the norms, now over then. A common factor, for example of a falling loss, does
not count.

Every rank decides by itself from the same numbers. Only IEEE arithmetic is used, so that all ranks decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from snip_megatron.errors import SnipError
from snip_megatron.runtime.checks import count, squares

EVERY = 10
"""Steps between two observations of the gradients."""

SETTLE = 3
"""Number of observations after an update or an adoption from which the reference is taken."""

_SMOOTH = 0.5  # weight of the newest observation in the running average, which reduces the noise of single steps


class Trigger:
    """The trigger of one rank. All ranks have the same state, because they observe the same numbers.

    Args:
        threshold: the drift above which an update starts, greater than 0.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._since: int | None = None
        self._looks = 0
        self._average: list[float] = []
        self._reference: list[float] = []

    @staticmethod
    def looks_at(step: int) -> bool:
        """Return whether the gradients of ``step`` are observed."""
        return step % EVERY == 0

    def restart(self, step: int) -> None:
        """Take a new reference, because an update began before ``step`` or its map was adopted."""
        self._since, self._looks = step, 0
        self._average, self._reference = [], []

    def observe(self, step: int, squares: Sequence[float]) -> None:
        """Observe ‖∇W‖² of every linear in ``step``.

        What is not finite is ignored, and so are the gradients of a step before the restart, which arrive after it.
        """
        if self._since is None or step < self._since or not all(math.isfinite(s) for s in squares):
            return
        if len(self._average) != len(squares):
            self._average, self._reference, self._looks = list(squares), [], 0
        else:
            self._average = [a + _SMOOTH * (s - a) for a, s in zip(self._average, squares, strict=True)]
        self._looks += 1
        if self._looks == SETTLE:
            self._reference = list(self._average)

    @property
    def drift(self) -> float:
        """Coefficient of variation of the ratios of norms, now over then; 0 while there is no reference."""
        if self._looks <= SETTLE:
            return 0.0
        pairs = zip(self._average, self._reference, strict=True)
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
            "reason": f"gradient norms moved against each other by more than --snip-trigger {self._threshold:g}",
            "drift": drift,
            "threshold": self._threshold,
            "since": self._since,
        }

    # -- checkpoint --------------------------------------------------------------------------------------------
    def as_dict(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {
            "since": self._since,
            "looks": self._looks,
            "average": self._average,
            "reference": self._reference,
        }

    def restore(self, state: Any, where: str) -> None:
        """Restore the output of :meth:`as_dict`. Raises SnipError naming ``where`` if it is invalid."""
        if not isinstance(state, dict):
            raise SnipError(f"{where}: trigger: must be an object")
        since = None if state.get("since") is None else count(state["since"], f"{where}: trigger.since")
        looks = count(state.get("looks"), f"{where}: trigger.looks")
        lists = {name: squares(state.get(name), f"{where}: trigger.{name}") for name in ("average", "reference")}
        if len(lists["reference"]) not in (0, len(lists["average"])):
            raise SnipError(f"{where}: trigger.reference: must be as long as trigger.average")
        if looks > SETTLE and not lists["reference"]:
            raise SnipError(f"{where}: trigger.reference: missing after {looks} looks")
        self._since, self._looks = since, looks
        self._average, self._reference = lists["average"], lists["reference"]
