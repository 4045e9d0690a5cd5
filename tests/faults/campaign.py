"""``python -m faults.campaign --out FILE.json``: every fault of the table at every moment, under every layout.

Run it in the folder ``tests`` (or with it on PYTHONPATH). Cases that the file has are not run again. A training goes
through a dozen cases, one an update, and is started again on its checkpoint where a fault ends it. It is judged by its
own replay, which is undisturbed and has the same schedule of maps: losses, gradient norms and maps of all steps must be
equal to the bit. A fault that ends the job must do so in one line, with all records before it. The exit code is 1 if a
fault cost a training something.
"""

import argparse
import contextlib
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch import cpu_environment, error_lines, tiny_llama_args
from warm_ranks import WarmRanks

from faults.table import ENDS, MOMENTS, Case, all_cases, ends
from snip_megatron.runtime.run_data import read_events, read_metrics

Layout = tuple[int, str]
"""Ranks, and Megatron's arguments."""
LAYOUTS: dict[str, Layout] = {
    "TP2×PP2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
    "DP2×EP2": (2, "--use-distributed-optimizer --expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2"
                " --moe-ffn-hidden-size 96 --moe-token-dispatcher-type alltoall"),
    "PP2, virtual stages": (2, "--num-layers 4 --pipeline-model-parallel-size 2"
                            " --num-layers-per-virtual-pipeline-stage 1"),
}  # fmt: skip
CASES = 24  # of a training
BY_TORCHRUN = ("recording", "adoption", "checkpoint")
"""Moments at which torchrun restarts the killed rank of one layout. Elsewhere the job is started again."""
TRAINER, MARK = "faults.trainer", "FAULTS_JOB"
NOT_REACHED = "its moment did not come"
_GRACE_S = 3.0  # for the other ranks after one has ended
_LIMIT_S = 900.0  # of a training
_STOP_S = 20.0  # after the time of a training, to leave by itself


class LostError(AssertionError):
    """A fault cost the training something."""


