"""The account of a run: how long steps take in bf16 and under each map, what SNIP itself costs, and the time saved.

It takes the records of rank 0 in the order of time, from a running training (``coordinator.py``) or a run directory
(:mod:`snip_megatron.reporting.summary`). Both therefore give the same figures.

Times are those of Megatron's own step on rank 0. Probes, waiting for the solver and adoptions lie between steps and
count as costs. The steps right after a start, an update or an adoption do not count as usual steps. By how much those
after an update or an adoption take longer is a cost too, ``settled``.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from snip_megatron.errors import is_finite
from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.records.run_data import COSTS

SETTLING = 3
"""Steps ignored after a start and after an adoption, because they compile and allocate."""
STEPS = 16
"""Minimum number of steps for a median."""
TOLERANCE = 1.03
"""Factor within which two medians count as equal. On an idle machine they are repeatable within 2 %."""
KEPT = 256
"""Number of the last usual steps over which a median is taken."""


@dataclass(frozen=True)
class Stretch:
    """The steps between two adoptions.

    Attributes:
        begin, end: the first step, and the step after the last.
        version: the map's version; None before the first map.
        quantised: whether any GEMM of the map is not in bf16.
        step_s: median seconds of a usual step; None with fewer than :data:`STEPS` of them.
        bf16_s: the same in bf16, on the same machine.
    """

    begin: int
    end: int
    version: int | None
    quantised: bool
    step_s: float | None
    bf16_s: float | None

    @property
    def steps(self) -> int:
        """The number of steps."""
        return self.end - self.begin

    @property
    def speedup(self) -> float | None:
        """Time of a step in bf16 divided by that under the map."""
        return self.bf16_s / self.step_s if self.step_s and self.bf16_s else None

    @property
    def saved_s(self) -> float | None:
        """Seconds saved against bf16, without costs. 0 in bf16; None if they are not known; negative if slower."""
        if not self.quantised:
            return 0.0
        return self.steps * (self.bf16_s - self.step_s) if self.step_s and self.bf16_s else None


@dataclass
class _Open:
    """A stretch of the machine in use. ``usual`` holds its times while it runs, ``step_s`` their median afterwards.

    ``settling`` holds the times of its steps after an update or an adoption.
    """

    begin: int
    version: int | None = None
    quantised: bool = False
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    settling: list[float] = field(default_factory=list)
    step_s: float | None = None

    def median(self) -> float | None:
        return self.step_s if self.step_s is not None else _median(self.usual)

    def longer_s(self) -> float:
        """Seconds by which the settling steps took longer than usual ones; 0 if they did not, or if it is unknown."""
        median = self.median()
        return 0.0 if median is None else max(0.0, sum(self.settling) - len(self.settling) * median)


class Account:
    """Steps and costs so far. Its methods must be called in the order of time."""

    def __init__(self) -> None:
        self._waits: dict[str, float] = dict.fromkeys(COSTS, 0.0)  # of events
        self._settled = 0.0  # of earlier machines
        self.updates = 0
        """Updates that were submitted."""
        self._earlier: list[Stretch] = []  # on machines that an earlier job of this run had
        self._open: list[_Open] = []
        self._bf16: deque[float] = deque(maxlen=KEPT)
        self._settling, self._changed = SETTLING, False
        self._next = 0
        self._judged: int | None = None  # first step of the last stretch that slower() has judged

    def adopted(self, step: int, version: int | None, quantised: bool) -> None:
        """Note that a map is in force from ``step`` on."""
        if self._open:
            last = self._open[-1]
            last.step_s = last.median()
            last.usual.clear()
        else:
            self._open.append(_Open(step))
        self._next = max(self._next, step)
        self._open.append(_Open(step, version, quantised))
        self._settling, self._changed = SETTLING, True

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Note an event of the run directory, with its fields."""
        wait = fields.get("wait_s")
        if kind in COSTS and is_finite(wait):
            self._waits[kind] += wait
        if kind == "submit":
            self.updates += 1
        if kind in ("submit", "dropped", "recapture", "resume"):
            self._settling, self._changed = SETTLING, kind != "resume"
        if kind == "resume" and fields.get("changed_fact") is not None:
            self._earlier = self.stretches()
            self._settled = self.costs["settled"]
            self._open.clear()
            self._bf16.clear()

    def step(self, step: int, seconds: float | None) -> None:
        """Note a training step and its duration, which is None if it was not a usual one."""
        if not self._open:
            self._open.append(_Open(step))
        self._next = step + 1
        if seconds is None:
            return
        current = self._open[-1]
        if self._settling:
            self._settling -= 1
            if self._changed:
                current.settling.append(seconds)
        else:
            current.usual.append(seconds)
            if not current.quantised:
                self._bf16.append(seconds)

    def read(
        self,
        events: Iterable[Mapping[str, Any]],
        metrics: Iterable[Mapping[str, Any]],
        maps: Mapping[int, PrecisionMap | None],
    ) -> None:
        """Take a run directory's events, metrics and adopted maps by step. A lost map counts as quantised."""
        waiting = deque(events)
        for row in metrics:
            while waiting and waiting[0]["step"] <= row["step"]:
                self._record(waiting.popleft(), maps)
            seconds = row.get("step_s")
            self.step(row["step"], float(seconds) if is_finite(seconds) and seconds > 0 else None)
        for event in waiting:
            self._record(event, maps)

    def _record(self, event: Mapping[str, Any], maps: Mapping[int, PrecisionMap | None]) -> None:
        if event["event"] == "adopt":
            precision_map, version = maps.get(event["step"]), event.get("version")
            quantised = precision_map is None or is_quantised(precision_map)
            self.adopted(event["step"], version if type(version) is int else None, quantised)
        self.event(event["event"], event)

    # -- figures -----------------------------------------------------------------------------------------------
    @property
    def bf16_s(self) -> float | None:
        """Median seconds of a step in bf16 on the machine in use; None with too few steps."""
        return _median(self._bf16)

    @property
    def bf16_steps(self) -> int:
        """The number of steps of which ``bf16_s`` is the median."""
        return len(self._bf16)

    @property
    def costs(self) -> dict[str, float]:
        """Seconds by kind of cost: of an event, or ``settled``."""
        return self._waits | {"settled": self._settled + sum(each.longer_s() for each in self._open)}

    @property
    def cost_s(self) -> float:
        """Seconds of all costs."""
        return sum(self.costs.values())

    def now(self) -> Stretch | None:
        """Return the stretch in progress; None before the first step."""
        return self._stretch(len(self._open) - 1) if self._open else None

    def slower(self) -> Stretch | None:
        """Return the stretch in progress, once, as soon as it is known that its map makes steps longer than bf16."""
        now = self.now()
        if now is None or now.begin == self._judged or not now.quantised or now.speedup is None:
            return None
        self._judged = now.begin
        return now if 1.0 / now.speedup > TOLERANCE else None

    def stretches(self) -> list[Stretch]:
        """Return all stretches with at least one step, in the order of time."""
        own = (self._stretch(i) for i in range(len(self._open)))
        return [*self._earlier, *(stretch for stretch in own if stretch.steps > 0)]

    def saved_s(self) -> float | None:
        """Return the seconds saved so far, costs subtracted; None before any could be measured."""
        known = [s.saved_s for s in self.stretches() if s.quantised and s.saved_s is not None]
        return sum(known) - self.cost_s if known else None

    def figures(self, *, judged: bool) -> dict[str, float] | None:
        """Return ``step_s``, and if speeds are ``judged`` and known, ``speedup`` and ``saved_h``; None without any."""
        now = self.now()
        if now is None or now.step_s is None:
            return None
        found = {"step_s": now.step_s}
        saved = self.saved_s()
        if judged and now.speedup is not None and saved is not None:
            found |= {"speedup": now.speedup, "saved_h": saved / 3600.0}
        return found

    def _stretch(self, i: int) -> Stretch:
        own = self._open[i]
        end = self._open[i + 1].begin if i + 1 < len(self._open) else max(self._next, own.begin)
        return Stretch(own.begin, end, own.version, own.quantised, own.median(), self.bf16_s)


