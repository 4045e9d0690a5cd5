"""The content of a run directory, joined for reports. Any field may be missing, because a run may have crashed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snip_megatron.errors import is_finite
from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.phases import PrecisionPlan
from snip_megatron.records.readers import read_config, read_events, read_maps, read_metrics, read_plans, read_scores

FAULT_EVENTS = (
    "guard", "sidecar_restart", "solve_failed", "dropped", "skipped", "postpone", "slower", "resume",
    "out_of_reach", "plan_moved",
)  # fmt: skip
"""Kinds of events that report trouble. The report shows them first."""
MAX_SCORES = 100
"""Number of updates whose scores are read, the latest ones. In a large model those of one fill 280 KB."""
_OWN_FIELDS = ("time", "step", "event", "step_s", "wait_s")


def number(value: Any) -> float | None:
    """Return ``value`` as a finite float, or None if it is anything else."""
    return float(value) if is_finite(value) else None


def shares(value: Any) -> dict[str, float]:
    """Return the field ``achieved_per_stage`` as stage → share, in the order of the stages."""
    if not isinstance(value, Mapping):
        return {}
    found = {str(stage): share for stage, raw in value.items() if (share := number(raw)) is not None}
    return dict(sorted(found.items(), key=lambda item: (not item[0].isdecimal(), len(item[0]), item[0])))


@dataclass(frozen=True)
class Adoption:
    """The adoption of a map before training step ``step``.

    Attributes:
        step: the 0-based training step.
        version: the map's version; None if unknown.
        fields: the fields of the ``adopt`` event.
        precision_map: the map; None if its file is lost.
        scores: the scores from which the map was solved; None if unknown, or older than the last MAX_SCORES updates.
    """

    step: int
    version: int | None
    fields: Mapping[str, Any]
    precision_map: PrecisionMap | None
    scores: Mapping[str, Any] | None

    @property
    def status(self) -> str:
        """The solver's status of the map."""
        known = self.precision_map.status if self.precision_map else "unknown"
        return str(self.fields.get("status", known))

    @property
    def asked(self) -> str | None:
        """The budget, such as ``speedup=1.3``; None if the budget is an fp4 share of FLOPs."""
        known = self.precision_map.prediction().get("budget") if self.precision_map else None
        asked = self.fields.get("budget", known)
        return asked if isinstance(asked, str) else None

    @property
    def speedup(self) -> float | None:
        """Predicted speedup of the decoder's linears on the slowest stage; None if the budget is a share of FLOPs."""
        return number(self.fields.get("speedup", self.precision_map.speedup if self.precision_map else None))

    @property
    def loss(self) -> float | None:
        """Predicted sum of losses; None if the budget is a share of FLOPs."""
        return number(self.fields.get("loss", self.precision_map.loss if self.precision_map else None))

    @property
    def achieved(self) -> float | None:
        """The map's fp4 share of FLOPs, in [0, 1]."""
        if self.asked is not None:  # the map's own ``achieved`` is a share of time
            return number(self.fields.get("fp4_fraction", self.precision_map.fp4_share if self.precision_map else None))
        known = self.precision_map.achieved if self.precision_map else None
        return number(self.fields.get("achieved", known))

    @property
    def achieved_per_stage(self) -> dict[str, float]:
        """The fp4 share of FLOPs by pipeline stage; empty if unknown."""
        if self.asked is not None:
            return {}
        known = self.precision_map.achieved_per_stage if self.precision_map else {}
        return shares(self.fields.get("achieved_per_stage", known))


@dataclass
class Update:
    """One update of the map (collect, probe, submit, solve, adopt), with times in seconds.

    ``step`` is the step of the submission. ``changed`` counts the GEMMs whose format the adopted map changed.
    """

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
        """The label of the update in tables and on axes."""
        return f"v{self.version}" if self.version is not None else f"step {self.step}"


@dataclass(frozen=True)
class RunData:
    """The content of a run directory.

    ``unreadable`` holds one message for each broken step file, ``plans`` the plans of a run with phases by the step
    before which they came into force.
    """

    path: Path
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    adoptions: Sequence[Adoption]
    updates: Sequence[Update]
    unreadable: Sequence[str]
    plans: Mapping[int, PrecisionPlan] = field(default_factory=dict)

    @property
    def faults(self) -> list[Mapping[str, Any]]:
        """The events that report trouble, in the order in which they were written."""
        return [event for event in self.events if event["event"] in FAULT_EVENTS]

    def validations(self) -> dict[str, dict[int, float]]:
        """Return formats of the validation, ``map`` or ``bf16`` → step → loss.

        After the last step Megatron validates and then tests. Only the first loss of a step is that of the validation.
        """
        found: dict[str, dict[int, float]] = {}
        for event in self.events:
            loss = number(event.get("loss"))
            if event["event"] == "validation" and loss is not None:
                found.setdefault(str(event.get("formats") or "map"), {}).setdefault(event["step"], loss)
        return found

    def series(self, name: str) -> tuple[list[int], list[float | None]]:
        """Return the steps that recorded a metric, and its values. A value that is not finite is None."""
        rows = [row for row in self.metrics if name in row]
        return [row["step"] for row in rows], [number(row[name]) for row in rows]


def load_run(path: Path | str) -> RunData:
    """Read a run directory. Broken step files are listed in ``unreadable``.

    Raises:
        SnipError: ``path`` is not a run directory.
    """
    path = Path(path)
    body = read_config(path)
    unreadable: list[str] = []
    events = read_events(path)
    maps = read_maps(path, skipped=unreadable)
    scores = read_scores(path, skipped=unreadable, last=MAX_SCORES)
    plans = read_plans(path, skipped=unreadable)
    return RunData(
        path=path,
        config=body["config"],
        facts=body["facts"],
        metrics=read_metrics(path),
        events=events,
        adoptions=_adoptions(events, maps, scores),
        updates=_updates(events),
        unreadable=unreadable,
        plans=plans,
    )


def fields_of(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the event's own fields, without those that all events have."""
    return {name: value for name, value in event.items() if name not in _OWN_FIELDS}


# -- joins ---------------------------------------------------------------------------------------------------------
def _version(event: Mapping[str, Any]) -> int | None:
    version = event.get("version")
    return version if type(version) is int else None


def _adoptions(
    events: Sequence[Mapping[str, Any]], maps: Mapping[int, PrecisionMap], scores: Mapping[int, Mapping[str, Any]]
) -> list[Adoption]:
    """Return the adoptions in order. If there is no ``adopt`` event at all, every map file counts as adopted."""
    adopted = [event for event in events if event["event"] == "adopt"]
    if not adopted:
        adopted = [{"step": step, "version": precision_map.version} for step, precision_map in maps.items()]
    submitted = {_version(event): event["step"] for event in events if event["event"] == "submit"}
    return [
        Adoption(
            step := event["step"],
            version := _version(event),
            fields_of(event),
            _map_of(step, version, maps),
            _scores_of(step, version, submitted, scores),
        )
        for event in adopted
    ]


def _map_of(step: int, version: int | None, maps: Mapping[int, PrecisionMap]) -> PrecisionMap | None:
    """Return the map of this version: if several files hold it (the guard restored it), the latest up to ``step``."""
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
    """Return the scores of this version, else those of its update's step, else the latest ones without a version."""
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
    """Return the updates in order of submission. Probes at the step of a submission belong to that update."""
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
        if not same_step:  # the update was dropped before submission (a NaN in a statistic)
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
