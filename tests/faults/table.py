"""The table of faults: what breaks, and the moments of a run at which it does. Every cell is a case.

A fault is injected from outside: a function of the run is wrapped in each rank, and the fault happens when the run
calls it (:mod:`faults.trainer`). A case hits one rank once.
"""

import copy
import dataclasses
import errno
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from snip_megatron.runtime import storage
from snip_megatron.runtime.solving import SolveJob, solve_job

NAN = float("nan")


# -- NaN: what a call leaves behind or is given ------------------------------------------------------------------------
def _nan_in_sums(genuine: Callable[..., Any], recorder: Any, *args: Any) -> None:
    genuine(recorder, *args)
    name = next(iter(recorder.sums))
    recorder.sums[name] = recorder.sums[name] * NAN


def _nan_in_weight_divergence(genuine: Callable[..., Any], errors: Any, partial: Any, *args: Any) -> None:
    genuine(errors, partial, *args)
    partial.arrays["linear.g2"].flat[0] = NAN


def _inf_before_reduction(genuine: Callable[..., Any], table: Any, *args: Any) -> Any:
    table.arrays["boundary.h2"].flat[0] = float("inf")
    return genuine(table, *args)


def _nan_in_losses(genuine: Callable[..., Any], step: Any) -> Any:
    return [(loss * NAN, weight) for loss, weight in genuine(step)]


def _nan_in_job(genuine: Callable[..., Any], job: SolveJob) -> Any:
    job = dataclasses.replace(job, table=copy.deepcopy(job.table))
    job.table.arrays["linear.g2"].flat[0] = NAN
    return genuine(job)


def _nan_in_answer(genuine: Callable[..., Any], coordinator: Any, step: int, result: Any) -> Any:
    def spoilt(each: Any) -> Any:
        return dataclasses.replace(each, precision_map=dataclasses.replace(each.precision_map, objective=NAN))

    return genuine(coordinator, step, dataclasses.replace(result, candidates=tuple(map(spoilt, result.candidates))))


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
_COORDINATOR = "snip_megatron.runtime.coordinator:RankZeroCoordinator."
_CONTROLLER = "snip_megatron.runtime.controller:Controller."
MOMENTS = {
    "memory check": Moment(f"{_PROBE}ProbeRunner.check_memory"),
    "preparation": Moment(f"{_PROBE}Passes.prepare"),
    "forward and backward": Moment("snip_megatron.megatron.host:MegatronStep.schedule"),
    "recording": Moment(f"{_RECORDER}_record", nan=_nan_in_sums),
    "weight divergence": Moment(f"{_PROBE}Passes.add_linear", nan=_nan_in_weight_divergence),
    "noise": Moment(f"{_RECORDER}_compare", nan=_nan_in_sums),
    "reduction": Moment("snip_megatron.sensitivity.reduction:PartialTable.pack", nan=_inf_before_reduction),
    "submission": Moment(f"{_COORDINATOR}submit", rank=0),
    "solving": Moment(f"{_COORDINATOR}decision", rank=0, nan=_nan_in_job),
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


# -- faults: a function of the rank (or of the solver process) and the moment ------------------------------------------
def _exception(rank: Any, moment: str) -> None:
    raise OSError(errno.EIO, "injected") if moment == "record" else RuntimeError("injected")


def _out_of_memory(rank: Any, moment: str) -> None:
    import torch

    raise MemoryError("injected") if moment in ("record", "solving") else torch.OutOfMemoryError("injected")


def _break_disk(rank: Any, fail: Callable[[], None]) -> None:
    """Call ``fail`` before a file of the run directory is written, until the next update."""

    def broken(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            fail()
            return getattr(os, name)(*args)

        return call

    def mend() -> None:
        storage.os = os
        rank.write_records()  # the next fault finds no records that wait for another try

    storage.os = SimpleNamespace(**vars(os) | {name: broken(name) for name in ("open", "replace")})
    rank.undo.append(mend)


def _disk_full(rank: Any, moment: str) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _break_disk(rank, fail)


def _disk_stalled(rank: Any, moment: str) -> None:
    end, healed = time.monotonic() + rank.delay, threading.Event()
    _break_disk(rank, lambda: bool(healed.wait(max(0.0, end - time.monotonic()))) and None)
    rank.undo.append(healed.set)


def _garbage(rank: Any, moment: str) -> None:
    """Write bytes that are no answer into the pipe of the function ``solving.main``."""
    frames = (frame.f_locals for frame, _ in traceback.walk_stack(None))
    answers = next(names["answers"] for names in frames if "answers" in names)
    answers.write(b"\x80\x05garbage.")
    answers.flush()


FAULTS: dict[str, Callable[[Any, str], None]] = {
    "exception": _exception,
    "out of memory": _out_of_memory,
    "NaN": lambda rank, moment: None,  # of each moment its own
    "delay": lambda rank, moment: time.sleep(rank.delay),
    "solver killed": lambda rank, moment: rank.kill_solver(),
    "rank killed": lambda rank, moment: os.kill(os.getpid(), signal.SIGKILL),
    "disk full": _disk_full,
    "disk stalled": _disk_stalled,
    "SIGTERM": lambda rank, moment: os.kill(os.getpid(), signal.SIGTERM),
    "garbage": _garbage,
}
ON_RANK_ZERO = ("solver killed", "disk full", "disk stalled")
IN_SOLVER = ("exception", "out of memory", "NaN", "delay", "solver killed", "garbage")
"""Faults that hit the solver process while it solves, and not the rank that waits for it."""
FATAL = ("exception", "out of memory", "rank killed", "SIGTERM")
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
        nan = MOMENTS[self.moment].nan
        if self.fault == "NaN" and nan is not None:
            return nan(genuine, *args, **kwargs)
        FAULTS[self.fault](rank, self.moment)
        return genuine(*args, **kwargs)


def all_cases() -> list[Case]:
    """Return every case, neighbours at different moments."""
    cases = [Case(moment, fault) for fault in FAULTS for moment in MOMENTS]
    spoils = {"NaN": lambda moment: MOMENTS[moment].nan is not None, "garbage": lambda moment: moment == "solving"}
    return [case for case in cases if spoils.get(case.fault, bool)(case.moment)]


def ends_process(case: Case) -> bool:
    """Return whether a case ends its process, or needs a checkpoint near it."""
    always = case.fault in ("rank killed", "SIGTERM") or case.moment in ("start", "end", "checkpoint")
    by_error = case.moment in ("forward and backward", "rise", "decision", "adoption") and case.fault in FATAL
    return always or by_error


# -- in the solver process -----------------------------------------------------------------------------------------
class Solver(NamedTuple):
    """The solver process as a fault sees it."""

    delay: float

    def kill_solver(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def solve(job: SolveJob) -> Any:
    """The solver of a training with faults: the real answer, after the fault that the rank has added to the job."""
    case, delay = vars(job).get("fault", (None, 0.0))
    if case is not None and case.fault in IN_SOLVER:
        return case.inject(Solver(delay), solve_job, job)
    time.sleep(0.0 if case is None else 1.0)  # busy while a fault hits a rank
    return solve_job(job)
