"""What the report shows, joined from the files of a run directory. Every field may be missing: runs crash, too."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snip_megatron.precision import PrecisionMap
from snip_megatron.reporting.readers import read_config, read_events, read_maps, read_metrics, read_scores

FAULT_EVENTS = ("guard", "sidecar_restart", "solve_failed", "dropped", "skipped", "postpone", "slower", "resume")
"""Events that a reader of the report should see first; any other unknown kind is shown with the rest."""
_OWN_FIELDS = ("time", "step", "event", "step_s", "wait_s")


def number(value: Any) -> float | None:
    """``value`` as a finite float, else None; files may hold anything."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def shares(value: Any) -> dict[str, float]:
    """``achieved_per_stage``: stage -> share, in the order of the stages."""
    if not isinstance(value, Mapping):
        return {}
    found = {str(stage): share for stage, raw in value.items() if (share := number(raw)) is not None}
    return dict(sorted(found.items(), key=lambda item: (not item[0].isdecimal(), len(item[0]), item[0])))


@dataclass(frozen=True)
class Adoption:
    """A map that came into force before training step ``step``; ``scores`` are those it was solved from, if known."""

    step: int
    version: int | None
    fields: Mapping[str, Any]
    precision_map: PrecisionMap | None
    scores: Mapping[str, Any] | None

    @property
    def status(self) -> str:
        """The solver's word for the map."""
        known = self.precision_map.status if self.precision_map else "unknown"
        return str(self.fields.get("status", known))

    @property
    def asked(self) -> str | None:
        """The budget (``speedup=1.3``) where it is not a share of FLOPs in fp4."""
        known = self.precision_map.prediction().get("budget") if self.precision_map else None
        asked = self.fields.get("budget", known)
        return asked if isinstance(asked, str) else None

    @property
    def speedup(self) -> float | None:
        """Predicted, of the decoder's linears on the slowest stage; None under a share of FLOPs."""
        return number(self.fields.get("speedup", self.precision_map.speedup if self.precision_map else None))

    @property
    def loss(self) -> float | None:
        """Predicted Σ loss; None under a share of FLOPs."""
        return number(self.fields.get("loss", self.precision_map.loss if self.precision_map else None))

    @property
    def achieved(self) -> float | None:
        """fp4 share of the map, in [0, 1]."""
        if self.asked is not None:  # its own ``achieved`` is of time
            return number(self.fields.get("fp4_fraction", self.precision_map.fp4_share if self.precision_map else None))
        known = self.precision_map.achieved if self.precision_map else None
        return number(self.fields.get("achieved", known))

    @property
    def achieved_per_stage(self) -> dict[str, float]:
        """fp4 share by pipeline stage; empty where it is not known."""
        if self.asked is not None:
            return {}
        known = self.precision_map.achieved_per_stage if self.precision_map else {}
        return shares(self.fields.get("achieved_per_stage", known))


@dataclass
class Update:
    """One round of collect, probe, submit, solve: its times in seconds. ``step`` is that of the submission."""

    step: int
    version: int | None = None
    collect_s: float | None = None
    probes_s: dict[str, float] = field(default_factory=dict)
    solve_s: float | None = None
    latency_s: float | None = None
    wait_s: float | None = None
    status: str = ""
    objective: float | None = None
    bound: float | None = None
    achieved: float | None = None
    speedup: float | None = None
    loss: float | None = None
    adopted_step: int | None = None
    changed: int | None = None
    lag_s: float | None = None
    postponed: int = 0
    submitted_at: float | None = None

    @property
    def name(self) -> str:
        """How tables and axes call it."""
        return f"v{self.version}" if self.version is not None else f"step {self.step}"


@dataclass(frozen=True)
class RunData:
    """A whole run, ready to be drawn."""

    path: Path
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    adoptions: Sequence[Adoption]
    updates: Sequence[Update]
    unreadable: Sequence[str]

    @property
    def faults(self) -> list[Mapping[str, Any]]:
        """Events that tell of trouble, in the order written."""
        return [event for event in self.events if event["event"] in FAULT_EVENTS]

    def series(self, name: str) -> tuple[list[int], list[float | None]]:
        """Steps and values of a metric over the steps that recorded it; None where it was not finite."""
        rows = [row for row in self.metrics if name in row]
        return [row["step"] for row in rows], [number(row[name]) for row in rows]


def load_run(path: Path | str) -> RunData:
    """Read a run directory. Raises SnipError if it is none; broken step files are listed in ``unreadable``."""
    path = Path(path)
    body = read_config(path)
    unreadable: list[str] = []
    events = read_events(path)
    maps = read_maps(path, skipped=unreadable)
    scores = read_scores(path, skipped=unreadable)
    return RunData(
        path=path,
        config=body["config"],
        facts=body["facts"],
        metrics=read_metrics(path),
        events=events,
        adoptions=_adoptions(events, maps, scores),
        updates=_updates(events),
        unreadable=unreadable,
    )


