"""The kinds of faults: how each is drawn, injected, and what has to come of it.

A kind of group ``update`` hits one update (or one step near it) of a training that goes on; one of group ``restart``
ends the job, which is started again on its checkpoint; one of group ``launcher`` is a job's under torchrun itself.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from faults.disk import FaultyDisk
from faults.injection import Rank

DEADLINE_S = 1.5
USUAL_DEADLINE_S = 120.0


class Lost(AssertionError):
    """The fault cost the training something."""


class Kind:
    """One kind. Subclasses say what differs.

    Attributes:
        weight: its share of a campaign. spread: how many steps after an update it may hit; 0: the update itself.
        reasons: of ``solve_failed`` events that may follow; "solved": the map may also arrive all the same.
    """

    name: ClassVar[str]
    group: ClassVar[str] = "update"
    weight: ClassVar[float] = 9
    spread: ClassVar[int] = 0
    needs_wandb: ClassVar[bool] = False
    reasons: ClassVar[tuple[str, ...]] = ("solved",)

    def draw(self, rng: random.Random, world: int) -> dict[str, Any]:
        """The figures of one fault, JSON-ready."""
        return {}

    def install(self, rank: Rank, fault: Any) -> None:
        """Before the training starts, on every rank."""

    def at_step(self, rank: Rank, fault: Any, step: int) -> None:
        """Before each step of the fault's window, on every rank."""

    def outcome(self, events: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> str:
        """What came of it, by the events of its window. Raises Lost."""
        failed = [event for event in events if event["event"] == "solve_failed"]
        adopted = [event for event in events if event["event"] == "adopt"]
        if failed:
            reason = failed[0]["reason"]
            if reason not in self.reasons or adopted:
                raise Lost(f"unexpected: {reason}: {failed[0]['message']}")
            return f"update dropped ({reason}), map kept"
        if "solved" not in self.reasons or not adopted:
            raise Lost(f"events {[event['event'] for event in events]}")
        return "update adopted in time"


# -- the solver's process ----------------------------------------------------------------------------------------
class SidecarKilled(Kind):
    name, weight, reasons = "sidecar killed", 24, ("died", "solved")

    def draw(self, rng: random.Random, world: int) -> dict[str, Any]:
        number = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
        return {"delay_s": rng.uniform(0, 1.0), "build_s": rng.uniform(0, 0.5), "signal": int(number)}

    def at_step(self, rank: Rank, fault: Any, step: int) -> None:
        if step == fault.step and rank.number == 0:
            delay, number = fault.params["delay_s"], fault.params["signal"]
            rank.later(delay, lambda: rank.signal_sidecar(fault.number, number))


class WithDeadline(Kind):
    """A job that gets a deadline of seconds, and a builder that does not answer in that time."""

    reasons = ("deadline",)

    def draw(self, rng: random.Random, world: int) -> dict[str, Any]:
        return {"delay_s": rng.uniform(0, 1.0), "build_s": 60.0}

    def at_step(self, rank: Rank, fault: Any, step: int) -> None:
        if rank.sidecar is not None:
            rank.sidecar._deadline = DEADLINE_S if step <= fault.step + 2 else USUAL_DEADLINE_S


class PastDeadline(WithDeadline):
    name = "past its deadline"


class SidecarStopped(WithDeadline):
    name, weight = "sidecar stopped", 12

    def at_step(self, rank: Rank, fault: Any, step: int) -> None:
        super().at_step(rank, fault, step)
        if step == fault.step and rank.number == 0:
            rank.later(fault.params["delay_s"], lambda: rank.signal_sidecar(fault.number, signal.SIGSTOP))


class OutOfMemory(Kind):
    name, weight, reasons = "out of memory (MemoryError)", 6, ("oom",)


class OutOfAddressSpace(Kind):
    name, reasons = "out of memory (RLIMIT_AS)", ("oom",)

    def draw(self, rng: random.Random, world: int) -> dict[str, Any]:
        return {"room_mib": rng.randrange(16, 128)}


class SolverException(Kind):
    name, reasons = "solver exception", ("exception",)

    def draw(self, rng: random.Random, world: int) -> dict[str, Any]:
        return {"error": rng.choice(("RuntimeError", "ZeroDivisionError", "KeyError"))}


class Infeasible(Kind):
    name, reasons = "infeasible", ("infeasible",)


class Garbage(Kind):
    name, reasons = "garbage on the pipe", ("died",)

    def draw(self, rng: random.Random, world: int) -> dict[str, Any]:
        return {"mode": rng.choice(("noise", "object", "torn")), "seed": rng.randrange(2**31)}


class CannotStart(Kind):
    name, weight, reasons = "no process to be had", 6, ("died", "solved")

    def draw(self, rng: random.Random, world: int) -> dict[str, Any]:
        return {"refusals": rng.randrange(1, 4), "error": rng.choice((errno.EAGAIN, errno.ENOMEM, errno.EMFILE))}

    def at_step(self, rank: Rank, fault: Any, step: int) -> None:
        if step != fault.step or rank.number != 0:
            return
        genuine, left = subprocess.Popen, [fault.params["refusals"]]

        def popen(*args: Any, **kwargs: Any) -> Any:
            if not left[0]:
                subprocess.Popen = genuine  # type: ignore[misc]
                return genuine(*args, **kwargs)
            left[0] -= 1
            rank.note(fault.number, "injected")
            raise OSError(fault.params["error"], os.strerror(fault.params["error"]))

        subprocess.Popen = popen  # type: ignore[misc,assignment]
        if rank.sidecar.pid is not None:
            os.kill(rank.sidecar.pid, signal.SIGKILL)


# -- the ranks ---------------------------------------------------------------------------------------------------
class BrokenStatistics(Kind):
    name, weight = "NaN or Inf in one rank's statistics", 12

    def draw(self, rng: random.Random, world: int) -> dict[str, Any]:
        column = rng.choice(("linear.x2", "linear.gw2", "by_format.e2", "boundary.h2"))
        return {"rank": rng.randrange(world), "column": column, "value": rng.choice(("nan", "inf", "-inf"))}

    def install(self, rank: Rank, fault: Any) -> None:
        from snip_megatron.statistics.reduction import PartialTable

        genuine, done = PartialTable.reduce, []

        def reduce(table: PartialTable, *args: Any) -> None:
            if rank.step == fault.step and rank.number == fault.params["rank"] and not done:
                done.append(True)
                table.arrays[fault.params["column"]].view(-1)[0] = float(fault.params["value"])
                rank.note(fault.number, "injected")
            genuine(table, *args)

        PartialTable.reduce = reduce  # type: ignore[method-assign]

    def outcome(self, events: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> str:
        kinds = [event["event"] for event in events]
        if "dropped" not in kinds or "submit" in kinds or "adopt" in kinds:
            raise Lost(f"events {kinds}")
        return "update dropped (not finite), map kept"


class SlowRank(Kind):
    name, spread = "one rank slow", 5

    def draw(self, rng: random.Random, world: int) -> dict[str, Any]:
        return {"rank": rng.randrange(world), "seconds": rng.uniform(0.2, 1.0)}

    def at_step(self, rank: Rank, fault: Any, step: int) -> None:
        if step == fault.step and rank.number == fault.params["rank"]:
            rank.note(fault.number, "injected")
            time.sleep(fault.params["seconds"])


# -- where figures go --------------------------------------------------------------------------------------------
class Disk(Kind):
    """The run directory fails for some steps: records are kept and written later, none is lost (the judge counts)."""

    spread = 3
    error: ClassVar[int]

    def draw(self, rng: random.Random, world: int) -> dict[str, Any]:
        return {"steps": rng.randrange(1, 3)}

    def at_step(self, rank: Rank, fault: Any, step: int) -> None:
        run = None if rank.coordinator is None else rank.coordinator._run
        if run is None:
            return
        if step == fault.step:
            run.writer.drain(force=True)  # what an earlier fault held back would not be tried again in time
            rank.disk = FaultyDisk(run.path, self.error, lambda: rank.note(fault.number, "injected"))
        elif step == fault.step + fault.params["steps"] and rank.disk is not None:
            rank.disk = rank.disk.heal()

    def outcome(self, events: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> str:
        super().outcome(events, notes)
        return "records kept and written later, update adopted"


class DiskFull(Disk):
    name, error = "run directory full", errno.ENOSPC


class DiskReadOnly(Disk):
    name, error = "run directory read-only", errno.EROFS


class DirectoryGone(Kind):
    name, spread = "run directory gone", 5

    def draw(self, rng: random.Random, world: int) -> dict[str, Any]:
        return {"how": rng.choice(("removed", "renamed"))}

    def at_step(self, rank: Rank, fault: Any, step: int) -> None:
        run = None if rank.coordinator is None else rank.coordinator._run
        if run is None or step != fault.step:
            return
        kept = rank.folder / f"gone{fault.number:04d}"
        if fault.params["how"] == "renamed":
            run.path.rename(kept)
        else:
            shutil.copytree(run.path, kept)
            shutil.rmtree(run.path)
        rank.note(fault.number, "injected")

    def outcome(self, events: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> str:
        super().outcome(events, notes)
        return "directory made again, every later record in it"


class WandbFails(Kind):
    name, spread, needs_wandb = "wandb failing", 3, True

    def draw(self, rng: random.Random, world: int) -> dict[str, Any]:
        return {"calls": rng.randrange(1, 3), "error": rng.choice(("OSError", "TimeoutError", "RuntimeError"))}

    def at_step(self, rank: Rank, fault: Any, step: int) -> None:
        for logger in rank.controller._sink.loggers:
            if step == fault.step and logger.name == "wandb" and logger.writer is not None:
                logger.writer = FailingWriter(logger.writer, rank, fault)

    def outcome(self, events: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> str:
        super().outcome(events, notes)
        if "ended" not in notes:
            raise Lost("no figure reached wandb afterwards")
        return "figures of some rows missing, later ones sent, update adopted"


class FailingWriter:
    """wandb's own writer, behind calls that raise."""

    def __init__(self, genuine: Any, rank: Rank, fault: Any) -> None:
        self._genuine, self._rank, self._fault = genuine, rank, fault
        self._left = fault.params["calls"]

    def log(self, *args: Any, **kwargs: Any) -> None:
        if self._left > 0:
            self._left -= 1
            self._rank.note(self._fault.number, "injected")
            kinds = {"OSError": OSError, "TimeoutError": TimeoutError, "RuntimeError": RuntimeError}
            raise kinds[self._fault.params["error"]]("injected")
        self._genuine.log(*args, **kwargs)
        if self._left == 0:
            self._left = -1
            self._rank.note(self._fault.number, "ended")


# -- jobs that end -----------------------------------------------------------------------------------------------
class RankKilled(Kind):
    name, group, weight = "rank killed, job started again", "restart", 12

    def draw(self, rng: random.Random, world: int) -> dict[str, Any]:
        return {"rank": rng.randrange(world), "delay_s": rng.uniform(0, 0.15)}

    def at_step(self, rank: Rank, fault: Any, step: int) -> None:
        if step == fault.step and rank.number == fault.params["rank"]:
            self._strike(rank, fault, signal.SIGKILL)

    def _strike(self, rank: Rank, fault: Any, number: int) -> None:
        def strike() -> None:
            rank.note(fault.number, "injected")
            os.kill(os.getpid(), number)

        rank.later(fault.params["delay_s"], strike)


class Preempted(RankKilled):
    """SIGTERM, as SLURM sends before it takes the nodes: Megatron saves and ends (--exit-signal-handler)."""

    name, weight = "SIGTERM (preemption)", 10

    def at_step(self, rank: Rank, fault: Any, step: int) -> None:
        if step == fault.step and rank.number == fault.params["rank"]:
            self._strike(rank, fault, signal.SIGTERM)


class KilledInSave(Kind):
    name, group, weight = "killed while saving", "restart", 12

    def draw(self, rng: random.Random, world: int) -> dict[str, Any]:
        return {"rank": rng.randrange(world), "delay_s": rng.uniform(0, 0.06)}

    def install(self, rank: Rank, fault: Any) -> None:
        import megatron.training.training as training

        genuine = training.save_checkpoint

        def save(iteration: int, *args: Any, **kwargs: Any) -> Any:
            if iteration < fault.step or rank.number != fault.params["rank"]:
                return genuine(iteration, *args, **kwargs)

            def strike() -> None:
                rank.note(fault.number, "injected")
                os.kill(os.getpid(), signal.SIGKILL)

            rank.later(fault.params["delay_s"], strike)
            genuine(iteration, *args, **kwargs)
            return time.sleep(60)  # the save was over first; the signal comes

        training.save_checkpoint = save


class CheckpointDamaged(RankKilled):
    """The host dies and takes part of the latest checkpoint with it."""

    name, weight = "latest checkpoint half-written", 8
    MODES = ("no metadata.json", "no .metadata", ".metadata cut", "part cut", "part missing")

    def draw(self, rng: random.Random, world: int) -> dict[str, Any]:
        return super().draw(rng, world) | {"mode": rng.choice(self.MODES)}

    def damage(self, folder: Path, params: Mapping[str, Any]) -> int:
        """Damage the latest checkpoint in ``folder``; the iteration that has to be loaded instead."""
        iterations = sorted(int(path.name[5:]) for path in folder.glob("iter_*") if (path / "metadata.json").exists())
        latest = folder / f"iter_{int((folder / TRACKER).read_text()):07d}"
        part = sorted(latest.glob("*.distcp"))[0]
        match params["mode"]:
            case "no metadata.json":
                (latest / "metadata.json").unlink()
            case "no .metadata":
                (latest / ".metadata").unlink()
            case ".metadata cut":
                os.truncate(latest / ".metadata", (latest / ".metadata").stat().st_size // 2)
            case "part cut":
                os.truncate(part, part.stat().st_size // 2)
            case "part missing":
                part.unlink()
        return max(i for i in iterations if i < int(latest.name[5:]))


class LatestDamaged(CheckpointDamaged):
    name, weight = "`latest` half-written", 8
    MODES = ("empty", "garbage", "names none")

    def damage(self, folder: Path, params: Mapping[str, Any]) -> int:
        tracker = folder / TRACKER
        latest = int(tracker.read_text())
        tracker.write_text({"empty": "", "garbage": "\0\0", "names none": str(latest + 1)}[params["mode"]])
        return latest


TRACKER = "latest_checkpointed_iteration.txt"


class RankKilledUnderTorchrun(RankKilled):
    name, group, weight = "rank killed, torchrun restarts", "launcher", 3

    def at_step(self, rank: Rank, fault: Any, step: int) -> None:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            super().at_step(rank, fault, step)


class AgentKilled(Kind):
    """One of two torchrun agents and its rank die; another agent joins. The job runner does it."""

    name, group, weight = "torchrun agent killed, another joins", "launcher", 2

    def draw(self, rng: random.Random, world: int) -> dict[str, Any]:
        return {"delay_s": rng.uniform(0, 0.3)}


class SolverDelayed(Kind):
    """Not a fault of a campaign: the run that shows what waiting costs (:mod:`faults.delayed`)."""

    name, weight = "solver delayed", 0

    def install(self, rank: Rank, fault: Any) -> None:
        from snip_megatron.runtime.controller import Controller

        adopt, after_step = Controller._adopt, Controller.after_step

        def adopt_and_end(controller: Any, step: int, *args: Any) -> None:
            adopt(controller, step, *args)
            os.kill(os.getpid(), signal.SIGTERM)

        def slowly(*args: Any, **kwargs: Any) -> None:
            time.sleep(fault.params["step_s"])
            after_step(*args, **kwargs)

        Controller._adopt, Controller.after_step = adopt_and_end, slowly  # type: ignore[method-assign]


KINDS: dict[str, Kind] = {
    kind.name: kind()
    for kind in (
        SidecarKilled, SidecarStopped, PastDeadline, OutOfMemory, OutOfAddressSpace, SolverException, Infeasible,
        Garbage, CannotStart, BrokenStatistics, SlowRank, DiskFull, DiskReadOnly, DirectoryGone, WandbFails, RankKilled,
        Preempted, KilledInSave, CheckpointDamaged, LatestDamaged, RankKilledUnderTorchrun, AgentKilled, SolverDelayed,
    )
}  # fmt: skip
