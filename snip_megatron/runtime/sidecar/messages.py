"""The messages between rank 0 and the sidecar: pickles in frames with a checksum, over two private pipes.

Only rank 0 and the process that it started hold the ends of these pipes. Nothing else is ever unpickled.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

from snip_megatron.phases import PrecisionPlan
from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.statistics.table import StatisticsTable

if TYPE_CHECKING:
    from snip_megatron.sensitivity.request import SolveRequest
    from snip_megatron.solver.solution import Solution

_MAX_FRAME_BYTES = 2**31  # jobs and answers are far smaller; a larger length is not one of a frame
_MAGIC = b"SNIP"
_HEADER = struct.Struct("<4sQQL")


@dataclass(frozen=True)
class SolveJob:
    """One update for the sidecar.

    Attributes:
        table: the update's statistics.
        request: the solve request. The result has the same ``version``.
        hint: formats by item id from which the solver starts; None without a hint.
    """

    table: StatisticsTable
    request: SolveRequest
    hint: Mapping[str, Format] | None = None


@dataclass(frozen=True)
class SidecarFailure:
    """The reason for which a job has no map.

    Attributes:
        kind: ``died`` (the process ended), ``exception``, ``infeasible``, ``deadline`` (no answer in time) or ``oom``.
        message: one line.
        detail: a traceback, or empty.
    """

    kind: str
    message: str
    detail: str = ""


@dataclass(frozen=True)
class OutOfReach:
    """A budget over the run that past steps have made impossible.

    Attributes:
        kind: the kind of the budget: ``target``, ``speedup`` or ``loss``.
        wanted: the value of the budget.
        reachable: the value for which the plan was solved instead.
        why: the solver's reason.
    """

    kind: str
    wanted: float
    reachable: float
    why: str

    def __str__(self) -> str:
        name = "fp4" if self.kind == "target" else self.kind
        return (
            f"after what has been spent, the budget {name}={self.wanted:g} over the run is out of reach ({self.why});"
            f" planned for {name}={self.reachable:g} instead; for more, train longer (--train-iters), pin less or let"
            " more change in the schedule's phases"
        )


@dataclass(frozen=True)
class SidecarResult:
    """The outcome of one job. ``solution``, ``plan`` or ``failure`` is set.

    Attributes:
        version: the version of the request. The client sets it.
        failure: why there is no map; None if there is one.
        solution: the solution of a request without phases.
        plan: the plan of a request with phases.
        out_of_reach: why ``plan`` has another budget than the request; None if it has that one.
        problem_json: the Problem; None if the job failed before it was built.
        scores: the scores from which the Problem was built, as the builder returned them.
        timings: seconds of ``build`` and ``solve`` inside the sidecar.
        latency_s: seconds from ``submit`` to the arrival of the answer, or to the detection of the failure. The client
            sets it.
    """

    version: int = 0
    failure: SidecarFailure | None = None
    solution: Solution | None = None
    plan: PrecisionPlan | None = None
    out_of_reach: OutOfReach | None = None
    problem_json: str | None = None
    scores: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    latency_s: float = 0.0

    @property
    def precision_map(self) -> PrecisionMap | None:
        """The map, of a plan its first; None after a failure."""
        if self.plan is not None:
            return self.plan.phases[0].precision_map
        return None if self.solution is None else self.solution.to_precision_map(self.version)


class BrokenFrameError(ValueError):
    """The stream holds something other than frames. Its further content is not usable."""


def write_frame(stream: BinaryIO, number: int, payload: bytes) -> None:
    """Write one message: its number, its length, a checksum and its bytes."""
    stream.write(_HEADER.pack(_MAGIC, number, len(payload), zlib.crc32(payload)))
    stream.write(payload)
    stream.flush()


def read_frame(stream: BinaryIO) -> tuple[int, bytes] | None:
    """Read the next message. Returns None at the end of the stream, even within a message.

    Raises:
        BrokenFrameError: :func:`write_frame` did not write the content, or it was changed.
    """
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    magic, number, size, checksum = _HEADER.unpack(header)
    if magic != _MAGIC or size > _MAX_FRAME_BYTES:
        raise BrokenFrameError("no frame begins here")
    payload = stream.read(size)
    if len(payload) < size:
        return None
    if zlib.crc32(payload) != checksum:
        raise BrokenFrameError("a frame's checksum differs")
    return number, payload
