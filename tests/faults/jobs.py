"""Runs a batch's trainings and judges each of its faults."""

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch import finish, start_ranks, tiny_llama_args
from warm_ranks import WarmRanks

from faults import judge
from faults.endings import TRACKER, AgentKilled, Preempted
from faults.injection import Record, read_record, write_json
from faults.kind import Lost
from faults.kinds import KINDS
from faults.plan import FIRST_UPDATE, INTERVAL, LAG, SAVE_INTERVAL, Batch, Fault, window

MODULE = "faults.trainer"
TIMEOUT_S = 600.0
_MODEL = ("--num-layers", "2", "--global-batch-size", "4")
_SNIP = (
    f"--snip --snip-first-update {FIRST_UPDATE} --snip-update-interval {INTERVAL} --snip-lag {LAG} --snip-wait 300"
    " --snip-settings deadline=120"
).split()


def run_batch(batch: Batch, warm: WarmRanks, root: Path) -> list[dict[str, Any]]:
    """A result for each fault of the batch: what was injected, its outcome, and what was lost (None)."""
    runners: dict[str, Callable[[Job], dict[int, str]]] = {
        "update": run_updates,
        "restart": run_restarts,
        "launcher": run_launcher,
    }
    started = time.monotonic()
    job = Job(batch, warm, root / f"batch{batch.index:03d}")
    try:
        outcomes, lost = runners[batch.group](job), None
    except Lost as error:
        outcomes, lost = {}, str(error)
    seconds = round(time.monotonic() - started, 1)
    results = []
    for fault in batch.faults:
        fault_lost = lost or job.lost.get(fault.number)
        results.append(
            asdict(fault)
            | {
                "batch": batch.index,
                "world": batch.world,
                "layout": " ".join(batch.layout),
                "outcome": None if fault_lost else outcomes[fault.number],
                "lost": fault_lost,
                "batch_seconds": seconds,
            }
        )
    return results


