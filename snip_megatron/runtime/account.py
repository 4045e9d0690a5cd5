"""The account of a run: how long steps take in bf16 and under each map, what SNIP itself costs, and the time saved.

It reads the records of rank 0 in the order of time, from a training or from a run directory.

Times are those of the host's own step on rank 0. Probes, waits for the solver and adoptions lie between steps and count
as costs. The steps right after a start, an update or an adoption are not usual steps. The time by which those after an
update or an adoption exceed usual ones is a cost too, ``settled``.
"""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from snip_megatron.precision.strict_json import is_finite
from snip_megatron.runtime.run_data import COSTS, version_of

SETTLING = 3
"""Steps ignored after a start and after an adoption, because they compile and allocate."""
STEPS = 6
"""Minimum number of steps for a median. A run of 50 steps has so many in bf16 before its first map."""
TOLERANCE = 1.03
"""Factor within which two medians count as equal. On an idle machine they are repeatable within 2 %."""
WINDOW = 256
"""Number of the last usual steps over which a median is taken."""
LATEST = 8
"""Number of steps before an update whose parts are timed. If the GPU waits for its host, times of steps drift."""


@dataclass
class Stretch:
    """The steps between two adoptions."""

    # begin, end: the first step, and the step after the last
    begin: int
    bf16: deque[float]  # seconds of the last usual steps in bf16 on this machine. Stretches on one machine share it
    version: int | None = None  # version of the map. None before the first map
    formats: Mapping[str, float] = field(default_factory=lambda: {"bf16": 1.0})  # shares of the map. Empty if not known
    end: int = 0
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # seconds of the last usual steps
    settling: list[float] = field(default_factory=list)  # seconds of all steps right after an update or an adoption
    # timed, timed_s: number of steps whose duration is known, and their seconds
    timed: int = 0
    timed_s: float = 0.0
    predicted: float | None = None  # the predicted speedup. None if there is none
    predicted_of: str = ""  # what it is the speedup of: the whole ``step`` or the ``linears``

    @property
    def quantised(self) -> bool:
        """Whether any GEMM is not in bf16. True if the formats are not known."""
        return self.formats.keys() != {"bf16"}

    @property
    def steps(self) -> int:
        return max(0, self.end - self.begin)

    @property
    def step_s(self) -> float | None:
        """Median seconds of a usual step. None with fewer than :data:`STEPS` of them."""
        return _median(self.usual)

    @property
    def mean_s(self) -> float | None:
        """Mean seconds of all steps, including those right after a start, an update or an adoption."""
        return self.timed_s / self.timed if self.timed else None

    @property
    def bf16_s(self) -> float | None:
        """Median seconds of a usual step in bf16, on the same machine."""
        return _median(self.bf16)

    @property
    def speedup(self) -> float | None:
        """Time of a step in bf16 divided by that under the map."""
        return self.bf16_s / self.step_s if self.step_s and self.bf16_s else None

    @property
    def step_saving(self) -> float | None:
        """Seconds by which a step is shorter than in bf16, negative if it is longer. 0 in bf16. None if not known."""
        if not self.quantised:
            return 0.0
        return self.bf16_s - self.step_s if self.step_s and self.bf16_s else None

    @property
    def saved_s(self) -> float | None:
        """Seconds saved against bf16, without costs."""
        return None if self.step_saving is None else self.steps * self.step_saving

    @property
    def settled_s(self) -> float:
        """Seconds by which the settling steps exceed usual ones. 0 if they do not, or if it is not known."""
        return max(0.0, sum(self.settling) - len(self.settling) * self.step_s) if self.step_s else 0.0


