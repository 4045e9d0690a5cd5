"""Readers of a run directory, and its content joined for reports.

They accept a run that is still being written, or that crashed during a write: any field may be missing.
"""

import functools
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snip_megatron.precision import PrecisionMap, strict_json
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError, located
from snip_megatron.precision.phases import PrecisionPlan
from snip_megatron.precision.strict_json import is_finite

RUN_SCHEMA = "snip.run/1"
SCORES_SCHEMA = "snip.scores/1"
CONFIG, EVENTS, METRICS, REPORT = "config.json", "events.jsonl", "metrics.jsonl", "report.html"
TIMINGS = "timings.json"
"""The table of times of the run's own GEMMs, where its budget weighs them."""
STEP_FILES = {"stats": ".npz", "problems": ".json", "maps": ".json", "plans": ".json", "scores": ".json"}
"""Folders of the run directory, and the suffix of the step files in each."""
MAX_SCORES = 100
"""Number of updates whose scores are read, the latest ones. In a large model those of one fill 280 KB."""
_STEP_NAME = re.compile(r"step_(0|[1-9][0-9]{0,17})\Z")


def step_of(path: Path, suffix: str) -> int | None:
    """Return N for a file named ``step_<N><suffix>``, or None for any other name."""
    match = _STEP_NAME.match(path.name.removesuffix(suffix)) if path.name.endswith(suffix) else None
    return int(match[1]) if match else None


def step_path(run: Path, folder: str, step: int) -> Path:
    """Return the path of a step file; ``folder`` is a key of STEP_FILES."""
    return run / folder / f"step_{int(step)}{STEP_FILES[folder]}"


