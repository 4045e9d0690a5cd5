"""``python -m faults.moments_campaign --out FILE.json``: every fault of the table at every moment, under every layout.

Run it in the folder ``tests`` (or with it on PYTHONPATH). A training goes through a dozen cases, one an update, and is
started again on its checkpoint where a fault ends it. It is judged by its own replay, which is undisturbed and has the
same schedule of maps: losses, gradient norms and maps of all steps must be equal to the bit. A fault that ends the job
must do so in one line, with all records before it. The exit code is 1 if a fault cost a training something.
"""

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from launch import error_lines, run_ranks, tiny_llama_args
from warm_ranks import WarmRanks

from faults.campaign import LostError, lines_of, orphans
from faults.moments import ENDS, MOMENTS, Case, all_cases
from faults.moments_trainer import FIRST, INTERVAL, LAG
from snip_megatron.runtime.run_data import read_events, read_metrics

LAYOUTS = {
    "TP2×PP2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
    "DP2×EP2": (2, "--use-distributed-optimizer --expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2"
                " --moe-ffn-hidden-size 96 --moe-token-dispatcher-type alltoall"),
    "PP2, virtual stages": (2, "--num-layers 4 --pipeline-model-parallel-size 2"
                            " --num-layers-per-virtual-pipeline-stage 1"),
}  # fmt: skip
"""Ranks, and Megatron's arguments."""
CASES = 24  # of a training
BY_TORCHRUN = ("recording", "adoption", "checkpoint")
"""Moments at which torchrun restarts the killed rank of one layout. Elsewhere the job is started again."""
TRAINER, MARK = "faults.moments_trainer", "FAULTS_JOB"
_SNIP = shlex.split(
    f"--snip --snip-estimator noise --snip-first-update {FIRST} --snip-update-interval {INTERVAL} --snip-lag {LAG}"
    " --snip-wait 300 --snip-settings deadline=120"
)
_TINY = ("--num-layers", "2", "--exit-signal-handler")
_GRACE_S = 3.0  # for the other ranks after one has ended


