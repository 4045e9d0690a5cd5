"""The table of faults: what breaks, and the moments of a run at which it does. Every cell is a case.

A fault is injected from outside: a function of the run is wrapped in each rank, and the fault happens when the run
calls it (:mod:`faults.trainer`). A case hits one rank once.
"""

import copy
import dataclasses
import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from snip_megatron.runtime.solving import SolveJob


# -- NaN: what a call leaves behind or is given ------------------------------------------------------------------------
def _nan_in_sums(genuine: Callable[..., Any], recorder: Any, *args: Any) -> Any:
    genuine(recorder, *args)
    name = next(iter(recorder.sums))
    recorder.sums[name] = recorder.sums[name] * float("nan")


def _nan_in_weight_divergence(genuine: Callable[..., Any], errors: Any, partial: Any, *args: Any) -> Any:
    genuine(errors, partial, *args)
    partial.arrays["linear.g2"].flat[0] = float("nan")


def _inf_before_reduction(genuine: Callable[..., Any], table: Any, *args: Any) -> Any:
    table.arrays["boundary.h2"].flat[0] = float("inf")
    return genuine(table, *args)


def _nan_in_losses(genuine: Callable[..., Any], step: Any) -> Any:
    return [(loss * float("nan"), weight) for loss, weight in genuine(step)]


def _nan_in_answer(genuine: Callable[..., Any], coordinator: Any, step: int, result: Any) -> Any:
    spoilt = tuple(
        dataclasses.replace(each, precision_map=dataclasses.replace(each.precision_map, objective=float("nan")))
        for each in result.candidates
    )
    return genuine(coordinator, step, dataclasses.replace(result, candidates=spoilt))


@dataclass(frozen=True)
class Moment:
    """A moment of a run.

    Attributes:
        target: The function that the run calls then, as ``module:Class.function``.
        rank: The rank that a fault hits. -1 is the last one.
        nan: Calls the function, where the fault is NaN. None if there is nothing to spoil.
        host: Whether the function is Megatron's, so that an exception of it ends a job with SNIP as without.
    """

    target: str
    rank: int = -1
    nan: Callable[..., Any] | None = None
    host: bool = False


_PROBE, _RECORDER = "snip_megatron.runtime.probe:", "snip_megatron.sensitivity.recorder:LinearRecorder."
_COORDINATOR, _CONTROLLER = (
    "snip_megatron.runtime.coordinator:RankZeroCoordinator.", "snip_megatron.runtime.controller:Controller.",
)  # fmt: skip
MOMENTS = {
    "memory check": Moment(f"{_PROBE}ProbeRunner.check_memory"),
    "preparation": Moment(f"{_PROBE}ProbeRunner.prepare"),
    "forward and backward": Moment("snip_megatron.megatron.host:MegatronStep.schedule"),
    "recording": Moment(f"{_RECORDER}_record", nan=_nan_in_sums),
    "weight divergence": Moment(f"{_PROBE}UpdateErrors.add_linear", nan=_nan_in_weight_divergence),
    "noise": Moment(f"{_RECORDER}_compare", nan=_nan_in_sums),
    "reduction": Moment("snip_megatron.sensitivity.reduction:PartialTable.pack", nan=_inf_before_reduction),
    "submission": Moment(f"{_COORDINATOR}submit", rank=0),
    "solving": Moment(f"{_COORDINATOR}decision", rank=0),
    "answer": Moment(f"{_COORDINATOR}_receive", rank=0, nan=_nan_in_answer),
    "rise": Moment("snip_megatron.megatron.host:MegatronStep.losses", nan=_nan_in_losses),
    "decision": Moment(f"{_CONTROLLER}_decide"),
    "adoption": Moment("snip_megatron.layers.registry:LinearRegistry.adopt"),
    "checkpoint": Moment("megatron.training.training:save_checkpoint", host=True),
    "record": Moment("snip_megatron.runtime.storage:Writer._append", rank=0),
    "start": Moment(f"{_CONTROLLER}_start"),
    "end": Moment(f"{_CONTROLLER}close"),
}
"""All moments but the capture of CUDA graphs, which needs a GPU."""


# -- faults --------------------------------------------------------------------------------------------------------
def _error(kind: str, moment: str) -> Exception:
    import torch

    if moment == "record":  # in the thread that writes files
        return MemoryError("injected") if kind == "out of memory" else OSError(errno.EIO, "injected")
    return torch.OutOfMemoryError("injected") if kind == "out of memory" else RuntimeError("injected")


