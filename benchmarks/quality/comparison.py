"""Training of the missing runs of several experiments in one pool. Result files are updated after every run."""

import datetime
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.quality.experiment import PHASES, Experiment
from benchmarks.quality.models import Data
from benchmarks.quality.results import Results, measure, record
from benchmarks.quality.runner import Job, Outcome, Pool
from benchmarks.quality.runs import Run, experiment_runs, fill, training_command
from benchmarks.quality.warm import WarmCheckpoint, warm_checkpoint

PROGRESS_S = 15.0


@dataclass
class Part:
    """One experiment of a comparison, with its runs, its result file and its warm checkpoint (None without one)."""

    experiment: Experiment
    data: Data
    results: Results
    runs: list[Run]
    warm: WarmCheckpoint | None

    def identity(self, run: Run) -> str | None:
        """Return the identity of a run; None as long as the checkpoint that it starts from does not exist."""
        if run.kind == "from_scratch":
            return run.identity(self.data, None)
        sha = self.warm.sha256 if self.warm is not None else None
        return None if sha is None else run.identity(self.data, sha)

    def missing(self, kind: str) -> int:
        """Return the number of missing runs, of branches those of the warm checkpoint that has the most."""
        runs = [run for run in self.runs if run.kind == kind]
        shas = (None, *self.results.warm)
        return min(sum(not self.results.is_done(run.identity(self.data, sha)) for run in runs) for sha in shas)


def make_part(experiment: Experiment, data: Data, results: Results, work: Path) -> Part:
    """Prepare an experiment. ``work`` is the folder for checkpoints and run directories."""
    warm = warm_checkpoint(experiment, data, work) if any(p.kind == "from_warm" for p in experiment.phases) else None
    return Part(experiment, data, results, experiment_runs(experiment, data), warm)


@dataclass
class Comparison:
    """Several experiments that are trained together. Equal runs and equal warm checkpoints are made only once.

    ``work`` holds checkpoints, run directories and logs. Every record contains ``facts``: hardware, versions, commit.
    ``failed`` counts failed processes.
    """

    parts: Sequence[Part]
    pool: Pool
    work: Path
    facts: Mapping[str, Any]
    failed: int = 0
    _queued: dict[str, Run] = field(default_factory=dict)
    _ended: int = 0
    _started_at: float = field(default_factory=time.monotonic)
    _shown_at: float = 0.0

    def run(self) -> int:
        """Train the missing runs. Returns how many are still missing. Raises SnipError if results cannot be written."""
        warms = {
            part.warm.folder.name: part.warm
            for part in self.parts
            if part.warm is not None and part.warm.sha256 is None and part.missing("from_warm")
        }
        self.pool.add([warm.job(self.work / "logs") for warm in warms.values()])
        self._queue(self.parts)
        self.pool.run(self._take, self._progress)
        return sum(part.missing(kind) for part in self.parts for kind in PHASES)

    # -- queue -------------------------------------------------------------------------------------------------
    def _queue(self, parts: Sequence[Part]) -> None:
        """Queue the runs of ``parts`` that can start, by phase and seed: what is interrupted has whole seeds to
        compare. Branches can start once their warm checkpoint exists.
        """
        jobs = [(run, self._job(part, run, identity)) for part in parts for run, identity in self._startable(part)]
        jobs.sort(key=lambda pair: (PHASES.index(pair[0].kind), pair[0].seed))
        self.pool.add([job for _, job in jobs])

    def _startable(self, part: Part) -> Iterator[tuple[Run, str]]:
        """Yield the runs of ``part`` that are neither made nor queued, with their identities."""
        warm = part.warm
        sha = warm.sha256 if warm is not None else None
        if warm is not None and sha is not None and sha not in part.results.warm:
            if part.results.warm:
                self._say(f"{part.experiment.name}: the warm checkpoint has other weights than before: runs start anew")
            part.results.warm[sha] = {**self.facts, "steps": warm.warm.steps, "arguments": warm.arguments}
        for run in part.runs:
            identity = part.identity(run)
            if identity is None or part.results.is_done(identity) or identity in self._queued:
                continue
            equal = next((p.results.runs[identity] for p in self.parts if p.results.is_done(identity)), None)
            if equal is not None:  # another experiment has made it
                part.results.runs[identity] = equal | record(run, identity)
                part.results.save()
                continue
            self._queued[identity] = run
            yield run, identity

    def _job(self, part: Part, run: Run, identity: str) -> Job:
        directory = self.work / "runs" / identity
        folders = {"data": str(part.data.folder), "run": str(directory)}
        if part.warm is not None:
            folders["warm"] = str(part.warm.folder)
        return Job(
            name=identity,
            command=training_command(fill(run.arguments, folders), run.ranks),
            log=self.work / "logs" / f"{identity}.txt",
            before=lambda: shutil.rmtree(directory, ignore_errors=True),
            check=lambda: measure(run, directory),
        )

    # -- outcomes ----------------------------------------------------------------------------------------------
    def _take(self, outcome: Outcome) -> None:
        if outcome.job.name in self._queued:
            self._take_run(outcome, self._queued[outcome.job.name])
        else:
            self._take_warm(outcome)
        self._shown_at = 0.0

    def _take_warm(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self.failed += 1
            self._say(f"{outcome.job.name} failed: {outcome.error} (log: {outcome.job.log})")
            return
        self._say(f"{outcome.job.name}: {outcome.seconds:.0f} s")
        waiting = [p for p in self.parts if p.warm and f"warm checkpoint {p.warm.folder.name}" == outcome.job.name]
        self._queue(waiting)
        for part in waiting:
            part.results.save()

    def _take_run(self, outcome: Outcome, run: Run) -> None:
        identity = outcome.job.name
        self._ended += 1
        fields: dict[str, Any] = {"status": "done" if outcome.error is None else "failed"}
        fields |= {"seconds": round(outcome.seconds, 1), "side_by_side": len(self.pool.devices), **self.facts}
        fields["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        if outcome.error is None:
            fields |= measure(run, self.work / "runs" / identity)
        else:
            self.failed += 1
            fields["error"] = outcome.error
            self._say(f"{run.title} failed: {outcome.error} (log: {outcome.job.log})")
        for part in self.parts:
            same = next((r for r in part.runs if part.identity(r) == identity), None)
            if same is not None:
                sha = part.warm.sha256 if part.warm is not None and run.kind == "from_warm" else None
                part.results.runs[identity] = record(same, identity, warm_sha256=sha, **fields)
                part.results.save()
        shutil.rmtree(self.work / "runs" / identity / "cache", ignore_errors=True)

    # -- progress ----------------------------------------------------------------------------------------------
    def _progress(self) -> None:
        clock = time.monotonic()
        if clock - self._shown_at < PROGRESS_S:
            return
        self._shown_at = clock
        remaining = len(self._queued) - self._ended
        failed = f", {self.failed} failed" if self.failed else ""
        spent = clock - self._started_at
        ahead = f", about {spent / self._ended * remaining:.0f} s left" if self._ended else ""
        self._say(
            f"{self._ended} of {len(self._queued)} runs ended, {self.pool.busy} at work{failed}, {spent:.0f} s{ahead}"
        )

    def _say(self, text: str) -> None:
        print(f"compare: {text}", file=sys.stderr, flush=True)