def _median(seconds: Sequence[float] | deque[float]) -> float | None:
    return statistics.median(seconds) if len(seconds) >= STEPS else None


def is_quantised(precision_map: PrecisionMap) -> bool:
    """Return whether any GEMM of the map is not in bf16."""
    return any(fmt is not Format.BF16 for fmt in precision_map.choices.values())


def duration(seconds: float) -> str:
    """Return a time with its unit: ``12.3 ms``, ``4.0 s``, ``2.5 min`` or ``3.41 h``."""
    size = abs(seconds)
    if size < 1.0:
        return f"{1e3 * seconds:.1f} ms"
    if size < 120.0:
        return f"{seconds:.1f} s"
    return f"{seconds / 60.0:.1f} min" if size < 7200.0 else f"{seconds / 3600.0:.2f} h"


def progress_line(account: Account, fp4_share: float | None, *, unjudged: str | None) -> str | None:
    """Return the line that a run prints beside Megatron's own; None before the first step.

    ``fp4_share`` is that of the map in force. ``unjudged`` says why speeds mean nothing, such as ``emulated``.
    """
    now = account.now()
    if now is None:
        return None
    share = "" if fp4_share is None else f", {fp4_share:.0%} fp4"
    parts = [f"map {now.version}{share}" if now.quantised else "bf16"]
    if now.step_s is None:
        return f"snip: {parts[0]} | measuring steps"
    speed = "" if not now.quantised else f", {unjudged or f'{_factor(now.speedup)} bf16'}"
    parts.append(f"{duration(now.step_s)} a step{speed}")
    saved = None if unjudged else account.saved_s()
    if saved is not None:
        parts.append(f"{'saved' if saved >= 0 else 'lost'} {duration(abs(saved))}, updates included")
    return f"snip: {' | '.join(parts)}"


def _factor(speedup: float | None) -> str:
    return "? x" if speedup is None else f"{speedup:.2f} x"
