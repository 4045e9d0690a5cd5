"""When scores have aged before their time: an update starts because gradients moved (``--snip-trigger``).

A map depends on how the linears' sensitivities compare, and those go with their gradients: ΔL with ‖G‖², ΔW with
‖∇W‖. Every :data:`EVERY` steps the ranks add up ‖∇W‖² of each linear, in the collective that carries the loss anyway.
Drift is how much these norms have moved *against each other* since the map in force was adopted: the coefficient of
variation of their ratios. A common factor, such as a falling loss brings, changes no ranking and counts nothing.

Every rank decides by itself from the same numbers; only IEEE arithmetic is used, so all decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from snip_megatron.errors import SnipError

EVERY = 10
"""Steps between two looks at the gradients."""

SETTLE = 3
"""Looks after an update or an adoption until there is something to compare with."""

_SMOOTH = 0.5  # share of the newest look in the running average: one step's gradients are noisy


class Trigger:
    """Watches one run. Equal on all ranks.

    Args:
        threshold: drift at which an update starts, above 0.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._since: int | None = None
        self._looks = 0
        self._average: list[float] = []
        self._reference: list[float] = []

    @staticmethod
    def looks_at(step: int) -> bool:
        """Whether the gradients of ``step`` are to be added up."""
        return step % EVERY == 0

    def restart(self, step: int) -> None:
        """An update has begun before ``step``, or its map was adopted: what follows is compared with what comes now."""
        self._since, self._looks = step, 0
        self._average, self._reference = [], []

    def observe(self, squares: Sequence[float]) -> None:
        """‖∇W‖² of every linear at one look; one that is not finite throughout is not counted."""
        if self._since is None or not all(math.isfinite(s) for s in squares):
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
        """Coefficient of variation of the ratios of norms, now over then; 0 until there is something to compare."""
        if self._looks <= SETTLE:
            return 0.0
        pairs = zip(self._average, self._reference, strict=True)
        ratios = [math.sqrt(now / then) for now, then in pairs if now > 0.0 and then > 0.0]
        mean = math.fsum(ratios) / len(ratios) if ratios else 0.0
        if mean <= 0.0 or not math.isfinite(mean):
            return 0.0
        return math.sqrt(math.fsum((r / mean - 1.0) * (r / mean - 1.0) for r in ratios) / len(ratios))

    def reason(self) -> dict[str, Any] | None:
        """The fields of the event that says why an update starts now; None where none should."""
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
        """JSON-ready memory."""
        return {
            "since": self._since,
            "looks": self._looks,
            "average": self._average,
            "reference": self._reference,
        }

    def restore(self, state: Any, where: str) -> None:
        """Take over :meth:`as_dict`. Raises SnipError naming ``where`` on anything else."""
        if not isinstance(state, dict):
            raise SnipError(f"{where}: trigger: must be an object")
        since, looks = state.get("since"), state.get("looks")
        for name, value in (("since", 0 if since is None else since), ("looks", looks)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
                raise SnipError(f"{where}: trigger.{name}: must be an integer in [0, 2^31)")
        lists = {name: squares(state.get(name), f"{where}: trigger.{name}") for name in ("average", "reference")}
        if len(lists["reference"]) not in (0, len(lists["average"])):
            raise SnipError(f"{where}: trigger.reference: must be as long as trigger.average")
        assert isinstance(looks, int)
        if looks > SETTLE and not lists["reference"]:
            raise SnipError(f"{where}: trigger.reference: missing after {looks} looks")
        self._since, self._looks = since, looks
        self._average, self._reference = lists["average"], lists["reference"]


def squares(value: Any, where: str) -> list[float]:
    """A list of finite numbers of 0 or more. Raises SnipError naming ``where`` on anything else."""
    if not isinstance(value, list):
        raise SnipError(f"{where}: must be a list")
    for number in value:
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < math.inf:
            raise SnipError(f"{where}: must hold finite numbers of 0 or more")
    return [float(number) for number in value]