class Job:
    """One batch's folder and the trainings in it. ``lost`` collects what single faults cost, by number."""

    def __init__(self, batch: Batch, warm: WarmRanks, folder: Path) -> None:
        self.batch, self.warm, self.folder = batch, warm, folder
        self.run = folder / "run"
        self.lost: dict[int, str] = {}
        self.last_line = ""
        folder.mkdir(parents=True, exist_ok=True)

    def arguments(self, run: Path, *extra: str) -> list[str]:
        return tiny_llama_args(
            *_MODEL, *_SNIP, *self.batch.layout, "--snip-dir", str(run), *extra, iters=self.batch.steps
        )

    def prepare(self, name: str, faults: Sequence[Fault]) -> tuple[Path, dict[str, str]]:
        """The folder of one training and its ranks' variables."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "plan.json", [asdict(fault) for fault in faults])
        return folder, {"FAULTS": str(folder), judge.MARK: str(folder)}

    def train(self, name: str, arguments: Sequence[str], faults: Sequence[Fault] = ()) -> tuple[Path, int]:
        """One training on warm ranks: its folder and exit code. Raises Lost if it leaves a process behind."""
        folder, env = self.prepare(name, faults)
        for _ in range(3):
            done = self.warm.run(
                self.batch.world, arguments, module=MODULE, env=env, tmp=folder / "ranks", timeout=TIMEOUT_S
            )
            if "DistNetworkError" not in done.stderr or read_record(folder, "trace"):
                break  # else another process took the port before the first rank did
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        self.last_line = next((line for line in reversed(lines) if "Error" in line), (lines or [""])[-1])[:200]
        no_orphans(folder)
        if done.returncode == 124:
            raise Lost(f"{name}: still running after {TIMEOUT_S:g} s")
        return folder, done.returncode

    def check_replay(self, found: judge.Curve, run: Path) -> None:
        """The whole training against ``--snip-replay`` of its own record, bit for bit. Raises Lost."""
        replay = self.folder / "replay"
        _, code = self.train("replay", self.arguments(replay / "run", "--snip-replay", str(run)))
        if code:
            raise Lost(f"the replay ended with exit code {code}: {self.last_line}")
        again = judge.curve(replay)
        judge.complete(again, self.batch.steps)
        judge.same(found, again, "replay")


def no_orphans(folder: Path) -> None:
    """Raises Lost where a process of the training in ``folder`` is left."""
    if left := judge.orphans(f"{judge.MARK}={folder}"):
        raise Lost(f"process left behind: {left[0][:120]}")


# -- trainings that go on ----------------------------------------------------------------------------------------
def run_updates(job: Job) -> dict[int, str]:
    """One training, a fault in each of its updates."""
    batch = job.batch
    extra = _wandb(job.folder) if any(KINDS[fault.kind].needs_wandb for fault in batch.faults) else ()
    folder, code = job.train("training", job.arguments(job.run, *extra), batch.faults)
    if code:
        raise Lost(f"training ended with exit code {code}: {job.last_line}")
    gone = sorted(folder.glob("gone*"))
    run = judge.merge_runs([*gone, job.run], job.folder / "merged") if gone else job.run
    found = judge.curve(folder)
    judge.complete(found, batch.steps)
    judge.nothing_unrecorded(run, batch.steps)
    job.check_replay(found, run)
    last = judge.events_in(run, window(batch.faults[-1].step + INTERVAL))
    if "adopt" not in {event["event"] for event in last}:
        raise Lost("the undisturbed update after the faults was not adopted")
    notes = read_record(folder, "notes")
    outcomes = {}
    for fault in batch.faults:
        own = [note["what"] for note in notes if note["fault"] == fault.number]
        try:
            if "injected" not in own:
                raise Lost("the fault was not injected")
            outcomes[fault.number] = KINDS[fault.kind].outcome(judge.events_in(run, window(fault.step)), own)
        except Lost as error:
            job.lost[fault.number] = str(error)
    return outcomes


def _wandb(folder: Path) -> tuple[str, ...]:
    wandb = ("--wandb-project", "faults", "--wandb-exp-name", "run", "--wandb-save-dir", str(folder / "wandb"))
    return (*wandb, "--tensorboard-dir", str(folder / "tensorboard"))


# -- jobs that are started again ---------------------------------------------------------------------------------
def run_restarts(job: Job) -> dict[int, str]:
    """One job, ended by each fault and started again on its checkpoint, as a scheduler does."""
    batch, checkpoints = job.batch, job.folder / "checkpoints"
    arguments = job.arguments(job.run, *_saving(checkpoints))
    done: judge.Curve = {}
    outcomes: dict[int, str] = {}
    before: Fault | None = None
    expected = 0
    for number, fault in enumerate((*batch.faults, None)):
        folder, code = job.train(f"attempt{number}", arguments, [fault] if fault else [])
        ends_well = fault is None or isinstance(KINDS[fault.kind], Preempted)
        if bool(code) == ends_well:
            raise Lost(
                f"the job ended with exit code {code} ({'no fault' if fault is None else fault.kind}): {job.last_line}"
            )
        if fault is not None and not read_record(folder, "notes"):
            raise Lost(f"fault {fault.number} was not injected")
        new = judge.curve(folder)
        redone = judge.same(done, new, "after the restart")
        if before is not None:
            if min(new) != expected:
                raise Lost(f"resumed at step {min(new)}, not {expected}")
            outcomes[before.number] = _resumed(before, redone)
        done |= new
        if fault is not None:
            expected = int((checkpoints / TRACKER).read_text())
        before = fault
    judge.complete(done, batch.steps)
    judge.nothing_unrecorded(job.run, batch.steps)
    job.check_replay(done, job.run)
    return outcomes


def _resumed(fault: Fault, redone: int) -> str:
    kind = KINDS[fault.kind]
    if isinstance(kind, Preempted):
        if redone:
            raise Lost(f"{redone} steps were done again: no checkpoint was written at the signal")
        return "checkpoint written, clean end, resumed where it stopped"
    return "latest checkpoint used, redone steps bitwise the same"


def _saving(checkpoints: Path) -> tuple[str, ...]:
    where = ("--save", str(checkpoints), "--load", str(checkpoints), "--save-interval", str(SAVE_INTERVAL))
    return (*where, "--exit-signal-handler")


# -- jobs under torchrun -----------------------------------------------------------------------------------------
def run_launcher(job: Job) -> dict[int, str]:
    """One job under real torchrun, which starts the ranks again."""
    (fault,) = job.batch.faults
    arguments = job.arguments(job.run, *_saving(job.folder / "checkpoints"))
    folder, env = job.prepare("torchrun", [fault])
    if isinstance(KINDS[fault.kind], AgentKilled):
        codes = _kill_an_agent(job, fault, folder, arguments, env)
    else:
        # To files: what a killed rank leaves behind would hold a pipe open.
        launcher = ("--standalone", "--max-restarts", "2", "--redirects", "3", "--log-dir", str(folder / "log"))
        # By default torch's store keeps the addresses of the dead ranks for those that are started again.
        env = {**env, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        process = start_ranks(2, arguments, module=MODULE, env=env, tmp=folder, launcher=launcher)
        codes = [finish(process, TIMEOUT_S).returncode]
    no_orphans(folder)
    if any(codes):
        raise Lost(f"torchrun ended with exit codes {codes}")
    if not read_record(folder, "notes"):
        raise Lost("the fault was not injected")
    found = judge.curve(folder)  # of both attempts
    judge.complete(found, job.batch.steps)
    judge.nothing_unrecorded(job.run, job.batch.steps)
    if len({line["pid"] for line in read_record(folder, "trace0")}) < 2:
        raise Lost("no rank was started again")
    job.check_replay(found, job.run)
    return {fault.number: "restarted by torchrun from the checkpoint, redone steps bitwise the same"}


def _kill_an_agent(job: Job, fault: Fault, folder: Path, arguments: Sequence[str], env: dict[str, str]) -> list[int]:
    """Two agents of one rank each; the second dies with all it started, a third joins. Exit codes of the survivors."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def agent(number: int, host: int) -> Any:
        launcher = ("--nnodes", "2", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", str(fault.number))
        # Files, not pipes that nobody reads until the end.
        launcher += ("--redirects", "3", "--log-dir", str(folder / f"log{number}"))
        launcher += ("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", f"is_host={host}")
        tmp = folder / f"agent{number}"
        tmp.mkdir(exist_ok=True)
        own = {**env, "FAULTS_AGENT": f"{folder}/{number}"}
        # torch shares the first round's store between rounds by default: who joins later waits for its address in vain.
        own["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        return start_ranks(1, arguments, module=MODULE, env=own, tmp=tmp, launcher=launcher)

    survivor, victim = agent(1, 1), agent(2, 0)
    end = time.monotonic() + TIMEOUT_S
    while not any(line["step"] >= fault.step for line in read_record(folder, "trace")):
        if time.monotonic() > end or survivor.poll() is not None:
            raise Lost("the job under two agents did not get to the fault's step")
        time.sleep(0.05)
    time.sleep(fault.params["delay_s"])
    for pid in sorted(judge.marked_pids(f"FAULTS_AGENT={folder}/2")):
        os.kill(pid, signal.SIGKILL)
    victim.wait()
    victim.communicate()
    Record(folder / "notes_agent.jsonl").add(fault=fault.number, what="injected")
    joined = agent(3, 0)
    ended = [finish(process, TIMEOUT_S) for process in (survivor, joined)]
    for number, process in zip((1, 3), ended, strict=True):
        (folder / f"agent{number}" / "agent.log").write_text(process.stderr)
    return [process.returncode for process in ended]
