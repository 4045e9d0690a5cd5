"""A training that goes through cases of the table of faults, and its judge.

It is started again on its checkpoint where a fault ends it. It is judged by its own replay, which is undisturbed and
has the same schedule of maps: losses, gradient norms and maps of all steps must be equal to the bit. A fault that ends
the job must do so in one line, with all records before it.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch import error_lines, run_ranks, tiny_llama_args

from faults.table import FATAL, MOMENTS, Case, ends_process
from snip_megatron.runtime.run_data import read_events, read_metrics

Layout = tuple[int, str]
"""Ranks, and Megatron's arguments."""
Curve = dict[tuple[int, int], list[str | None]]
"""Step and rank → loss (of the last pipeline stage), gradient norm and map, to the bit."""
TRAINER = "faults.trainer"
NOT_REACHED = "its moment did not come"
_GRACE_S = 3.0  # for the other ranks after one has ended
_LIMIT_S = 900.0  # of a training
_STOP_S = 20.0  # after the time of a training, to leave by itself


class LostError(AssertionError):
    """A fault cost the training something."""


@dataclass
class Job:
    """A training under one layout that goes through cases, in a folder.

    Attributes:
        warm: What runs ranks.
        delay: Seconds of a delay and of a stalled disk.
        torchrun: Whether torchrun starts the ranks, and restarts them.
        first, interval, lag: Of updates. Checkpoints have the same interval.
        due: The step from which on each case is taken, at an update. By default an update takes a case.
        steps: Steps of the training. By default an undisturbed update follows the last case.
        extra: Further arguments.
        sample_every: Steps between two samples of what a process holds. 0 for none.
        shares: Seconds after which the training, and its replay, leave at their next step. What both have trained is
            compared. By default both train to the end.
        outcomes: What came of each case: of its update, or how the job ended.
        lost: Why a case cost the training something.
        compared: Steps that the replay has trained too, with equal losses unless a case is lost.
    """

    warm: Any
    folder: Path
    layout: Layout
    cases: Sequence[Case]
    delay: float
    torchrun: bool = False
    first: int = 2
    interval: int = 4
    lag: int = 2
    due: Sequence[int] = ()
    steps: int = 0
    extra: Sequence[str] = ()
    sample_every: int = 0
    shares: tuple[float, float] | None = None
    outcomes: dict[int, str] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    compared: int = 0
    _losses_said: bool = False

    def run(self) -> None:
        """Train to the end, as often as it takes, and judge."""
        self.folder.mkdir()
        self.steps = self.steps or self.first + (len(self.cases) + 1) * self.interval
        where = ["--snip-dir", str(self.folder / "run")]
        if any(map(ends_process, self.cases)):
            saved = str(self.folder / "checkpoints")
            where += ["--save", saved, "--load", saved, "--save-interval", str(self.interval)]
        curve: Curve = {}
        for start in range(2 * len(self.cases) + 2):
            before = self._injected().keys()
            process = self._train(f"start{start}", self.cases, *where)
            part = curve_of(self.folder, f"start{start}")
            curve |= part
            if process.returncode == 0 and ((self.steps - 1, 0) in part or self.shares is not None):
                break
            new = {index: line["time"] for index, line in self._injected().items() if index not in before}
            if not new:
                raise LostError(f"it ended without a fault: exit code {process.returncode}: {process.stderr[-300:]}")
            last = max(new, key=lambda index: new[index])
            self._judge_end(last, process)
            if last in self.lost and self.shares is not None:
                return
        self._judge(curve)

    def _train(self, name: str, cases: Sequence[Case], *extra: str) -> subprocess.CompletedProcess[str]:
        share = None if self.shares is None else self.shares[not cases]
        due = self.due or [0] * len(cases)
        plan = {
            "cases": [[*case, step] for case, step in zip(cases, due, strict=False)], "delay": self.delay,
            "first": self.first, "interval": self.interval, "sample_every": self.sample_every if cases else 0,
            "until": None if share is None else time.time() + share,
        }  # fmt: skip
        (self.folder / "plan.json").write_text(json.dumps(plan))
        world, layout = self.layout
        fixed = (
            "--num-layers 2 --exit-signal-handler --snip --snip-estimator noise --snip-wait 300"
            f" --snip-settings deadline=120 --snip-lag {self.lag} --snip-first-update {self.first}"
            f" --snip-update-interval {self.interval} {layout}"
        )
        args = tiny_llama_args(*shlex.split(fixed), *self.extra, *extra, iters=self.steps)
        env, tmp = {"FAULTS": str(self.folder), "START": name}, self.folder / name
        if self.torchrun:  # whose ranks read all of the mock data
            env["WHOLE_MOCK_DATA"] = "1"
        if self.torchrun and cases:
            process = run_ranks(world, args, module=TRAINER, env=env, tmp=tmp, restarts=len(cases), timeout=_LIMIT_S)
        else:
            limit = _LIMIT_S if share is None else share + _STOP_S
            process = self.warm.run(world, args, module=TRAINER, env=env, tmp=tmp, timeout=limit, grace=_GRACE_S)
        self._losses_said |= "records were lost" in process.stderr or "are missing" in process.stderr
        if survivors := end_processes(tmp, 10.0):
            raise LostError(f"process left behind: {survivors[0]}")
        return process

    def _injected(self) -> dict[int, dict[str, Any]]:
        return {line["index"]: line for line in lines_of(self.folder, "injected")}

    # -- the judge -------------------------------------------------------------------------------------------------
    def _judge_end(self, index: int, process: subprocess.CompletedProcess[str]) -> None:
        """Judge an end of the job: of the fault that was injected last."""
        case, lines = self.cases[index], error_lines(process)
        errors = self.folder.glob(f"start*/rank{case.rank(self.layout[0])}.err")
        latest = max(errors, key=lambda path: path.stat().st_mtime, default=None)
        traced = "Traceback" in (process.stderr if latest is None else latest.read_text())
        if process.returncode == 0:
            if case.fault == "SIGTERM" or case.moment == "end":
                self.outcomes[index] = "stopped with a checkpoint"  # else for a case that needs a start or an end
        elif case.fault == "rank killed":
            self.outcomes[index] = "killed, and started again"
        elif case.fault in FATAL and ends_process(case) and not traced and len(lines) == 1:
            self.outcomes[index] = f"ended in a line: {lines[0].split(': ', 1)[1]}"
        elif case.fault in FATAL and traced and MOMENTS[case.moment].host:
            self.outcomes[index] = "ended by Megatron's own error"
        else:  # 124: ranks hung
            self.lost[index] = f"exit code {process.returncode}, {len(lines)} lines: {process.stderr[-500:]}"

    def _judge(self, curve: Curve) -> None:
        """Compare the training with the replay of its record, bit for bit, and look for missing records."""
        run, injected = self.folder / "run", self._injected()
        self.lost |= {index: NOT_REACHED for index in range(len(self.cases)) if index not in injected | self.lost}
        steps = set(range(self.steps if self.shares is None else len(curve) // self.layout[0]))
        points = {(step, rank) for step in steps for rank in range(self.layout[0])}
        _lack("the training", {step for step, _ in points - curve.keys()})
        events, adopted = read_events(run), [event for event in read_events(run) if event["event"] == "adopt"]
        if not self._losses_said:
            _lack("metrics.jsonl", steps ^ {record["step"] for record in read_metrics(run)})
            _lack(
                "maps", {event["step"] for event in adopted if not (run / f"maps/step_{event['step']}.json").exists()}
            )
            submitted = {event["step"] for event in events if event["event"] == "submit"}
            _lack("stats", {step for step in submitted if not (run / f"stats/step_{step}.npz").exists()})
        for index, at in injected.items():
            self.outcomes.setdefault(index, self._of_update(events, at["step"]))
        if not adopted and self.shares is not None:
            return  # it ended before there was anything to replay
        process = self._train("replay", (), "--snip-dir", str(self.folder / "replayed"), "--snip-replay", str(run))
        if process.returncode:
            raise LostError(f"the replay ended with exit code {process.returncode}: {process.stderr[-300:]}")
        replayed = curve_of(self.folder, "replay")
        if self.shares is None:
            _lack("the replay", {step for step, _ in points - replayed.keys()})
        both = points & replayed.keys()
        self.compared = len(both) // self.layout[0]
        if differing := [step for step, rank in sorted(both) if replayed[step, rank] != curve[step, rank]]:
            before = {index: at["time"] for index, at in injected.items() if at["step"] <= differing[0]}
            cause = max(before, key=lambda index: before[index], default=0)
            self.lost[cause] = f"step {differing[0]} differs in the replay"

    def _of_update(self, events: Sequence[Mapping[str, Any]], step: int) -> str:
        """Return what came of the update of a case, from its step until the next one."""
        begin, outcomes = step - (step - self.first) % self.interval, list[str]()
        for event in events:
            kind = event["event"]
            if not begin <= event["step"] - (kind != "dropped") < begin + self.interval:
                continue
            if kind == "dropped":
                outcomes.append(f"dropped ({event.get('part') or event.get('reason')})")
            elif kind == "solve_failed":
                outcomes.append(f"not solved ({event['reason']})")
            elif kind in ("adopt", "kept"):
                outcomes.append({"adopt": "adopted"}.get(kind, kind))
        return ", ".join(dict.fromkeys(outcomes)) or "training went on"


def _lack(what: str, steps: set[int]) -> None:
    if steps:
        raise LostError(f"{what}: steps {sorted(steps)[:5]} are missing, unsaid")


def curve_of(folder: Path, start: str) -> Curve:
    """Return what ranks left of a start. Of a step that torchrun repeated, it is the last."""
    return {(line["step"], line["rank"]): line["values"] for line in lines_of(folder, f"trace-{start}-")}


def lines_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of ``<name><rank>.jsonl`` of all ranks, without the torn last line of a killed one."""
    lines = (line for path in sorted(folder.glob(f"{name}*.jsonl")) for line in path.read_text().splitlines())
    return [json.loads(line) for line in lines if line.endswith("}")]


def end_processes(folder: Path, grace: float) -> list[str]:
    """Kill the processes that still work in a folder after ``grace`` seconds. Returns their command lines.

    The queue server that Megatron's checkpoint writer starts by ``multiprocessing`` is not among these: a SIGKILL of
    its rank orphans it with SNIP or without.
    """
    end = time.monotonic() + grace
    while True:
        commands = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (path / "cwd").readlink() == folder:
                    commands[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        ours = [command for command in commands.values() if command and "from multiprocessing" not in command]
        if not ours or time.monotonic() > end:
            break
        time.sleep(0.1)
    for pid in commands:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return ours
