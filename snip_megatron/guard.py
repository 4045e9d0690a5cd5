"""After an adoption: is the loss as it was? If not, back to the last map that was good (DESIGN, rule 8).

A map is on probation for some steps. Each step's loss, one step late and equal on all ranks, is held against the losses
before the adoption; a run of losses above the limit, or one figure that is not finite, is a verdict. Ranks need no
communication for it: they see the same figures. The next map must then promise a smaller loss than the one that failed.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snip_megatron.errors import SnipError
from snip_megatron.precision import PrecisionMap

if TYPE_CHECKING:
    from snip_megatron.step_report import StepFigures

_LEAST_LOSSES = 10
"""Losses below which their spread says nothing: only a figure that is not finite is then a verdict."""

_LEAST_RISE = 0.01
"""A loss less than this share above the mean is no spike, however quiet the losses before were."""

_REFUSALS = 3
"""Maps that may fall short of the bar in a row; then it is lifted, or one bad batch would end all updates."""


@dataclass(frozen=True)
class GuardSettings:
    """``--snip-guard-*``.

    Attributes:
        steps: how long a map is on probation; 0: no guard.
        sigma: standard deviations above the mean of the losses before at which a loss is a spike.
        patience: spikes in a row that make a verdict.
        window: losses before the adoption that count.
        bar: what the next map's predicted loss may be, as a share of that of the map that failed.
    """

    steps: int = 100
    sigma: float = 6.0
    patience: int = 3
    window: int = 50
    bar: float = 0.9

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("patience", 1), ("window", _LEAST_LOSSES)):
            if getattr(self, name) < least:
                raise SnipError(f"--snip-guard-{name} {getattr(self, name)}: must be at least {least}")
        if not (math.isfinite(self.sigma) and self.sigma > 0):
            raise SnipError(f"--snip-guard-sigma {self.sigma}: must be positive")
        if not 0 < self.bar <= 1:
            raise SnipError(f"--snip-guard-bar {self.bar}: must lie in (0, 1]")


@dataclass(frozen=True)
class Alarm:
    """A verdict: the figures of ``step`` say that the map in force must go."""

    step: int
    reason: str
    loss: float | None
    limit: float | None

    @classmethod
    def from_dict(cls, state: Any, where: str) -> Alarm:
        """Inverse of :func:`dataclasses.asdict`. Raises SnipError naming ``where`` on anything else."""
        if not isinstance(state, dict) or not isinstance(state.get("reason"), str):
            raise SnipError(f"{where}: alarm: must hold step, reason, loss and limit")
        for name in ("loss", "limit"):
            if state.get(name) is not None and not _is_finite(state[name]):
                raise SnipError(f"{where}: alarm.{name}: must be a finite number")
        return cls(_count(state.get("step"), "step", where), state["reason"], state.get("loss"), state.get("limit"))


class Guard:
    """One rank's guard; the same on all ranks, since it sees only figures that all ranks share."""

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self._losses: deque[float] = deque(maxlen=settings.window)
        self._probation: int | None = None  # step of the adoption under test
        self._strikes = 0
        self._bar: float | None = None  # the next map's predicted loss must not exceed it
        self._refusals = 0
        self.good: PrecisionMap | None = None
        """The last map that passed its probation; None: bf16 everywhere, with which training began."""

    # -- maps --------------------------------------------------------------------------------------------------
    def refuses(self, candidate: PrecisionMap) -> str | None:
        """Why a solved map may not be adopted after one that failed; None if it may. Counts refusals."""
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
        """A new map is in force from ``step`` on: its probation begins. The good map stays the one before it."""
        if self._settings.steps:
            self._probation, self._strikes = step, 0

    def taken_back(self, failed: PrecisionMap) -> None:
        """The good map is in force again; the next one must beat ``failed`` by the bar's margin."""
        self._probation, self._strikes, self._refusals = None, 0, 0
        predicted = predicted_loss(failed)
        # A negative prediction (measured scores) shrinks towards minus infinity, not towards zero.
        if predicted is not None:
            self._bar = predicted - (1 - self._settings.bar) * abs(predicted)

    # -- figures -----------------------------------------------------------------------------------------------
    def observe(self, figures: StepFigures, in_force: PrecisionMap | None) -> Alarm | None:
        """Take in one step's figures; an alarm if ``in_force`` must go. Steps before the adoption are no evidence."""
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
        elif figures.loss is not None and not figures.broken and not spike:
            self._losses.append(figures.loss)
        self._end_probation(figures.step, in_force)
        return None

    def _end_probation(self, step: int, in_force: PrecisionMap | None) -> None:
        if self._probation is None or self._strikes or step < self._probation + self._settings.steps - 1:
            return
        self.good, self._probation = in_force, None
        self._bar, self._refusals = None, 0
        self._losses.clear()  # the next adoption is held against losses under this map

    def _limit(self) -> float | None:
        if len(self._losses) < _LEAST_LOSSES:
            return None
        mean = statistics.fmean(self._losses)
        return mean + max(self._settings.sigma * statistics.pstdev(self._losses, mean), _LEAST_RISE * abs(mean))

    # -- checkpoint --------------------------------------------------------------------------------------------
    def as_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {
            "losses": list(self._losses),
            "probation": self._probation,
            "strikes": self._strikes,
            "bar": self._bar,
            "refusals": self._refusals,
            "good": None if self.good is None else self.good.to_json(),
        }

    def restore(self, state: Mapping[str, Any], where: str) -> None:
        """Inverse of :meth:`as_dict`. Raises SnipError naming ``where`` on anything else."""
        losses, good = state.get("losses"), state.get("good")
        if not isinstance(losses, list) or not all(_is_finite(loss) for loss in losses):
            raise SnipError(f"{where}: guard.losses: must be a list of finite numbers")
        if good is not None and not isinstance(good, str):
            raise SnipError(f"{where}: guard.good: must be a text")
        probation, bar = state.get("probation"), state.get("bar")
        if bar is not None and not _is_finite(bar):
            raise SnipError(f"{where}: guard.bar: must be a finite number")
        self._losses = deque(losses, maxlen=self._settings.window)
        self._probation = None if probation is None else _count(probation, "probation", where)
        self._strikes = _count(state.get("strikes"), "strikes", where)
        self._refusals = _count(state.get("refusals"), "refusals", where)
        self._bar = bar
        self.good = None if good is None else PrecisionMap.from_json(good, where=where)


def predicted_loss(precision_map: PrecisionMap) -> float | None:
    """Σ loss of a map's choices as its solver reported it; None for a map nobody solved for."""
    return precision_map.loss if precision_map.budget is not None else precision_map.objective


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _count(value: Any, name: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise SnipError(f"{where}: guard.{name}: must be an integer in [0, 2^31)")
    return value