class Job:
    """A training under one layout that goes through cases, in a folder.

    Args:
        delay: Seconds of a delay and of a stalled disk.
        torchrun: Whether torchrun starts the ranks, and restarts them.
        first, interval, lag: Of updates. Checkpoints have the same interval.
        due: The step from which on each case is taken, at an update. None stands for a case in each update.
        steps: Steps of the training. By default an undisturbed update follows the last case.
        extra: Further arguments.
        sample_every: Steps between two samples of what a process holds. 0 for none.
        shares: Seconds after which the training, and its replay, leave at their next step. What both have trained is
            compared. By default both train to the end.

    Attributes:
        outcomes: What came of each case: of its update, or how the job ended.
        lost: Why a case cost the training something.
        compared: Steps that the replay has trained too, with equal losses unless a case is lost.
    """

    def __init__(
        self,
        warm: Any,
        folder: Path,
        layout: Layout,
        cases: Sequence[Case],
        delay: float,
        *,
        torchrun: bool = False,
        first: int = 2,
        interval: int = 4,
        lag: int = 2,
        due: Sequence[int] | None = None,
        steps: int | None = None,
        extra: Sequence[str] = (),
        sample_every: int = 0,
        shares: tuple[float, float] | None = None,
    ) -> None:
        self._warm, self._folder, self._cases, self._delay, self._torchrun = warm, folder, cases, delay, torchrun
        self._first, self._interval, self._sample_every = first, interval, sample_every
        self._due, self._shares = due or [0] * len(cases), shares
        self._world, layout_arguments = layout
        self._steps = first + (len(cases) + 1) * interval if steps is None else steps
        snip = f"--snip --snip-estimator noise --snip-wait 300 --snip-settings deadline=120 --snip-lag {lag}"
        updates = f"--snip-first-update {first} --snip-update-interval {interval}"
        fixed = f"--num-layers 2 --exit-signal-handler {snip} {updates} {layout_arguments}"
        self._arguments = [*shlex.split(fixed), *extra]
        self._losses_said = self._hung = False
        self.outcomes: dict[int, str] = {}
        self.lost: dict[int, str] = {}
        self.compared = 0

    def run(self) -> None:
        """Train to the end, as often as it takes, and judge."""
        self._folder.mkdir()
        where = ["--snip-dir", str(self._folder / "run")]
        if any(map(ends, self._cases)):
            checkpoints = str(self._folder / "checkpoints")
            where += ["--save", checkpoints, "--load", checkpoints, "--save-interval", str(self._interval)]
        curve: dict[int, Any] = {}
        for start in range(2 * len(self._cases) + 2):
            known = set(self._injected())
            done = self._train(f"start{start}", self._cases, str(start), *where)
            new = {index: at for index, at in self._injected().items() if index not in known}
            steps = curve_of(self._folder, f"{start}.")
            curve |= steps
            if done.returncode == 0 and (self._steps - 1 in steps or self._shares is not None):
                break
            if not new:
                raise LostError(f"it ended without a fault: exit code {done.returncode}: {done.stderr[-300:]}")
            last = max(new, key=lambda index: new[index]["time"])
            self._judge_end(last, done)
            if last in self.lost and self._shares is not None:
                return
        self._judge(curve)

    def _train(self, name: str, cases: Sequence[Case], start: str, *extra: str) -> subprocess.CompletedProcess[str]:
        share = None if self._shares is None else self._shares[not cases]
        limit = _LIMIT_S if share is None else share + _STOP_S
        plan = {
            "cases": [[*case, step] for case, step in zip(cases, self._due, strict=False)],
            "delay": self._delay, "first": self._first, "interval": self._interval,
            "sample_every": self._sample_every if cases else 0,
            "until": None if share is None else time.time() + share,
        }  # fmt: skip
        (self._folder / "plan.json").write_text(json.dumps(plan))
        args = tiny_llama_args(*self._arguments, *extra, iters=self._steps)
        env = {"FAULTS": str(self._folder), MARK: str(self._folder), "START": start}
        tmp, began = self._folder / name, time.monotonic()
        if self._torchrun and cases:
            done = self._by_torchrun(args, env, tmp)
        else:
            run = self._warm.run
            done = run(self._world, args, module=TRAINER, env=env, tmp=tmp, timeout=limit, grace=_GRACE_S)
        self._hung = time.monotonic() - began > limit
        self._losses_said |= "records were lost" in done.stderr or "are missing" in done.stderr
        if processes := orphans(f"{MARK}={self._folder}"):
            raise LostError(f"process left behind: {processes[0]}")
        return done

    def _by_torchrun(self, args: list[str], env: dict[str, str], tmp: Path) -> subprocess.CompletedProcess[str]:
        """Run in files and not in pipes, which Megatron's server of checkpoint queues would hold open."""
        tmp.mkdir()
        # Ranks that are restarted must not find the addresses of dead ones.
        environment = os.environ | cpu_environment() | env | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        restarts = ["--standalone", f"--max-restarts={len(self._cases)}", "--monitor-interval=0.2"]
        command = [sys.executable, "-m", "torch.distributed.run", *restarts, f"--nproc-per-node={self._world}"]
        with (tmp / "out").open("w") as out, (tmp / "err").open("w") as err:
            command += ["-m", TRAINER, *args]
            code = subprocess.call(command, stdout=out, stderr=err, cwd=tmp, env=environment, timeout=_LIMIT_S)
        return subprocess.CompletedProcess(args, code, (tmp / "out").read_text(), (tmp / "err").read_text())

    def _injected(self) -> dict[int, dict[str, Any]]:
        return {line["index"]: line for line in lines_of(self._folder, "injected")}

    # -- the judge -------------------------------------------------------------------------------------------------
    def _judge_end(self, index: int, done: subprocess.CompletedProcess[str]) -> None:
        """Judge an end of the job: of the fault that was injected last."""
        case = self._cases[index]
        lines, text = error_lines(done), done.stderr
        errors = self._folder.glob(f"start*/rank{case.rank(self._world)}.err")
        own = max(errors, key=lambda path: path.stat().st_mtime, default=None)
        traced = "Traceback" in (text if own is None else own.read_text())
        if done.returncode == 0:
            if case.fault == "SIGTERM" or case.moment == "end":
                self.outcomes[index] = "stopped with a checkpoint"  # else for a case that needs a start or an end
        elif case.fault == "rank killed":
            self.outcomes[index] = "killed, and started again"
        elif done.returncode == 124 and self._hung:
            self.lost[index] = "ranks hung"
        elif case.fault in ENDS and not traced and len(lines) == 1:
            self.outcomes[index] = f"ended in a line: {lines[0].split(': ', 1)[1]}"
        elif case.fault in ENDS and traced and MOMENTS[case.moment].host:
            self.outcomes[index] = "ended by Megatron's own error"
        else:
            self.lost[index] = f"exit code {done.returncode}, {len(lines)} lines: {text[-500:]}"

    def _judge(self, curve: Mapping[int, Any]) -> None:
        """Compare the training with the replay of its record, bit for bit, and look for missing records."""
        run, injected = self._folder / "run", self._injected()
        for index in range(len(self._cases)):
            if index not in injected:
                self.lost.setdefault(index, NOT_REACHED)
        trained = set(range(self._steps if self._shares is None else len(curve)))
        if missing := trained - set(curve):
            raise LostError(f"steps missing: {sorted(missing)[:5]}")
        recorded = {record["step"] for record in read_metrics(run)}
        if recorded != trained and not self._losses_said:
            raise LostError(f"metrics.jsonl lacks steps {sorted(trained - recorded)[:5]}, unsaid")
        events = read_events(run)
        for event in events:
            file = {"submit": "stats/step_{}.npz", "adopt": "maps/step_{}.json"}.get(event["event"])
            if file is not None and not (run / file.format(event["step"])).exists() and not self._losses_said:
                raise LostError(f"{file.format(event['step'])} is missing, unsaid")
        for index, at in injected.items():
            self.outcomes.setdefault(index, self._of_update(events, at["step"]))
        if not any(event["event"] == "adopt" for event in events) and self._shares is not None:
            return  # it ended before there was anything to replay
        replayed = ("--snip-dir", str(self._folder / "replayed"), "--snip-replay", str(run))
        done = self._train("replay", (), "replay", *replayed)
        if done.returncode:
            raise LostError(f"the replay ended with exit code {done.returncode}: {done.stderr[-300:]}")
        expected = curve_of(self._folder, "replay.")
        self.compared = len(expected.keys() & trained)
        if self._shares is None and self.compared < self._steps:
            raise LostError(f"steps missing in the replay: {sorted(trained - set(expected))[:5]}")
        if differing := [step for step in sorted(expected.keys() & trained) if expected[step] != curve[step]]:
            before = [index for index, at in injected.items() if at["step"] <= differing[0]]
            cause = max(before, key=lambda index: injected[index]["time"], default=0)
            for index in before:
                if index == cause or injected[index]["time"] > injected[cause]["time"]:
                    self.lost[index] = f"step {differing[0]} differs in the replay"

    def _of_update(self, events: Sequence[Mapping[str, Any]], step: int) -> str:
        """Return what came of the update of a case, from its step until the next one."""
        told = {"dropped": "dropped ({part})", "solve_failed": "not solved ({reason})"}
        told |= {"adopt": "adopted", "kept": "kept"}
        begin = step - (step - self._first) % self._interval
        end = begin + self._interval
        found = [
            told[event["event"]].format_map(Counter() | {"part": event.get("part") or event.get("reason"), **event})
            for event in events
            if event["event"] in told and begin <= event["step"] - (event["event"] != "dropped") < end
        ]
        return ", ".join(dict.fromkeys(found)) or "training went on"

    def results(self, layout: str) -> list[dict[str, Any]]:
        """Return a line for each case."""
        lines = []
        for index, case in enumerate(self._cases):
            outcome, lost = self.outcomes.get(index), self.lost.get(index)
            lines.append(
                {"moment": case.moment, "fault": case.fault, "layout": layout, "outcome": outcome, "lost": lost}
            )
        return lines


