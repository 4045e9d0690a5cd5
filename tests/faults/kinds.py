"""The kinds of faults of trainings that go on, and the list of all kinds."""

import errno
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from faults.disk import FaultyDisk
from faults.endings import ENDINGS
from faults.injection import Rank
from faults.kind import Kind, Lost

DEADLINE_S = 1.5
USUAL_DEADLINE_S = 120.0


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
        from snip_megatron.sensitivity.reduction import PartialTable

        genuine, done = PartialTable.reduce, []

        def reduce(table: PartialTable, *args: Any) -> None:
            if rank.step == fault.step and rank.number == fault.params["rank"] and not done:
                done.append(True)
                table.arrays[fault.params["column"]].flat[0] = float(fault.params["value"])
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


# -- all of them ---------------------------------------------------------------------------------------------------
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
        Garbage, CannotStart, BrokenStatistics, SlowRank, DiskFull, DiskReadOnly, DirectoryGone, WandbFails, *ENDINGS,
        SolverDelayed,
    )
}  # fmt: skip