def step_files(run: Path, folder: str, extra: str = "") -> dict[int, Path]:
    """Return the step files of a folder by step, ascending. A missing folder has none.

    ``folder`` is a key of STEP_FILES, and ``extra`` a further suffix: ``.1`` is that of files that a resumed run has
    set aside. Raises SnipError if the folder cannot be read.
    """
    try:
        files = list((run / folder).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise SnipError(f"{run / folder}: cannot be read ({error})") from None
    by_step = {step: file for file in files if (step := step_of(file, STEP_FILES[folder] + extra)) is not None}
    return dict(sorted(by_step.items()))


def read_lines(path: Path, *, skipped: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines. A missing file has no records. Raises SnipError if it cannot be read.

    Damaged lines are left out, and a message about them is added to ``skipped``. A last line without its end is not
    damaged: the run is writing it, or was killed at it.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SnipError(f"{path}: cannot be read: {error.strerror}") from None
    *complete, last = raw.split(b"\n")
    records = [parse_line(line) for line in complete]
    damaged = [i for i, (line, record) in enumerate(zip(complete, records, strict=True), 1) if line and record is None]
    if damaged and skipped is not None:
        lines = "one damaged line" if len(damaged) == 1 else f"{len(damaged)} damaged lines"
        skipped.append(f"{path}: {lines}, the first is line {damaged[0]}")
    return [record for record in (*records, parse_line(last)) if record is not None]


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line, or None if the line is torn or has no integer ``step``."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # the latter: nested too deeply
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int else None


def read_config(run: Path | str) -> dict[str, Any]:
    """Return ``config.json``, an object with ``config`` and ``facts``. Raises SnipError if it is missing or broken."""
    path = Path(run) / CONFIG
    try:
        body = _object(path.read_text(encoding="utf-8"), str(path), RUN_SCHEMA, "config")
    except (FileNotFoundError, NotADirectoryError):
        raise SnipError(f"{run}: not a run directory ({CONFIG} is missing); give the directory of --snip-dir") from None
    except (OSError, ValueError) as error:
        raise SnipError(f"{path}: cannot be read ({error})") from None
    return body if isinstance(body.get("facts"), dict) else body | {"facts": {}}


def blame_command(facts: Mapping[str, Any], iteration: int, map_file: Path | None) -> str:
    """Return the command that finds out what is to blame for an iteration of a run, under the map of a file."""
    command = facts.get("command") or "<the job's command> --load <its checkpoints>"
    return f"{command}{'' if map_file is None else f' --snip-map {map_file}'} --snip-blame {iteration}"


def read_events(run: Path | str, *, skipped: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the events in the order in which they were written. See :func:`read_lines`."""
    records = read_lines(Path(run) / EVENTS, skipped=skipped)
    return [record for record in records if isinstance(record.get("event"), str)]


def read_metrics(run: Path | str, *, skipped: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the metrics, one record a step, ascending. Of a step that was recorded twice, the last record is used.

    See :func:`read_lines`.
    """
    by_step = {record["step"]: record for record in read_lines(Path(run) / METRICS, skipped=skipped)}
    return [by_step[step] for step in sorted(by_step)]


def read_maps(run: Path | str, *, skipped: list[str] | None = None) -> dict[int, PrecisionMap]:
    """Return the maps by the step of their file, ascending.

    The message of a broken file is added to ``skipped``. Without this list it is raised as a SnipError.
    """
    return _parsed(Path(run), "maps", PrecisionMap.from_json, skipped)


def read_plans(run: Path | str, *, skipped: list[str] | None = None) -> dict[int, PrecisionPlan]:
    """Return the plans by the step before which they were adopted, ascending. See :func:`read_maps`."""
    return _parsed(Path(run), "plans", PrecisionPlan.from_json, skipped)


def read_scores(run: Path | str, *, skipped: list[str] | None = None) -> dict[int, dict[str, Any]]:
    """Return the latest :data:`MAX_SCORES` scores files by step, ascending. See :func:`read_maps`."""
    parse = functools.partial(_object, schema=SCORES_SCHEMA, name="scores")
    return _parsed(Path(run), "scores", parse, skipped, MAX_SCORES)


@functools.cache  # the model, the warm-up and rank 0 need the same maps, and each file is read over the network
def replayed_maps(run: str) -> Mapping[int, PrecisionMap]:
    """Return step → map of every adoption that a run directory recorded, which ``--snip-replay`` repeats.

    Raises SnipError if no adoption is recorded, or a map is missing or broken.
    """
    steps = [int(event["step"]) for event in read_events(run) if event["event"] == "adopt"]
    if not steps:
        raise SnipError(
            f"--snip-replay {run}: no adopted map is recorded there; give the directory of a run under SNIP"
        )
    maps = read_maps(run)
    if missing := [step for step in steps if step not in maps]:
        path = step_path(Path(run), "maps", missing[0])
        raise SnipError(f"--snip-replay {run}: events.jsonl adopts a map at step {missing[0]} but {path} is missing")
    return {step: maps[step] for step in steps}


def _object(text: str | bytes, where: str, schema: str, name: str) -> dict[str, Any]:
    """Parse an object of ``schema`` that holds an object ``name``. Raises SnipError."""
    with located(where):
        body = strict_json.read_object(text)
        strict_json.check_schema(body, schema)
        strict_json.mapping(body.get(name), name)
    return body


def _parsed[T](
    run: Path, folder: str, parse: Callable[..., T], skipped: list[str] | None, most: int = sys.maxsize
) -> dict[int, T]:
    parsed: dict[int, T] = {}
    for step, file in list(step_files(run, folder).items())[-most:]:
        try:
            parsed[step] = parse(strict_json.read_file(file), where=str(file))
        except SnipError as error:
            if skipped is None:
                raise
            skipped.append(str(error))
    return parsed


# -- joined for reports ----------------------------------------------------------------------------------------------
FAULT_EVENTS = (
    "guard", "sidecar_restart", "solve_failed", "dropped", "skipped", "resume", "out_of_reach", "plan_moved",
    "records_lost",
)  # fmt: skip
"""Kinds of events that report trouble. The report shows them first."""
COSTS = (
    "compile", "probe", "collect", "times", "submit", "dropped", "postpone", "kept", "guard", "rise", "adopt",
    "recapture", "blame",
)  # fmt: skip
"""Kinds of events whose ``wait_s`` a training without SNIP would not have."""
_COMMON_FIELDS = ("time", "step", "event", "step_s", "wait_s")


def number(value: Any) -> float | None:
    """Return ``value`` as a finite float, or None if it is anything else."""
    return float(value) if is_finite(value) else None


@dataclass(frozen=True)
class Adoption:
    """The adoption of a map. A figure is None if it is not known."""

    step: int  # the step before which it was
    version: int | None
    fields: Mapping[str, Any]  # of the ``adopt`` event
    precision_map: PrecisionMap | None  # None if its file is lost
    scores: Mapping[str, Any] | None  # from which the map was solved. None if they are older than MAX_SCORES updates
    status: str  # what the solver said about the map
    budget: str | None  # of time or loss, such as ``speedup=1.3``. None for an fp4 share of FLOPs
    speedup: float | None  # predicted, of the linears on the slowest stage, under a budget of time or loss
    loss: float | None  # sum of predicted losses, under such a budget
    achieved: float | None  # the fp4 share of FLOPs, in [0, 1]

    def figure(self, name: str) -> float | None:
        """Return a figure of the ``adopt`` event."""
        return number(self.fields.get(name))


@dataclass(frozen=True)
class Update:
    """One update of the map, from its probes to its adoption. A figure is None if it is not known."""

    step: int  # of the submission
    version: int | None
    probes_s: float | None
    latency_s: float | None  # seconds from the submission to the answer
    wait_s: float | None  # its cost in seconds: the sum of ``wait_s`` of its events of the kinds :data:`COSTS`
    status: str  # what the solver said, or why there was no answer
    achieved: float | None  # the fp4 share of FLOPs that the solver reached
    speedup: float | None  # as in :class:`Adoption`
    loss: float | None
    adopted_step: int | None
    changed: float | None  # number of GEMMs whose format the adoption changed
    postponed: int  # how often the adoption was postponed

    @property
    def name(self) -> str:
        """The label of the update in tables and on axes."""
        return f"v{self.version}" if self.version is not None else f"step {self.step}"


@dataclass(frozen=True)
class RunData:
    """The content of a run directory."""

    path: Path
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    adoptions: Sequence[Adoption]
    updates: Sequence[Update]
    unreadable: Sequence[str]  # a message for each broken step file, and for each file of lines with damaged ones
    plans: Mapping[int, PrecisionPlan] = field(default_factory=dict)  # by the step before which they came into force

    @property
    def budget(self) -> Budget | None:
        """The budget of the run. None if its configuration has none that can be read."""
        try:
            return Budget.parse(self.config.get("budget"), "budget")
        except SnipError:
            return None

    @property
    def bound(self) -> float | None:
        """The bound of a budget ``loss=``, in nats. None for other budgets."""
        return self.budget.value if self.budget is not None and self.budget.kind == "loss" else None

    @property
    def maps(self) -> list[Adoption]:
        """The adoptions, without those of a plan's phases that keep the map."""
        versions = [None, *(adoption.version for adoption in self.adoptions)]
        return [
            adoption
            for before, adoption in zip(versions, self.adoptions, strict=False)
            if adoption.fields.get("changed") != 0 or adoption.version != before
        ]

    @property
    def faults(self) -> list[Mapping[str, Any]]:
        """The events that report trouble, in the order in which they were written."""
        return [event for event in self.events if event["event"] in FAULT_EVENTS]

    @property
    def lost(self) -> dict[str, int]:
        """Number of records that were never written, by kind: a file of lines or a folder of step files."""
        lost: Counter[str] = Counter()
        for event in self.events:
            kinds = event.get("kinds") if event["event"] == "records_lost" else None
            if isinstance(kinds, Mapping):
                lost.update({kind: number for kind, number in kinds.items() if type(number) is int})
        return dict(lost)

    def validations(self) -> dict[str, dict[int, float]]:
        """Return formats of the validation (``map`` or ``bf16``) → step → loss.

        Validation sets after the first have the keys ``map, <set>`` and ``bf16, <set>``.
        """
        losses: dict[str, dict[int, float]] = {}
        events = [event for event in self.events if event["event"] == "validation"]
        for event in events:
            loss = number(event.get("loss"))
            if loss is not None:
                key = str(event.get("formats") or "map")
                if event.get("set") != events[0].get("set"):
                    key += f", {event.get('set')}"
                losses.setdefault(key, {}).setdefault(event["step"], loss)
        return losses

    def series(self, name: str) -> tuple[list[int], list[float | None]]:
        """Return the steps that recorded a metric, and its values. A value that is not finite is None."""
        rows = [row for row in self.metrics if name in row]
        return [row["step"] for row in rows], [number(row[name]) for row in rows]


def load_run(path: Path | str) -> RunData:
    """Read a run directory. Broken step files and damaged lines are listed in ``unreadable``.

    Raises SnipError if ``path`` is not a run directory.
    """
    path, unreadable = Path(path), list[str]()
    body, events = read_config(path), read_events(path, skipped=unreadable)
    maps = read_maps(path, skipped=unreadable)
    scores = {version_of(each): each["scores"] for each in read_scores(path, skipped=unreadable).values()}
    return RunData(
        path=path,
        config=body["config"],
        facts=body["facts"],
        metrics=read_metrics(path, skipped=unreadable),
        events=events,
        adoptions=[_adoption(event, maps, scores) for event in events if event["event"] == "adopt"],
        updates=_updates(events),
        plans=read_plans(path, skipped=unreadable),
        unreadable=unreadable,
    )


def fields_of(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the event's fields without those that all events have."""
    return {name: value for name, value in event.items() if name not in _COMMON_FIELDS}


def version_of(event: Mapping[str, Any]) -> int | None:
    """Return the version of the map or plan that an event is about. None if it names none."""
    version = event.get("version")
    return version if type(version) is int else None


# -- joins ---------------------------------------------------------------------------------------------------------
def _adoption(
    event: Mapping[str, Any], maps: Mapping[int, PrecisionMap], scores: Mapping[int | None, Mapping[str, Any]]
) -> Adoption:
    version, budget = version_of(event), event.get("budget")
    timed = isinstance(budget, str)  # then ``achieved`` is a share of time
    return Adoption(
        step=event["step"],
        version=version,
        fields=fields_of(event),
        precision_map=_map_of(event["step"], version, maps),
        scores=None if version is None else scores.get(version),
        status=str(event.get("status") or "unknown"),
        budget=budget if timed else None,
        speedup=number(event.get("speedup")),
        loss=number(event.get("loss")),
        achieved=number(event.get("fp4_fraction" if timed else "achieved")),
    )


def _map_of(step: int, version: int | None, maps: Mapping[int, PrecisionMap]) -> PrecisionMap | None:
    """Return the map of a version. None if its file is lost.

    If several files hold it, because the guard restored it, the latest up to ``step`` is returned.
    """
    steps = [s for s, m in maps.items() if m.version == version or (version is None and s == step)]
    best = max((s for s in steps if s <= step), default=min(steps, default=None))
    return None if best is None else maps[best]


def _updates(events: Sequence[Mapping[str, Any]]) -> list[Update]:
    """Return the updates in the order of their submissions.

    Probes at the step of a submission belong to its update, and so does a second solution of the same statistics.
    """
    first: dict[int | None, int | None] = {}  # version of a second solution → that of its update
    by_update: dict[int | str, list[Mapping[str, Any]]] = {}  # keyed by version, or by step if there is none
    keys: dict[int, int | str] = {}  # step of a submission → key of its update
    pending: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    latest: int | str | None = None  # key of the update whose map is in force
    for event in events:
        step, version = event["step"], first.get(version_of(event), version_of(event))
        if event["event"] == "rejected" and type(event.get("again")) is int:
            first[event["again"]] = version
        if event["event"] in ("collect", "probe", "times", "dropped"):
            pending[step].append(event)
        elif event["event"] == "submit":
            keys[step] = f"step {step}" if version is None else version
            by_update[keys[step]] = [*pending.pop(step, []), event]
        elif version in by_update and version is not None:
            by_update[version].append(event)
            latest = version if event["event"] == "adopt" else latest
        elif event["event"] == "recapture" and latest is not None:
            by_update[latest].append(event)
    for step, probes in pending.items():  # an update that was dropped, such as one with NaN in a statistic
        by_update.setdefault(keys.get(step, f"step {step}"), []).extend(probes)
    return sorted((_update(each) for each in by_update.values()), key=lambda update: update.step)


def _update(events: Sequence[Mapping[str, Any]]) -> Update:
    last = {event["event"]: event for event in events}
    solved, submit = last.get("solved", {}), last.get("submit", {"step": events[0]["step"]})
    # Later phases of a plan are adopted too.
    adopted: Mapping[str, Any] = next((event for event in events if event["event"] == "adopt"), {})

    def total(name: str, kinds: Collection[str]) -> float | None:
        values = [value for e in events if e["event"] in kinds and (value := number(e.get(name))) is not None]
        return math.fsum(values) if values else None

    return Update(
        step=submit["step"],
        version=version_of(submit),
        probes_s=total("seconds", ("probe",)),
        latency_s=number(solved.get("latency_s")),
        wait_s=total("wait_s", COSTS),
        status=_status(events),
        achieved=number(solved.get("achieved" if solved.get("budget") is None else "fp4_share")),
        speedup=number(solved.get("speedup")),
        loss=number(solved.get("loss")),
        adopted_step=adopted.get("step"),
        changed=number(adopted.get("changed")),
        postponed=sum(event["event"] == "postpone" for event in events),
    )


def _status(events: Sequence[Mapping[str, Any]]) -> str:
    """Return what the solver said last, or why there was no answer."""
    for event in reversed(events):
        if event["event"] in ("dropped", "solve_failed"):
            return f"{event['event'].replace('solve_failed', 'failed')}: {event.get('reason', '')}"
        if event["event"] == "solved":
            return str(event.get("status", ""))
    return "" if any(event["event"] == "submit" for event in events) else "not submitted"