def run_cases(
    warm: Any, folder: Path, layout: str, cases: Sequence[Case], delay: float, torchrun: bool = False
) -> list[dict[str, Any]]:
    """Run one training with the cases. Returns a line for each."""
    job = Job(warm, folder, LAYOUTS[layout], cases, delay, torchrun=torchrun)
    try:
        job.run()
    except (LostError, subprocess.TimeoutExpired) as error:
        for index in range(len(cases)):
            job.lost.setdefault(index, " ".join(str(error).split())[-600:])
    return job.results(layout)


def curve_of(folder: Path, start: str) -> dict[int, tuple[str, str, str]]:
    """Return step → (loss, gradient norm, map), to the bit. Without steps that a rank did not live to see.

    Raises LostError if ranks differ.
    """
    curve: dict[int, tuple[str, str, str]] = {}
    processes = {path.name.partition("-")[0] for path in folder.glob(f"trace{start}*.jsonl")}
    for process in sorted(processes, key=lambda name: int(name.rpartition(".")[2])):  # torchrun's restarts
        seen: dict[int, tuple[set[str | None], set[tuple[str, str]]]] = {}
        for line in lines_of(folder, f"{process}-"):
            losses, others = seen.setdefault(line["step"], ({None}, set()))
            losses.add(line["loss"])
            others.add((line["norm"], line["map"]))
        for step, (losses, others) in seen.items():
            if len(losses) > 2 or len(others) > 1:
                raise LostError(f"step {step} is not the same on all ranks")
            for loss in losses - {None}:
                curve[step] = (str(loss), *next(iter(others)))
    return curve