def fields_of(event: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that belong to the kind of event, without those that every event has."""
    return {name: value for name, value in event.items() if name not in _OWN_FIELDS}


# -- joins ---------------------------------------------------------------------------------------------------------
def _version(event: Mapping[str, Any]) -> int | None:
    version = event.get("version")
    return version if type(version) is int else None


def _adoptions(
    events: Sequence[Mapping[str, Any]], maps: Mapping[int, PrecisionMap], scores: Mapping[int, Mapping[str, Any]]
) -> list[Adoption]:
    """Adopted maps in order; without a single adopt event (events lost) every map file counts as adopted."""
    adopted = [event for event in events if event["event"] == "adopt"]
    if not adopted:
        adopted = [{"step": step, "version": precision_map.version} for step, precision_map in maps.items()]
    submitted = {_version(event): event["step"] for event in events if event["event"] == "submit"}
    found = []
    for event in adopted:
        step, version = event["step"], _version(event)
        precision_map = _map_of(step, version, maps)
        found.append(
            Adoption(step, version, fields_of(event), precision_map, _scores_of(step, version, submitted, scores))
        )
    return found


def _map_of(step: int, version: int | None, maps: Mapping[int, PrecisionMap]) -> PrecisionMap | None:
    """The map of this version, the file nearest before ``step`` if several have it (a guard went back to it)."""
    candidates = [s for s, m in maps.items() if m.version == version or (version is None and s == step)]
    if not candidates:
        return None
    return maps[max(candidates, key=lambda s: (s <= step, s if s <= step else -s))]


def _scores_of(
    step: int,
    version: int | None,
    submitted: Mapping[int | None, int],
    scores: Mapping[int, Mapping[str, Any]],
) -> Mapping[str, Any] | None:
    by_version = [body for body in scores.values() if version is not None and body.get("version") == version]
    if by_version:
        body: Mapping[str, Any] | None = by_version[-1]
    elif version in submitted:
        body = scores.get(submitted[version])
    else:
        earlier = [s for s, unnamed in scores.items() if s <= step and unnamed.get("version") is None]
        body = scores[max(earlier)] if earlier else None
    return body["scores"] if body else None


def _updates(events: Sequence[Mapping[str, Any]]) -> list[Update]:
    """Updates in order of submission. What ran before a submission at its step belongs to it."""
    found: dict[int | str, Update] = {}
    pending: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        kind, step, version = event["event"], event["step"], _version(event)
        if kind in ("collect", "probe", "dropped"):
            pending[step].append(event)
        elif kind == "submit":
            update = Update(step, version, submitted_at=number(event.get("time")))
            found[f"step {step}" if version is None else version] = update
            for earlier in [*pending.pop(step, []), event]:
                _add_times(update, earlier)
        elif version is not None and (update_ := found.get(version)) is not None:
            _add_times(update_, event)
            _add_outcome(update_, event)
    for step, lone in pending.items():
        same_step = [update for update in found.values() if update.step == step]
        if not same_step:  # dropped before it was submitted (a NaN in a statistic)
            same_step = [found.setdefault(f"step {step}", Update(step, status="not submitted"))]
        for event in lone:
            _add_times(same_step[-1], event)
    return sorted(found.values(), key=lambda update: update.step)


def _add_times(update: Update, event: Mapping[str, Any]) -> None:
    if event["event"] == "dropped":
        update.status = f"dropped: {event.get('reason', '')}"
    seconds, wait = number(event.get("seconds")), number(event.get("wait_s"))
    if wait is not None:
        update.wait_s = (update.wait_s or 0.0) + wait
    if seconds is not None and event["event"] == "collect":
        update.collect_s = (update.collect_s or 0.0) + seconds
    if seconds is not None and event["event"] == "probe":
        kind = str(event.get("kind", "probe"))
        update.probes_s[kind] = update.probes_s.get(kind, 0.0) + seconds


def _add_outcome(update: Update, event: Mapping[str, Any]) -> None:
    kind = event["event"]
    if kind == "solved":
        update.solve_s, update.latency_s = number(event.get("solve_seconds")), number(event.get("latency_s"))
        update.objective, update.bound = number(event.get("objective")), number(event.get("bound"))
        share = event.get("fp4_share") if "budget" in event else event.get("achieved")
        update.achieved, update.status = number(share), str(event.get("status", ""))
        update.speedup, update.loss = number(event.get("speedup")), number(event.get("loss"))
    elif kind == "postpone":
        update.postponed += 1
    elif kind == "solve_failed":
        update.status = f"failed: {event.get('reason', '')}"
    elif kind == "adopt" and update.adopted_step is None:
        changed, at = number(event.get("changed")), number(event.get("time"))
        update.adopted_step = event["step"]
        update.changed = None if changed is None else int(changed)
        if at is not None and update.submitted_at is not None:
            update.lag_s = max(0.0, at - update.submitted_at)