def _break_disk(rank: Any, fails: Callable[[str], None]) -> None:
    """Call ``fails`` before anything is written into the run directory, until the next update."""
    folder, genuine = (
        str(rank.folder / "run") + os.sep,
        {name: getattr(os, name) for name in ("open", "write", "replace")},
    )

    def check(path: Any) -> None:
        if isinstance(path, str | os.PathLike) and os.path.abspath(path).startswith(folder):
            fails(str(path))

    def open_file(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            check(path)
        return genuine["open"](path, flags, *args, **kwargs)

    def write(descriptor: int, data: bytes) -> Any:
        check(os.readlink(f"/proc/self/fd/{descriptor}"))
        return genuine["write"](descriptor, data)

    def rename(source: Any, target: Any, **kwargs: Any) -> None:
        check(target)
        genuine["replace"](source, target, **kwargs)

    os.open, os.write, os.replace = open_file, write, rename  # type: ignore[assignment]
    rank.undo.append(rank.write_records)  # called last: the next fault finds no records that wait for another try
    rank.undo.append(lambda: [setattr(os, name, function) for name, function in genuine.items()])


def _disk_full(rank: Any) -> None:
    def fails(path: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    _break_disk(rank, fails)


def _disk_stalled(rank: Any) -> None:
    end, healed = time.monotonic() + rank.delay, threading.Event()
    _break_disk(rank, lambda path: bool(healed.wait(max(0.0, end - time.monotonic()))) and None)
    rank.undo.append(healed.set)


ON_RANK: dict[str, Callable[[Any], None]] = {
    "delay": lambda rank: time.sleep(rank.delay),
    "solver killed": lambda rank: rank.kill_solver(),
    "rank killed": lambda rank: os.kill(os.getpid(), signal.SIGKILL),
    "disk full": _disk_full,
    "disk stalled": _disk_stalled,
    "SIGTERM": lambda rank: os.kill(os.getpid(), signal.SIGTERM),
}
"""Faults that happen before the function of the moment is called."""
ON_RANK_ZERO = ("solver killed", "disk full", "disk stalled")
IN_SOLVER = ("exception", "out of memory", "NaN", "delay", "solver killed", "garbage")
"""Faults that the solver process injects into itself while it solves."""
FAULTS = ("exception", "out of memory", "NaN", *ON_RANK, "garbage")
ENDS = ("exception", "out of memory", "rank killed", "SIGTERM")
"""Faults that may end a job."""


class Case(NamedTuple):
    """A cell of the table."""

    moment: str
    fault: str

    def rank(self, world: int) -> int:
        """Return the rank that the fault hits."""
        return 0 if self.fault in ON_RANK_ZERO else MOMENTS[self.moment].rank % world

    def inject(self, rank: Any, genuine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Break the call of the moment, or what is around it."""
        if self.fault in ("exception", "out of memory"):
            raise _error(self.fault, self.moment)
        nan = MOMENTS[self.moment].nan
        if self.fault == "NaN" and nan is not None:
            return nan(genuine, *args, **kwargs)
        ON_RANK[self.fault](rank)
        return genuine(*args, **kwargs)


def all_cases() -> list[Case]:
    """Return every case, neighbours at different moments."""
    cases = [Case(moment, fault) for fault in FAULTS for moment in MOMENTS]
    spoils = {"NaN": lambda moment: MOMENTS[moment].nan is not None, "garbage": lambda moment: False}
    return [case for case in cases if case.moment == "solving" or spoils.get(case.fault, bool)(case.moment)]


def ends(case: Case) -> bool:
    """Return whether a case ends its process, or needs a checkpoint near it."""
    always = case.fault in ("rank killed", "SIGTERM") or case.moment in ("start", "end", "checkpoint")
    by_error = case.moment in ("forward and backward", "rise", "decision", "adoption") and case.fault in ENDS
    return always or by_error


def _answer_garbage() -> None:
    frame = sys._getframe()
    while "answers" not in frame.f_locals:  # those of solving.main
        assert frame.f_back is not None
        frame = frame.f_back
    frame.f_locals["answers"].write(b"\x80\x05garbage.")
    frame.f_locals["answers"].flush()


# -- in the solver process -----------------------------------------------------------------------------------------
def solve(job: SolveJob) -> Any:
    """The solver of a training with faults: the real answer, after the fault of this update."""
    from snip_megatron.runtime.solving import solve_job

    folder = Path(os.environ["FAULTS"])
    current, injected = json.loads((folder / "current.json").read_text()), folder / "injectedsolver.jsonl"
    done = [json.loads(line)["index"] for line in injected.open()] if injected.exists() else []
    if current["moment"] != "solving" or current["index"] in done:
        return solve_job(job)
    if current["fault"] not in IN_SOLVER:  # one that hits a rank, while this process is busy
        time.sleep(1.0)
        return solve_job(job)
    with injected.open("a") as file:
        file.write(json.dumps({"index": current["index"], "step": job.table.step, "time": time.time()}) + "\n")
    if current["fault"] == "delay":
        time.sleep(current["delay"])
    elif current["fault"] == "solver killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif current["fault"] == "garbage":
        _answer_garbage()
    elif current["fault"] == "NaN":
        job = dataclasses.replace(job, table=copy.deepcopy(job.table))
        job.table.arrays["linear.g2"].flat[0] = float("nan")
    else:
        raise MemoryError("injected") if current["fault"] == "out of memory" else ZeroDivisionError("injected")
    return solve_job(job)