class Job:
    """A training under one layout that goes through cases, in a folder.

    Attributes:
        outcomes: What came of each case: of its update, or how the job ended.
        lost: Why a case cost the training something.
    """

    def __init__(
        self, warm: WarmRanks, folder: Path, layout: str, cases: Sequence[Case], delay: float, torchrun: bool = False
    ) -> None:
        self._warm, self._folder, self._cases, self._delay, self._torchrun = warm, folder, cases, delay, torchrun
        self._world, arguments = LAYOUTS[layout]
        self._layout = shlex.split(arguments)
        self._steps = FIRST + (len(cases) + 1) * INTERVAL  # an undisturbed update follows the last fault
        self._losses_said = self._hung = False
        self.outcomes: dict[int, str] = {}
        self.lost: dict[int, str] = {}

    def run(self) -> None:
        """Train to the end, as often as it takes, and judge."""
        self._folder.mkdir()
        checkpoints = str(self._folder / "checkpoints")
        every = INTERVAL if any(map(ends, self._cases)) else 4 * INTERVAL
        curve: dict[int, Any] = {}
        for start in range(2 * len(self._cases) + 2):
            known = set(self._injected())
            where = ("--save", checkpoints, "--load", checkpoints, "--save-interval", str(every))
            where += ("--snip-dir", str(self._folder / "run"))
            done = self._train(f"start{start}", self._cases, str(start), *where)
            new = {index: at for index, at in self._injected().items() if index not in known}
            steps = curve_of(self._folder, f"{start}.")
            curve |= steps
            if done.returncode == 0 and self._steps - 1 in steps:
                break
            if not new:
                raise LostError(f"it ended without a fault: exit code {done.returncode}: {done.stderr[-300:]}")
            self._judge_end(max(new, key=lambda index: new[index]["time"]), done)
        self._judge(curve)

    def _train(self, name: str, cases: Sequence[Case], start: str, *extra: str) -> subprocess.CompletedProcess[str]:
        (self._folder / "plan.json").write_text(json.dumps({"cases": cases, "delay": self._delay}))
        args = tiny_llama_args(*_TINY, *_SNIP, *self._layout, *extra, iters=self._steps)
        env = {"FAULTS": str(self._folder), MARK: str(self._folder), "START": start}
        tmp, timeout = self._folder / name, 200.0 + 2 * self._delay * len(cases)
        if self._torchrun and cases:
            tmp.mkdir()
            restarts = ("--standalone", f"--max-restarts={len(cases)}", "--monitor-interval=0.2")
            done = run_ranks(
                self._world,
                args,
                module="faults.moments_trainer",
                env=env,
                tmp=tmp,
                launcher=restarts,
                timeout=timeout * 3,
            )
        else:
            began = time.monotonic()
            done = self._warm.run(self._world, args, module=TRAINER, env=env, tmp=tmp, timeout=timeout, grace=_GRACE_S)
            self._hung = time.monotonic() - began > timeout
        self._losses_said |= "records were lost" in done.stderr or "are missing" in done.stderr
        if processes := orphans(f"{MARK}={self._folder}"):
            raise LostError(f"process left behind: {processes[0]}")
        return done

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
                self.lost.setdefault(index, "its moment did not come")
        if missing := set(range(self._steps)) - set(curve):
            raise LostError(f"steps missing: {sorted(missing)[:5]}")
        recorded = {record["step"] for record in read_metrics(run)}
        if recorded != set(range(self._steps)) and not self._losses_said:
            raise LostError(f"metrics.jsonl lacks steps {sorted(set(range(self._steps)) - recorded)[:5]}, unsaid")
        events = read_events(run)
        for event in events:
            file = {"submit": "stats/step_{}.npz", "adopt": "maps/step_{}.json"}.get(event["event"])
            if file is not None and not (run / file.format(event["step"])).exists() and not self._losses_said:
                raise LostError(f"{file.format(event['step'])} is missing, unsaid")
        for index, at in injected.items():
            self.outcomes.setdefault(index, _of_update(events, at["step"]))
        replayed = ("--snip-dir", str(self._folder / "replayed"), "--snip-replay", str(run))
        done = self._train("replay", (), "replay", *replayed)
        if done.returncode:
            raise LostError(f"the replay ended with exit code {done.returncode}: {done.stderr[-300:]}")
        expected = curve_of(self._folder, "replay.")
        if differing := [step for step in range(self._steps) if expected[step] != curve[step]]:
            before = [index for index, at in injected.items() if at["step"] <= differing[0]]
            cause = max(before, key=lambda index: injected[index]["time"], default=0)
            for index in before:
                if index == cause or injected[index]["time"] > injected[cause]["time"]:
                    self.lost[index] = f"step {differing[0]} differs in the replay"

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
    warm: WarmRanks, folder: Path, layout: str, cases: Sequence[Case], delay: float, torchrun: bool = False
) -> list[dict[str, Any]]:
    """Run one training with the cases. Returns a line for each."""
    job = Job(warm, folder, layout, cases, delay, torchrun)
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


def _of_update(events: Sequence[Mapping[str, Any]], step: int) -> str:
    """Return what came of the update of a case, from its step until the next one."""
    told = {"dropped": "dropped ({part})", "solve_failed": "not solved ({reason})", "adopt": "adopted", "kept": "kept"}
    begin = step - (step - FIRST) % INTERVAL
    found = [
        told[event["event"]].format_map(Counter() | {"part": event.get("part") or event.get("reason"), **event})
        for event in events
        if event["event"] in told and begin <= event["step"] - (event["event"] != "dropped") < begin + INTERVAL
    ]
    return ", ".join(dict.fromkeys(found)) or "training went on"