class Account:
    """Steps and costs so far. Its methods must be called in the order of time."""

    def __init__(self) -> None:
        self._waits: dict[str, float] = dict.fromkeys(COSTS, 0.0)  # of events
        self.updates = 0
        """Updates that were submitted."""
        self._all: list[Stretch] = []
        self._now: Stretch | None = None
        self._bf16: deque[float] = deque(maxlen=WINDOW)
        self._mapped: deque[float] = deque(maxlen=LATEST)  # under the map in force
        self._settling, self._changed = SETTLING, False

    def _open(self, stretch: Stretch) -> Stretch:
        self._now = stretch
        self._all.append(stretch)
        return stretch

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        """Take an event of the run directory, with its fields. Where a map is adopted, a stretch begins."""
        wait = fields.get("wait_s")
        if kind in COSTS and is_finite(wait):
            self._waits[kind] += wait
        self.updates += kind == "submit"
        if kind == "adopt":
            if self._now is not None:
                self._now.end = step
            if fields.get("changed") != 0:
                self._mapped.clear()
            formats = fields.get("formats")
            self._open(Stretch(step, self._bf16, version_of(fields), formats if isinstance(formats, Mapping) else {}))
        if kind in ("submit", "adopt", "dropped", "recapture", "resume"):
            self._settling, self._changed = SETTLING, kind != "resume"
        if kind == "resume" and fields.get("changed_fact") is not None:
            self._now, self._bf16 = None, deque(maxlen=WINDOW)  # another machine
            self._mapped.clear()

    def step(self, step: int, seconds: float | None) -> None:
        """Take a training step and its duration in seconds. None if the duration is not known."""
        stretch = self._now or self._open(Stretch(step, self._bf16))
        stretch.end = step + 1
        if seconds is None:
            return
        stretch.timed, stretch.timed_s = stretch.timed + 1, stretch.timed_s + seconds
        if self._settling:
            self._settling -= 1
            if self._changed:
                stretch.settling.append(seconds)
        else:
            stretch.usual.append(seconds)
            (self._mapped if stretch.quantised else self._bf16).append(seconds)

    def read(self, events: Iterable[Mapping[str, Any]], metrics: Iterable[Mapping[str, Any]]) -> None:
        """Take the events and metrics of a run directory."""
        waiting = deque(events)
        for row in metrics:
            while waiting and waiting[0]["step"] <= row["step"]:
                event = waiting.popleft()
                self.event(event["step"], event["event"], event)
            seconds = row.get("step_s")
            self.step(row["step"], float(seconds) if is_finite(seconds) and seconds > 0 else None)
        for event in waiting:
            self.event(event["step"], event["event"], event)

    # -- figures -----------------------------------------------------------------------------------------------
    @property
    def bf16_s(self) -> float | None:
        """Median seconds of a step in bf16 on the machine in use. None with too few steps."""
        return _median(self._bf16)

    @property
    def latest_bf16_s(self) -> float | None:
        """Median seconds of the :data:`LATEST` last steps in bf16. None with fewer."""
        return statistics.median(list(self._bf16)[-LATEST:]) if len(self._bf16) >= LATEST else None

    @property
    def map_s(self) -> float | None:
        """Median seconds of the :data:`LATEST` last steps under the map in force. None with fewer."""
        return statistics.median(self._mapped) if len(self._mapped) == LATEST else None

    @property
    def bf16_steps(self) -> int:
        """The number of steps of which ``bf16_s`` is the median."""
        return len(self._bf16)

    @property
    def costs(self) -> dict[str, float]:
        """Seconds by kind of cost: of an event, or ``settled``."""
        return self._waits | {"settled": sum(stretch.settled_s for stretch in self._all)}

    @property
    def cost_s(self) -> float:
        return sum(self.costs.values())

    def stretches(self) -> list[Stretch]:
        """Return all stretches with at least one step, in the order of time."""
        return [stretch for stretch in self._all if stretch.steps]

    def saved_s(self) -> float | None:
        """Return the seconds saved so far, minus costs. None before any could be measured."""
        savings = [s.saved_s for s in self.stretches() if s.quantised and s.saved_s is not None]
        return sum(savings) - self.cost_s if savings else None

    def figures(self, *, judged: bool) -> dict[str, float] | None:
        """Return ``step_s``, and if speeds are ``judged`` and known also ``speedup`` and ``saved_h``.

        None if the time of a step is not known.
        """
        stretch = self._now
        if stretch is None or stretch.step_s is None:
            return None
        figures = {"step_s": stretch.step_s}
        saved = self.saved_s()
        if judged and stretch.speedup is not None and saved is not None:
            figures |= {"speedup": stretch.speedup, "saved_h": saved / 3600.0}
        return figures

    def line(self, *, unjudged: str | None) -> str | None:
        """Return the line that a run prints beside the host's own. None before the first step.

        ``unjudged`` is the reason why speeds mean nothing, such as ``emulated``. None if there is none.
        """
        stretch = self._now
        if stretch is None:
            return None
        shares = f", {share_text(stretch.formats)}" if stretch.formats else ""
        parts = [f"map {stretch.version}{shares}" if stretch.quantised else "bf16"]
        if stretch.step_s is None:
            return f"snip: {parts[0]} | measuring steps"
        ratio = "? x" if stretch.speedup is None else f"{stretch.speedup:.2f} x"
        comparison = f", {unjudged or f'{ratio} bf16'}" if stretch.quantised else ""
        parts.append(f"{duration(stretch.step_s)} a step{comparison}")
        saved = None if unjudged else self.saved_s()
        if saved is not None:
            parts.append(f"{'saved' if saved >= 0 else 'lost'} {duration(abs(saved))}, updates included")
        return f"snip: {' | '.join(parts)}"


def _median(seconds: Sequence[float] | deque[float]) -> float | None:
    return statistics.median(seconds) if len(seconds) >= STEPS else None


def share_text(formats: Mapping[str, float]) -> str:
    """Return shares of formats as ``75% fp4, 25% fp8``. Shares below half a percent are left out."""
    return ", ".join(f"{share:.0%} {name}" for name, share in formats.items() if share >= 0.005)


def duration(seconds: float) -> str:
    """Return a time with its unit: ``12.3 ms``, ``4.0 s``, ``2.5 min`` or ``3.41 h``."""
    size = abs(seconds)
    if size < 1.0:
        return f"{1e3 * seconds:.1f} ms"
    if size < 120.0:
        return f"{seconds:.1f} s"
    return f"{seconds / 60.0:.1f} min" if size < 7200.0 else f"{seconds / 3600.0:.2f} h"
