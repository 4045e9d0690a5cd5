"""Training of the missing runs of several experiments in one pool. Result files are updated after every run."""

from __future__ import annotations

import datetime
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snip_megatron.evaluation import machine
from snip_megatron.evaluation.data import Data
from snip_megatron.evaluation.experiment import PHASES, Experiment
from snip_megatron.evaluation.results import Results, measure, record
from snip_megatron.evaluation.runner import Job, Outcome, Pool
from snip_megatron.evaluation.runs import Run, experiment_runs, fill, primer_arguments, training_command
from snip_megatron.evaluation.warm import WarmCheckpoint, warm_checkpoint

PROGRESS_S = 15.0


@dataclass
class Part:
    """One experiment of a comparison, with its runs, its result file and its warm checkpoint (None without one)."""

    experiment: Experiment
    data: Data
    results: Results
    runs: list[Run]
    warm: WarmCheckpoint | None


def make_part(experiment: Experiment, data: Data, results: Results, work: Path) -> Part:
    """Prepare an experiment. ``work`` is the folder for checkpoints and run directories."""
    warm = warm_checkpoint(experiment, data, work) if any(p.kind == "from_warm" for p in experiment.phases) else None
    return Part(experiment, data, results, experiment_runs(experiment, data), warm)


@dataclass
class Comparison:
    """Several experiments that are trained together. Equal runs and equal warm checkpoints are made only once.

    Args:
        parts: the experiments.
        pool: runs the training processes.
        work: the folder for checkpoints, run directories and logs.
        facts: hardware, versions and commit, which every record contains.
        failed: number of failed processes so far.
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
        """Train the missing runs.

        Returns:
            The number of runs that are still missing.

        Raises:
            SnipError: results cannot be written.
        """
        self.pool.expected |= self._seen()
        warms = self._missing_warms()
        self.pool.add([warm.job(self.work / "logs") for warm in warms])
        if any(device is not None for device in self.pool.devices):
            self.pool.add([self._primer(warm) for warm in warms])
        for part in self.parts:
            self._queue(part)
        self.pool.run(self._take, self._progress)
        return sum(self._missing(part, kind) for part in self.parts for kind in PHASES)

    # -- queue -------------------------------------------------------------------------------------------------
    def _missing_warms(self) -> list[WarmCheckpoint]:
        """Return the warm checkpoints that do not exist and that missing runs need."""
        missing = {}
        for part in self.parts:
            if part.warm is not None and part.warm.sha256 is None and self._missing(part, "from_warm"):
                missing[part.warm.folder.name] = part.warm
        return list(missing.values())

    def _missing(self, part: Part, kind: str) -> int:
        """Return the number of missing runs, of branches those of the warm checkpoint that has the most."""
        runs = [run for run in part.runs if run.kind == kind]
        shas = (None, *part.results.warm)
        return min(sum(not part.results.done(run.identity(part.data, sha)) for run in runs) for sha in shas)

    def _queue(self, part: Part) -> None:
        """Queue the runs of ``part`` that can start. Branches can start once the warm checkpoint exists."""
        warm = part.warm
        sha = warm.sha256 if warm is not None else None
        if warm is not None and sha is not None and sha not in part.results.warm:
            if part.results.warm:
                self._say(f"{part.experiment.name}: the warm checkpoint has other weights than before: runs start anew")
            part.results.warm[sha] = {**self.facts, "steps": warm.warm.steps, "arguments": warm.arguments}
        jobs = []
        for run in part.runs:
            if run.kind == "from_warm" and sha is None:
                continue
            identity = run.identity(part.data, sha)
            if part.results.done(identity) or self._elsewhere(part, run, identity) or identity in self._queued:
                continue
            self._queued[identity] = run
            jobs.append(self._job(part, run, identity))
        self.pool.add(jobs)

    def _seen(self) -> dict[str, float]:
        """Return the duration of the longest run of each family in the result files."""
        seen: dict[str, float] = {}
        for part in self.parts:
            for entry in part.results.runs.values():
                if entry.get("status") == "done":
                    for family in _families(part, entry["kind"], entry["steps"], entry["label"]):
                        seen[family] = max(seen.get(family, 0.0), float(entry["seconds"]))
        return seen

    def _elsewhere(self, part: Part, run: Run, identity: str) -> bool:
        """Copy the record of an equal run from another experiment of this comparison. Returns whether there is one."""
        for other in self.parts:
            if other.results.done(identity):
                part.results.runs[identity] = other.results.runs[identity] | record(run, identity)
                part.results.save()
                return True
        return False

    def _job(self, part: Part, run: Run, identity: str) -> Job:
        directory = self.work / "runs" / identity
        folders = {"data": str(part.data.folder), "run": str(directory)}
        if part.warm is not None:
            folders["warm"] = str(part.warm.folder)

        def clear() -> None:
            shutil.rmtree(directory, ignore_errors=True)

        def check() -> None:
            measure(run, directory)

        return Job(
            name=identity,
            command=training_command(fill(run.arguments, folders), run.ranks),
            log=self.work / "logs" / f"{identity}.txt",
            families=_families(part, run.kind, run.steps, run.label),
            before=clear,
            check=check,
        )

    def _primer(self, warm: WarmCheckpoint) -> Job:
        """Return the job that compiles kernels during the warm run, so that not every branch has to compile them."""
        directory = self.work / "primer" / warm.folder.name
        folders = {"data": str(warm.data.folder), "run": str(directory)}
        return Job(
            name=f"primer {warm.folder.name}",
            command=training_command(
                fill(primer_arguments(warm.experiment, warm.data), folders), warm.experiment.training.ranks
            ),
            log=self.work / "logs" / f"primer_{warm.folder.name}.txt",
            before=lambda: shutil.rmtree(directory, ignore_errors=True),
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
            self.failed += not outcome.job.name.startswith("primer")
            self._say(f"{outcome.job.name} failed: {outcome.error} (log: {outcome.job.log})")
            return
        self._say(f"{outcome.job.name}: {outcome.seconds:.0f} s")
        for part in self.parts:
            if part.warm is not None and f"warm checkpoint {part.warm.folder.name}" == outcome.job.name:
                self._queue(part)
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
            self._say(f"{run.title} failed twice: {outcome.error} (log: {outcome.job.log})")
        for part in self.parts:
            sha = part.warm.sha256 if part.warm is not None and run.kind == "from_warm" else None
            own = next((r for r in part.runs if r.identity(part.data, sha) == identity), None)
            if own is not None:
                part.results.runs[identity] = record(own, identity, warm_sha256=sha, **fields)
                part.results.save()
        shutil.rmtree(self.work / "runs" / identity / "cache", ignore_errors=True)

    # -- progress ----------------------------------------------------------------------------------------------
    def _progress(self) -> None:
        now = time.monotonic()
        if now - self._shown_at < PROGRESS_S:
            return
        self._shown_at = now
        done = f"{self._ended} of {len(self._queued)} runs ended, {self.pool.busy} at work"
        failed = f", {self.failed} failed" if self.failed else ""
        self._say(f"{done}{failed}, {now - self._started_at:.0f} s{self._left()}")

    def _left(self) -> str:
        left = len(self._queued) - self._ended
        if not left or not self.pool.expected:
            return ""
        rounds = -(-left // len(self.pool.devices))
        return f", about {rounds * max(self.pool.expected.values()):.0f} s left"

    def _say(self, text: str) -> None:
        print(f"snip compare: {text}", file=sys.stderr, flush=True)


def _families(part: Part, kind: str, steps: int, label: str) -> tuple[str, str]:
    """Return the families of a run: runs of the same policy, then all runs with as many steps."""
    common = f"{part.experiment.model} {kind} {steps}"
    return f"{common} {label}", common


def facts(gpus: list[str]) -> dict[str, Any]:
    """Return hardware, versions and commit, which every record contains."""
    return machine.describe(gpus) | {"commit": machine.commit()}