def ends(case: Case) -> bool:
    """Return whether a case ends its process, or needs a checkpoint near it."""
    always = case.fault in ("rank killed", "SIGTERM") or case.moment in ("start", "end", "checkpoint")
    by_error = case.moment in ("forward and backward", "decision", "adoption") and case.fault in ENDS
    return always or by_error


def chunks(layout: str) -> list[tuple[list[Case], bool]]:
    """Split the cases of a layout into trainings. Under the last layout torchrun itself restarts some killed ranks."""
    cases, last = all_cases(), layout == list(LAYOUTS)[-1]
    killed = [Case(moment, "rank killed") for moment in BY_TORCHRUN if last]
    rest = [each for each in cases if each not in killed]
    parts = [[each for each in rest if ends(each) == kind] for kind in (False, True)]
    whole = [(part[i : i + CASES], False) for part in parts for i in range(0, len(part), CASES)]
    return [*whole, *([(killed, True)] if killed else [])]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults.moments_campaign", description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="result file, written after every training; cases that it has are not run again",
    )
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=LAYOUTS, metavar="LAYOUT")
    parser.add_argument("--moments", nargs="*", default=list(MOMENTS), choices=MOMENTS, metavar="MOMENT")
    parser.add_argument("--faults", nargs="*", help="faults of the table (default: all)")
    parser.add_argument("--delay", type=float, default=30.0, help="seconds of a delay and of a stalled disk")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no training begins")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once")
    parser.add_argument("--commit", default=os.environ.get("SNIP_COMMIT"), help="commit for the result file")
    args = parser.parse_args()
    began, lock, local = time.monotonic(), threading.Lock(), threading.local()
    results = json.loads(args.out.read_text())["results"] if args.out.exists() else []
    results = [line for line in results if not line["lost"]]
    done = {(line["layout"], line["moment"], line["fault"]) for line in results}
    servers: list[WarmRanks] = []

    def train(layout: str, cases: list[Case], torchrun: bool) -> None:
        cases = [each for each in cases if each.moment in args.moments and each.fault in (args.faults or [each.fault])]
        cases = [each for each in cases if (layout, *each) not in done]
        if not cases or time.monotonic() - began > args.limit:
            return
        if not hasattr(local, "warm"):
            local.warm = WarmRanks()
            servers.append(local.warm)
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            lines = run_cases(local.warm, Path(folder) / "job", layout, cases, args.delay, torchrun)
        with lock:
            results.extend(line | {"commit": args.commit} for line in lines)
            lost = [line for line in lines if line["lost"]]
            print(f"{time.monotonic() - began:6.0f} s  {layout}: {len(lines)} cases, {len(lost)} lost", flush=True)
            for line in lost:
                print(f"LOST {line}", flush=True)
            write(args.out, results, args.delay, args.commit, time.monotonic() - began)

    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = [(layout, *chunk) for layout in args.layouts for chunk in chunks(layout)]
        for future in [pool.submit(train, *job) for job in jobs]:
            future.result()
    for server in servers:
        server.close()
    return int(any(result["lost"] for result in results))


def write(path: Path, results: list[dict[str, Any]], delay: float, commit: str | None, seconds: float) -> None:
    """Write the result file: a line a case."""
    order = list(LAYOUTS), list(MOMENTS)
    results.sort(key=lambda line: (order[0].index(line["layout"]), order[1].index(line["moment"]), line["fault"]))
    head = {
        "schema": "snip.faults/3", "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": commit,
        "delay_s": delay, "seconds": round(seconds), "cases": len(results),
        "lost": sum(bool(line["lost"]) for line in results),
    }  # fmt: skip
    rows = ",\n".join(f"  {json.dumps(line, ensure_ascii=False)}" for line in results)
    path.write_text(f'{json.dumps(head, ensure_ascii=False)[:-1]}, "results": [\n{rows}\n]}}\n')


if __name__ == "__main__":
    sys.exit(main())
