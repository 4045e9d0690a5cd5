"""The guard, which takes a map back if the loss spikes after its adoption (docs/method.md, rules of a run).

The guard watches a map for some steps after its adoption. It compares the loss of each step with the losses before the
adoption. Several losses above a limit in a row, or one figure that is not finite, raise an alarm, and the last good map
is adopted again. The next map must then predict a smaller loss than the one that was taken back. The figures arrive one
step late and are equal on all ranks, so that the guard needs no communication.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snip_megatron.config.guard import LEAST_LOSSES, GuardSettings
from snip_megatron.errors import SnipError, is_finite
from snip_megatron.precision import PrecisionMap
from snip_megatron.runtime.checks import count

if TYPE_CHECKING:
    from snip_megatron.runtime.step_report import StepFigures

_LEAST_RISE = 0.01
"""A loss is a spike only if it is at least this share above the mean, even if the standard deviation is smaller."""

_REFUSALS = 3
"""Number of refused maps in a row after which the bar is lifted. Otherwise one bad batch could end all updates."""


@dataclass(frozen=True)
class Alarm:
    """An alarm of the guard: the map in force must be taken back.

    Attributes:
        step: the step whose figures raised the alarm.
        reason: the reason, in one line.
        loss: the loss of the step.
        limit: the limit of losses; None if the alarm is about a figure that is not finite.
    """

    step: int
    reason: str
    loss: float | None
    limit: float | None

    @classmethod
    def from_dict(cls, state: Any, where: str) -> Alarm:
        """Parse the output of :func:`dataclasses.asdict`. Raises SnipError naming ``where`` if it is invalid."""
        if not isinstance(state, dict) or not isinstance(state.get("reason"), str):
            raise SnipError(f"{where}: alarm: must hold step, reason, loss and limit")
        for name in ("loss", "limit"):
            if state.get(name) is not None and not is_finite(state[name]):
                raise SnipError(f"{where}: alarm.{name}: must be a finite number")
        step = count(state.get("step"), f"{where}: guard.step")
        return cls(step, state["reason"], state.get("loss"), state.get("limit"))


class Guard:
    """The guard of one rank. All ranks have the same state, because they observe the same figures."""

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self._losses: deque[float] = deque(maxlen=settings.window)
        self._probation: int | None = None  # step of the adoption that is watched
        self._strikes = 0  # spikes in a row on probation, which count against the map
        self._spikes = 0  # in a row outside a probation; a window of them is a higher loss, not spikes
        self._bar: float | None = None  # limit of the next map's predicted loss
        self._refusals = 0
        self.good: PrecisionMap | None = None
        """The last map that passed its probation; None for bf16 everywhere, with which training began."""

    # -- maps --------------------------------------------------------------------------------------------------
    def refuses(self, candidate: PrecisionMap) -> str | None:
        """Return the reason for which a solved map must not be adopted, or None if it may. Counts the refusals."""
        predicted = predicted_loss(candidate)
        if self._bar is None or predicted is None or predicted <= self._bar:
            return None
        self._refusals += 1
        reason = f"its predicted loss {predicted:.4g} is above {self._bar:.4g}, the bar since a map was taken back"
        if self._refusals >= _REFUSALS:
            self._bar, self._refusals = None, 0
            reason += f"; the bar is lifted after {_REFUSALS} such maps"
        return reason

    def adopted(self, step: int) -> None:
        """Begin the probation of a map that is in force from ``step`` on."""
        if self._settings.steps:
            self._probation, self._strikes, self._spikes = step, 0, 0

    def taken_back(self, failed: PrecisionMap) -> None:
        """Note that ``failed`` was taken back, and set the bar for the next map's predicted loss."""
        self._probation, self._strikes, self._refusals = None, 0, 0
        predicted = predicted_loss(failed)
        # The absolute value makes the bar stricter also for negative predictions, which measured scores may give.
        if predicted is not None:
            self._bar = predicted - (1 - self._settings.bar) * abs(predicted)

    # -- figures -----------------------------------------------------------------------------------------------
    def observe(self, figures: StepFigures, in_force: PrecisionMap | None) -> Alarm | None:
        """Observe the figures of one step.

        Args:
            figures: the figures. Those of steps before the adoption do not count against the map.
            in_force: the map in force.

        Returns:
            An alarm if ``in_force`` must be taken back, else None.
        """
        on_probation = self._probation is not None and figures.step >= self._probation
        if on_probation and figures.broken:
            return Alarm(figures.step, "the loss or the gradient norm is not finite", figures.loss, None)
        limit = self._limit()
        spike = figures.loss is not None and limit is not None and figures.loss > limit
        if on_probation:
            self._strikes = self._strikes + 1 if spike else 0
            if self._strikes >= self._settings.patience:
                reason = f"{self._strikes} losses in a row above {limit:.4g}"
                return Alarm(figures.step, reason, figures.loss, limit)
        elif spike and self._probation is None:
            self._spikes += 1
            if self._spikes >= self._settings.window:
                self._losses.clear()
        elif figures.loss is not None and not figures.broken and not spike:
            self._spikes = 0
            self._losses.append(figures.loss)
        self._end_probation(figures.step, in_force)
        return None

    def _end_probation(self, step: int, in_force: PrecisionMap | None) -> None:
        if self._probation is None or self._strikes or step < self._probation + self._settings.steps - 1:
            return
        self.good, self._probation = in_force, None
        self._bar, self._refusals = None, 0
        self._losses.clear()  # the next map is compared with losses under this one

    def _limit(self) -> float | None:
        if len(self._losses) < LEAST_LOSSES:
            return None
        mean = statistics.fmean(self._losses)
        return mean + max(self._settings.sigma * statistics.pstdev(self._losses, mean), _LEAST_RISE * abs(mean))

    # -- checkpoint --------------------------------------------------------------------------------------------
    def as_dict(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {
            "losses": list(self._losses),
            "probation": self._probation,
            "strikes": self._strikes,
            "spikes": self._spikes,
            "bar": self._bar,
            "refusals": self._refusals,
            "good": None if self.good is None else self.good.to_json(),
        }

    def restore(self, state: Mapping[str, Any], where: str) -> None:
        """Restore the output of :meth:`as_dict`. Raises SnipError naming ``where`` if it is invalid."""
        losses, good = state.get("losses"), state.get("good")
        if not isinstance(losses, list) or not all(is_finite(loss) for loss in losses):
            raise SnipError(f"{where}: guard.losses: must be a list of finite numbers")
        if good is not None and not isinstance(good, str):
            raise SnipError(f"{where}: guard.good: must be a text")
        probation, bar = state.get("probation"), state.get("bar")
        if bar is not None and not is_finite(bar):
            raise SnipError(f"{where}: guard.bar: must be a finite number")
        self._losses = deque(losses, maxlen=self._settings.window)
        self._probation = None if probation is None else count(probation, f"{where}: guard.probation")
        self._strikes = count(state.get("strikes"), f"{where}: guard.strikes")
        self._spikes = count(state.get("spikes", 0), f"{where}: guard.spikes")
        if "spikes" not in state and probation is None:  # earlier releases had one count for both
            self._strikes, self._spikes = 0, self._strikes
        self._refusals = count(state.get("refusals"), f"{where}: guard.refusals")
        self._bar = bar
        self.good = None if good is None else PrecisionMap.from_json(good, where=where)
        if not self._settings.steps:  # the resumed run has switched the guard off
            self._probation, self._strikes, self._bar = None, 0, None


def predicted_loss(precision_map: PrecisionMap) -> float | None:
    """Return the sum of predicted losses of a map's choices, or None if the solver did not make the map.

    The objective of a plan's map depends on the phase. Its loss can be compared with those of other maps.
    """
    return precision_map.objective if precision_map.loss is None else precision_map.loss
