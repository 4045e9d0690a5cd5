"""The guard, which takes a map back if the loss spikes after its adoption (docs/how-it-works.md, rules of a run).

For some steps after an adoption, losses are compared with those before it. Several losses in a row above a limit, or a
figure that is not finite, raise an alarm, and the last good map is adopted again. The next map must then predict a
smaller loss than the one that was taken back. No communication is needed, because figures are equal on all ranks.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.strict_json import JsonFields
from snip_megatron.runtime.config import SnipConfig

if TYPE_CHECKING:
    from snip_megatron.runtime.exchange import StepFigures

_MIN_LOSSES, WINDOW = 10, 50
"""Minimum and maximum number of losses for a mean and a deviation. With fewer, only NaN and Inf raise an alarm."""

_PATIENCE = 3
"""Number of spikes in a row after which the last good map is restored."""

_BAR = 0.9
"""Limit of the predicted loss of a map, as a multiple of that of the map which was taken back before it."""

MIN_RISE = 0.01
"""A loss is a spike only if it exceeds the mean by this share, however small the standard deviation is."""

_REFUSALS = 3
"""Number of refused maps in a row after which the bar is lifted. Otherwise one bad batch could end all updates."""


@dataclass(frozen=True)
class Alarm(JsonFields):
    """An alarm about the figures of a step: the map in force must be taken back."""

    step: int
    reason: str
    loss: float | None
    limit: float | None  # the limit that the loss exceeded. None if a figure was not finite


@dataclass
class GuardState(JsonFields):
    """The state of the guard in a checkpoint."""

    losses: tuple[float, ...] = ()  # the last losses outside probations that are no spikes
    probation: int | None = None  # the step of the adoption that is watched. None outside a probation
    strikes: int = 0  # spikes in a row on probation, which count against the map
    spikes: int = 0  # spikes in a row outside a probation. A window of them is a new level of the loss
    bar: float | None = None  # limit of the next map's predicted loss. None if there is none
    refusals: int = 0  # number of maps in a row that were refused
    # the last map that passed its probation. None if that is bf16 everywhere, with which training began
    good: PrecisionMap | None = None


class Guard:
    """The guard of one rank. All ranks observe the same figures and have the same state.

    It watches nothing in a run whose maps the user has fixed.
    """

    def __init__(self, config: SnipConfig, state: GuardState | None = None) -> None:
        self._steps, self._sigma = config.guard_steps if config.updates else 0, config.guard_sigma
        self.state = state = GuardState() if state is None else state
        if not self._steps:  # a resumed run may have switched the guard off
            state.probation, state.strikes, state.bar = None, 0, None

    # -- maps --------------------------------------------------------------------------------------------------
    def refuses(self, candidate: PrecisionMap) -> str | None:
        """Return why a solved map must not be adopted. None if it may be adopted. Refusals are counted."""
        predicted = predicted_loss(candidate)
        if self.state.bar is None or predicted is None or predicted <= self.state.bar:
            return None
        self.state.refusals += 1
        reason = f"its predicted loss {predicted:.4g} is above {self.state.bar:.4g}, the bar since a map was taken back"
        if self.state.refusals >= _REFUSALS:
            self.state.bar, self.state.refusals = None, 0
            reason += f"; the bar is lifted after {_REFUSALS} such maps"
        return reason

    def adopted(self, step: int) -> None:
        """Begin the probation of a map that is in force from ``step`` on."""
        if self._steps:
            self.state.probation, self.state.strikes, self.state.spikes = step, 0, 0

    def taken_back(self, failed: PrecisionMap) -> None:
        """End the probation of a map that was taken back, and set the bar for the next map's predicted loss."""
        self.state.probation, self.state.strikes, self.state.refusals = None, 0, 0
        predicted = predicted_loss(failed)
        # The absolute value makes the bar stricter also for negative predictions, which measured scores may give.
        if predicted is not None:
            self.state.bar = predicted - (1 - _BAR) * abs(predicted)

    # -- figures -----------------------------------------------------------------------------------------------
    def observe(self, figures: StepFigures, in_force: PrecisionMap | None) -> Alarm | None:
        """Observe the figures of one step. Returns an alarm if the map in force must be taken back.

        Figures of steps before the adoption do not count against the map.
        """
        if not self._steps:
            return None
        state = self.state
        on_probation = state.probation is not None and figures.step >= state.probation
        if on_probation and figures.broken:
            return Alarm(figures.step, "the loss or the gradient norm is not finite", figures.loss, None)
        limit = self._limit()
        spike = figures.loss is not None and limit is not None and figures.loss > limit
        if on_probation:
            state.strikes = state.strikes + 1 if spike else 0
            if state.strikes >= _PATIENCE:
                reason = f"{state.strikes} losses in a row above {limit:.4g}"
                return Alarm(figures.step, reason, figures.loss, limit)
        elif spike and state.probation is None:
            state.spikes += 1
            if state.spikes >= WINDOW:
                state.losses = ()
        elif figures.loss is not None and not figures.broken and not spike:
            state.spikes = 0
            state.losses = (*state.losses, figures.loss)[-WINDOW:]
        if state.probation is not None and not state.strikes and figures.step >= state.probation + self._steps - 1:
            state.good, state.probation, state.bar, state.refusals = in_force, None, None, 0
            state.losses = ()  # the next map is compared with losses under this map
        return None

    def _limit(self) -> float | None:
        losses = self.state.losses
        if len(losses) < _MIN_LOSSES:
            return None
        mean = statistics.fmean(losses)
        return mean + max(self._sigma * statistics.pstdev(losses, mean), MIN_RISE * abs(mean))


def predicted_loss(precision_map: PrecisionMap) -> float | None:
    """Return the sum of predicted losses of a map's choices. None if the solver did not make the map.

    The objective of a plan's map depends on the phase, while its ``loss`` can be compared with that of other maps.
    """
    return precision_map.objective if precision_map.loss is None else precision_map.loss