def lines_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of ``<name><rank>.jsonl`` of all ranks, without the torn last line of a killed one."""
    lines = []
    for path in sorted(folder.glob(f"{name}*.jsonl")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
    return lines


def orphans(mark: str) -> list[str]:
    """Return and end the processes that a training left behind, after ten seconds of grace.

    The queue server that Megatron's checkpoint writer starts by ``multiprocessing`` does not count: a SIGKILL of its
    rank orphans it with SNIP or without.
    """
    end = time.monotonic() + 10.0
    while True:
        commands = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                    commands[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        ours = [command for command in commands.values() if command and "from multiprocessing" not in command]
        if not ours or time.monotonic() > end:
            break
        time.sleep(0.1)
    for pid in commands:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return ours


def chunks(layout: str) -> list[tuple[list[Case], bool]]:
    """Split the cases of a layout into trainings. Under the last layout torchrun itself restarts some killed ranks."""
    cases, last = all_cases(), layout == list(LAYOUTS)[-1]
    killed = [Case(moment, "rank killed") for moment in BY_TORCHRUN if last]
    rest = [each for each in cases if each not in killed]
    parts = [[each for each in rest if ends(each) == kind] for kind in (False, True)]
    whole = [(part[i : i + CASES], False) for part in parts for i in range(0, len(part), CASES)]
    return [*whole, *([(killed, True)] if killed else [])]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults.campaign", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="result file, written after every training")
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=LAYOUTS, metavar="LAYOUT")
    parser.add_argument("--delay", type=float, default=30.0, help="seconds of a delay and of a stalled disk")
    parser.add_argument("--commit", help="commit for the result file")
    args = parser.parse_args()
    body = json.loads(args.out.read_text()) if args.out.exists() else {"seconds": 0, "results": []}
    results = [line for line in body["results"] if not line["lost"]]
    done = {(line["layout"], line["moment"], line["fault"]) for line in results}
    began = time.monotonic()
    with contextlib.closing(WarmRanks()) as warm:
        for layout in args.layouts:
            for chunk, torchrun in chunks(layout):
                cases = [case for case in chunk if (layout, *case) not in done]
                if not cases:
                    continue
                with tempfile.TemporaryDirectory(prefix="faults-") as folder:
                    lines = run_cases(warm, Path(folder) / "job", layout, cases, args.delay, torchrun)
                results += [line | {"commit": args.commit} for line in lines]
                lost = [line for line in lines if line["lost"]]
                seconds = time.monotonic() - began
                print(f"{seconds:6.0f} s  {layout}: {len(lines)} cases, {len(lost)} lost", *lost, sep="\n", flush=True)
                write(args.out, results, args.delay, body["seconds"] + seconds)
    return int(any(result["lost"] for result in results))


def write(path: Path, results: list[dict[str, Any]], delay: float, seconds: float) -> None:
    """Write the result file: a line a case."""
    order = list(LAYOUTS), list(MOMENTS)
    results.sort(key=lambda line: (order[0].index(line["layout"]), order[1].index(line["moment"]), line["fault"]))
    head = {
        "schema": "snip.faults/3", "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "delay_s": delay,
        "seconds": round(seconds), "cases": len(results), "lost": sum(bool(line["lost"]) for line in results),
    }  # fmt: skip
    rows = ",\n".join(f"  {json.dumps(line, ensure_ascii=False)}" for line in results)
    path.write_text(f'{json.dumps(head, ensure_ascii=False)[:-1]}, "results": [\n{rows}\n]}}\n')


if __name__ == "__main__":
    sys.exit(main())
