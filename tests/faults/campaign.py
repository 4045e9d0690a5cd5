"""``python -m faults.campaign --out FILE.json``: every fault of the table at every moment under every layout.

Run it in the folder ``tests`` (or with it on PYTHONPATH). A training is judged by its own replay, bit for bit, and by
its records. The exit code is 1 if a fault cost a training something.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch import tiny_llama_args
from warm_ranks import WarmRanks

from faults.table import DROPPED, FAULTS
from snip_megatron.runtime.run_data import read_events, read_metrics

DELAYS = (0.0, 0.1, 0.5)
LAYOUTS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (1, ()),
    (2, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    (2, ("--pipeline-model-parallel-size", "2")),
    (2, ("--use-distributed-optimizer",)),
)
FIRST, INTERVAL, LAG = 2, 5, 2  # of updates; checkpoints have the same interval
MARK = "FAULTS_JOB"
_SNIP = f"--snip --snip-first-update {FIRST} --snip-update-interval {INTERVAL} --snip-lag {LAG}".split()
_TINY = ("--num-layers", "2", "--global-batch-size", "4")
WAIT = ("--snip-wait", "300", "--snip-settings", "deadline=120")
_TIMEOUT_S = 600.0


class LostError(AssertionError):
    """A fault cost the training something."""


class Job:
    """The trainings of one layout in a folder. Raises LostError from any method if something is lost.

    ``warm`` starts the ranks, ``extra`` are arguments of all trainings, and ``timeout`` the seconds that one may take.
    """

    def __init__(
        self,
        warm: WarmRanks,
        folder: Path,
        layout: tuple[int, tuple[str, ...]],
        delay: float,
        extra: Sequence[str] = (),
        timeout: float = _TIMEOUT_S,
    ) -> None:
        self.warm, self.folder, self.delay = warm, folder, delay
        self.extra, self.timeout = extra, timeout
        self.world, self.layout = layout
        self.run = folder / "run"

    def train(
        self,
        name: str,
        steps: int,
        faults: Mapping[int, str],
        *extra: str,
        run: Path | None = None,
        **plan: Any,
    ) -> tuple[Path, int]:
        """Train with faults by step. Returns the folder of the ranks' records and the exit code.

        ``plan`` are further fields of the plan that :mod:`faults.trainer` reads.
        """
        folder = self.folder / name
        folder.mkdir(parents=True)
        settle = [step + INTERVAL - 1 for step in faults]
        plan = {"faults": faults, "delay": self.delay, "settle": settle, "stop_at_map": False, **plan}
        (folder / "plan.json").write_text(json.dumps(plan))
        where = ("--snip-dir", str(run or self.run))
        args = tiny_llama_args(*_TINY, *_SNIP, *self.layout, *where, *extra, *self.extra, iters=steps)
        env = {"FAULTS": str(folder), MARK: str(folder)}
        done = self.warm.run(
            self.world, args, module="faults.trainer", env=env, tmp=folder / "ranks", timeout=self.timeout
        )
        self.error = done.stderr[-300:]
        if processes := orphans(f"{MARK}={folder}"):
            raise LostError(f"process left behind: {processes[0]}")
        if done.returncode == 124:
            raise LostError(f"{name}: still running after {self.timeout:g} s")
        for step, fault in faults.items():
            if not any(line["step"] == step for line in lines_of(folder, "injected")):
                raise LostError(f"{fault} was not injected at step {step}: {self.error}")
        return folder, done.returncode

    def check(self, curve: Mapping[int, Any], steps: int) -> None:
        """Compare the training with the replay of its record, bit for bit, and look for missing records."""
        run = _merged(sorted(self.folder.rglob("removed*")), self.run, self.folder / "merged")
        if sorted(curve) != list(range(steps)):
            raise LostError(f"steps missing: {sorted(set(range(steps)) - set(curve))[:5]}")
        if [record["step"] for record in read_metrics(run)] != list(range(steps)):
            raise LostError("metrics.jsonl lacks records")
        for event in read_events(run):
            file = {"submit": "stats/step_{}.npz", "adopt": "maps/step_{}.json"}.get(event["event"])
            if file is not None and not (run / file.format(event["step"])).exists():
                raise LostError(f"{file.format(event['step'])} is missing")
        folder, code = self.train("replay", steps, {}, "--snip-replay", str(run), run=self.folder / "replayed")
        if code:
            raise LostError(f"the replay ended with exit code {code}: {self.error}")
        if differing := [step for step, figures in curve_of(folder).items() if figures != curve[step]]:
            raise LostError(f"step {differing[0]} differs in the replay")


def run_updates(job: Job, names: Sequence[str]) -> dict[str, str]:
    """Train once with a fault in each update. Returns fault → outcome."""
    faults = {FIRST + place * INTERVAL: name for place, name in enumerate(names)}
    steps = FIRST + (len(names) + 1) * INTERVAL + 1  # an undisturbed update follows the last fault
    folder, code = job.train("training", steps, faults, *WAIT)
    if code:
        raise LostError(f"training ended with exit code {code}: {job.error}")
    job.check(curve_of(folder), steps)
    events = read_events(job.folder / "merged")
    outcomes = {name: outcome_of(events, step) for step, name in faults.items()}
    if (last := outcome_of(events, FIRST + len(names) * INTERVAL)) != "adopted":
        raise LostError(f"the undisturbed update after the faults: {last}")
    return outcomes


def run_endings(job: Job, names: Sequence[str]) -> dict[str, str]:
    """Train in a job that each fault ends, and that is started again on its checkpoint. Returns fault → outcome."""
    steps, checkpoints = (len(names) + 3) * INTERVAL + 1, job.folder / "checkpoints"
    saving = ("--save", str(checkpoints), "--load", str(checkpoints), "--save-interval", str(INTERVAL))
    curve: dict[int, Any] = {}
    outcomes: dict[str, str] = {}
    for place, name in enumerate([*names, None]):
        step = (place + 2) * INTERVAL + 2
        faults = {} if name is None else {step: name}
        folder, code = job.train(f"start{place}", steps, faults, *WAIT, *saving, "--exit-signal-handler")
        if bool(code) != (name is not None and FAULTS[name].outcomes == ("killed",)):
            raise LostError(f"{name or 'the last start'}: exit code {code}: {job.error}")
        new = curve_of(folder)
        if differing := [step for step in curve.keys() & new.keys() if curve[step] != new[step]]:
            raise LostError(f"step {min(differing)} differs after the restart")
        curve |= new
        if name is not None:
            saved = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
            outcomes[name] = "stopped" if saved == max(new) + 1 else "killed"
    job.check(curve, steps)
    return outcomes


def run_faults(warm: WarmRanks, folder: Path, layout: Any, delay: float, names: Sequence[str]) -> list[dict[str, Any]]:
    """Run trainings with all faults of ``names``. Returns one result for each fault."""
    results = []
    for run, ends in ((run_updates, False), (run_endings, True)):
        if not (chosen := [name for name in names if FAULTS[name].ends == ends]):
            continue
        try:
            outcomes, lost = run(Job(warm, folder / run.__name__, layout, delay), chosen), None
        except LostError as error:
            outcomes, lost = {}, str(error)
        for name in chosen:
            outcome = outcomes.get(name)
            wrong = None if lost or outcome in FAULTS[name].outcomes else f"outcome {outcome}"
            place = {"world": layout[0], "layout": " ".join(layout[1]), "delay": delay}
            results.append({"fault": name, **place, "outcome": outcome, "lost": lost or wrong})
    return results


# -- the judge -----------------------------------------------------------------------------------------------------
def lines_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of ``<name><rank>.jsonl`` of all ranks, without the torn last line of a killed one."""
    lines = []
    for path in sorted(folder.glob(f"{name}*.jsonl")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
    return lines


def curve_of(folder: Path) -> dict[int, tuple[str, str, str]]:
    """Return step → (loss, gradient norm, map), to the bit. Raises LostError if ranks differ or a loss is missing."""
    seen: dict[int, tuple[set[str], set[tuple[str, str]]]] = {}
    for line in lines_of(folder, "trace"):
        losses, others = seen.setdefault(line["step"], (set(), set()))
        losses |= set() if line["loss"] is None else {line["loss"]}
        others.add((line["norm"], line["map"]))
    for step, (losses, others) in seen.items():
        if len(losses) != 1 or len(others) != 1:
            raise LostError(f"step {step} is not the same on all ranks, or has no loss")
    return {step: (*losses, *next(iter(others))) for step, (losses, others) in seen.items()}


def outcome_of(events: Sequence[Mapping[str, Any]], step: int, interval: int = INTERVAL) -> str:
    """Return what came of the update before ``step``."""
    kinds = {event["event"]: event for event in events if step <= event["step"] < step + interval}
    if "solve_failed" in kinds:
        return str(kinds["solve_failed"]["reason"]) if "adopt" not in kinds else "failed and adopted"
    if "adopt" in kinds:
        return DROPPED if "dropped" in kinds else "adopted"
    return "dropped" if "dropped" in kinds else f"events {sorted(kinds)}"


def _merged(removed: Sequence[Path], run: Path, whole: Path) -> Path:
    """Copy a run directory, with what it held before it was removed."""
    for part in (*removed, run):
        for file in part.rglob("*"):
            target = whole / file.relative_to(part)
            if file.is_file() and (file.suffix != ".jsonl" or not target.exists()):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target)
            elif file.is_file():
                target.write_text(target.read_text() + file.read_text())
    return whole


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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults.campaign", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="result file, written after every training")
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=FAULTS, metavar="FAULT")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    with contextlib.closing(WarmRanks()) as warm:
        for delay in DELAYS:
            for layout in LAYOUTS:
                with tempfile.TemporaryDirectory(prefix="faults-") as folder:
                    results += run_faults(warm, Path(folder), layout, delay, args.faults)
                args.out.write_text(json.dumps({"schema": "snip.faults/2", "results": results}, indent=1) + "\n")
                print(f"{len(results)} faults, {sum(bool(result['lost']) for result in results)} lost", flush=True)
    for result in results:
        if result["lost"]:
            print(f"LOST {result}")
    return int(any(result["lost"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
