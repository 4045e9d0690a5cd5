"""The table of faults: how each is injected into a rank or into the solver process, and what must come of it.

A fault hits one update of a training, ``delay`` seconds after its step begins. One that ``ends`` the job hits a step
between two checkpoints, and the job is started again on the latest one.
"""

import errno
import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from snip_megatron.runtime.solving import SolveJob

DEADLINE_S = 1.5
DROPPED = "dropped, then adopted"
"""The outcome of an update that all ranks drop and try again after a lag."""


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        outcomes: Outcomes that are right: ``adopted``, :data:`DROPPED`, or the reason of ``solve_failed``. For a fault
            that ends the job: ``stopped`` (a checkpoint of the step was written) or ``killed``.
        in_rank: Called before the update's step on ``rank``, as ``in_rank(context, delay)``.
        rank: The rank that it hits. -1 is the last one.
        in_solver: Called by the solver process with the job, which it may replace.
        ends: Whether the fault ends the job.
    """

    outcomes: tuple[str, ...]
    in_rank: Callable[[Any, float], None] | None = None
    rank: int = 0
    in_solver: Callable[[SolveJob], SolveJob | None] | None = None
    ends: bool = False


# -- in the solver process -----------------------------------------------------------------------------------------
def _sleep(seconds: float, job: SolveJob) -> None:
    time.sleep(seconds)


def _raise(error: type[Exception], job: SolveJob) -> None:
    raise error("injected")


def _make_infeasible(job: SolveJob) -> SolveJob:
    return replace(job, request=replace(job.request, pins=(("*", "bf16"),)))


def _answer_garbage(job: SolveJob) -> None:
    frame = sys._getframe()
    while "answers" not in frame.f_locals:  # those of solving.main
        assert frame.f_back is not None
        frame = frame.f_back
    frame.f_locals["answers"].write(b"\x80\x05garbage.")
    frame.f_locals["answers"].flush()


# -- in a rank -----------------------------------------------------------------------------------------------------
def _signal_solver(number: int, rank: Any, delay: float) -> None:
    rank.later(delay, lambda: rank.sidecar.pid is None or os.kill(rank.sidecar.pid, number))


def _set_deadline(rank: Any, delay: float) -> None:
    usual, rank.sidecar._deadline = rank.sidecar._deadline, DEADLINE_S
    rank.undo.append(lambda: setattr(rank.sidecar, "_deadline", usual))


def _stop_solver(rank: Any, delay: float) -> None:
    _set_deadline(rank, delay)
    _signal_solver(signal.SIGSTOP, rank, delay)


def _refuse_processes(rank: Any, delay: float) -> None:
    genuine = subprocess.Popen
    refusals = [errno.EAGAIN, errno.ENOMEM]

    def popen(*args: Any, **kwargs: Any) -> Any:
        if refusals:
            error = refusals.pop()
            raise OSError(error, os.strerror(error))
        return genuine(*args, **kwargs)

    subprocess.Popen = popen  # type: ignore[misc,assignment]
    rank.undo.append(lambda: setattr(subprocess, "Popen", genuine))
    _signal_solver(signal.SIGKILL, rank, delay)


def _break_statistics(rank: Any, delay: float) -> None:
    from snip_megatron.sensitivity.reduction import PartialTable

    genuine = PartialTable.pack

    def pack(table: Any, *args: Any) -> Any:
        table.arrays["boundary.h2"].flat[0] = float("inf")
        PartialTable.pack = genuine  # type: ignore[method-assign]
        return genuine(table, *args)

    PartialTable.pack = pack  # type: ignore[method-assign]


def _break_recording(error: str, rank: Any, delay: float) -> None:
    """The next linear that an update records raises an exception of torch or Python, by name."""
    import torch

    from snip_megatron.sensitivity.recorder import LinearRecorder

    genuine = LinearRecorder._record

    def record(*args: Any) -> None:
        LinearRecorder._record = genuine  # type: ignore[method-assign]
        raise getattr(torch, error, RuntimeError)("injected")

    LinearRecorder._record = record  # type: ignore[method-assign]


def _break_disk(error: int, rank: Any, delay: float) -> None:
    """From now on nothing can be written into the run directory. A full disk takes half of the first line."""
    folder = str(rank.run.path.absolute()) + os.sep
    genuine = {name: getattr(os, name) for name in ("open", "write", "replace")}
    partial = [error == errno.ENOSPC]

    def fails(path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.path.abspath(path).startswith(folder)

    def open_file(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        if flags & (os.O_WRONLY | os.O_CREAT) and fails(path):
            raise OSError(error, os.strerror(error), str(path))
        return genuine["open"](path, flags, *args, **kwargs)

    def write(descriptor: int, data: bytes) -> Any:
        if not fails(os.readlink(f"/proc/self/fd/{descriptor}")):
            return genuine["write"](descriptor, data)
        if partial[0] and len(data) > 1:
            partial[0] = False
            return genuine["write"](descriptor, data[: len(data) // 2])
        raise OSError(error, os.strerror(error))

    def rename(source: Any, target: Any, **kwargs: Any) -> None:
        if fails(target):
            raise OSError(error, os.strerror(error), str(target))
        genuine["replace"](source, target, **kwargs)

    rank.run.writer.flush()
    os.open, os.write, os.replace = open_file, write, rename  # type: ignore[assignment]

    def heal() -> None:
        for name, function in genuine.items():
            setattr(os, name, function)
        rank.run.writer.flush()

    rank.undo.append(heal)


def _stall_disk(rank: Any, delay: float) -> None:
    """Let every access to the run directory wait until this fault ends. The training thread must make none."""
    folder = str(rank.run.path.absolute())
    genuine = {name: getattr(os, name) for name in ("stat", "write", "fsync")}
    training, reached, released = threading.current_thread(), threading.Event(), threading.Event()

    def wait(path: Any) -> None:
        if isinstance(path, int):
            path = os.path.realpath(f"/proc/self/fd/{path}")
        if released.is_set() or not isinstance(path, str | os.PathLike) or not os.path.abspath(path).startswith(folder):
            return
        if threading.current_thread() is training:
            raise AssertionError(f"training accesses {path}")
        reached.set()
        released.wait()

    def waiting(name: str) -> Any:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            wait(path)
            return genuine[name](path, *args, **kwargs)

        return call

    def heal() -> None:
        assert reached.is_set(), "nothing was written"
        released.set()
        for name, function in genuine.items():
            setattr(os, name, function)
        rank.run.writer.flush()

    sys.addaudithook(lambda event, args: wait(args[0]) if args and event.startswith(("open", "os.")) else None)
    for name in genuine:
        setattr(os, name, waiting(name))
    rank.undo.append(heal)


def _remove_directory(rank: Any, delay: float) -> None:
    """Remove the run directory. What it held is put aside for the judge."""
    rank.run.writer.flush()
    shutil.copytree(rank.run.path, rank.folder / f"removed{rank.step:04d}")
    shutil.rmtree(rank.run.path)


def _wait(rank: Any, delay: float) -> None:
    time.sleep(0.5 + delay)


def _signal_rank(number: int, rank: Any, delay: float) -> None:
    rank.later(delay, lambda: os.kill(os.getpid(), number))


def _kill_in_save(rank: Any, delay: float) -> None:
    from megatron.training import training

    genuine = training.save_checkpoint

    def save(*args: Any, **kwargs: Any) -> Any:
        _signal_rank(signal.SIGKILL, rank, delay / 10)
        genuine(*args, **kwargs)
        time.sleep(60)  # the save was over before the signal, which comes

    training.save_checkpoint = save


def _of(function: Callable[..., Any], *values: Any) -> Any:
    return functools.partial(function, *values)


FAULTS: dict[str, Fault] = {
    "solver killed": Fault(("died", "adopted"), _of(_signal_solver, signal.SIGKILL), in_solver=_of(_sleep, 1.0)),
    "SIGTERM to the solver": Fault(("adopted",), _of(_signal_solver, signal.SIGTERM)),
    "solver stopped": Fault(("deadline",), _stop_solver, in_solver=_of(_sleep, 3.0)),
    "solver past its deadline": Fault(("deadline",), _set_deadline, in_solver=_of(_sleep, 60.0)),
    "slow solver": Fault(("adopted",), in_solver=_of(_sleep, 2.0)),
    "solver out of memory": Fault(("oom",), in_solver=_of(_raise, MemoryError)),
    "exception in the solver": Fault(("exception",), in_solver=_of(_raise, ZeroDivisionError)),
    "no feasible map": Fault(("infeasible",), in_solver=_make_infeasible),
    "garbage from the solver": Fault(("died",), in_solver=_answer_garbage),
    "no process for the solver": Fault(("died", "adopted"), _refuse_processes),
    "Inf in a statistic": Fault((DROPPED,), _break_statistics, rank=-1),
    "exception in a probe": Fault((DROPPED,), _of(_break_recording, "RuntimeError"), rank=-1),
    "probe out of memory": Fault((DROPPED,), _of(_break_recording, "OutOfMemoryError")),
    "slow rank": Fault(("adopted",), _wait, rank=-1),
    "disk full": Fault(("adopted",), _of(_break_disk, errno.ENOSPC)),
    "disk read-only": Fault(("adopted",), _of(_break_disk, errno.EROFS)),
    "disk stalled": Fault(("adopted",), _stall_disk),
    "run directory removed": Fault(("adopted",), _remove_directory),
    "rank killed": Fault(("killed",), _of(_signal_rank, signal.SIGKILL), rank=-1, ends=True),
    "preemption": Fault(("stopped",), _of(_signal_rank, signal.SIGTERM), ends=True),
    "killed while saving": Fault(("killed",), _kill_in_save, ends=True),
}


def solve(job: SolveJob) -> Any:
    """The solver of a training with faults: the real answer, after the fault of this update."""
    import json

    from snip_megatron.runtime.solving import solve_job

    plan = json.loads((Path(os.environ["FAULTS"]) / "plan.json").read_text())
    fault = FAULTS.get(plan["faults"].get(str(job.table.step), ""))
    if fault is not None and fault.in_solver is not None:
        job = fault.in_solver(job) or job
    return solve_job(job)
