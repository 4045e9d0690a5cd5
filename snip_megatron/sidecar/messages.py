"""What crosses between rank 0 and the sidecar, and how: checked frames of pickles over two private pipes.

Only rank 0 and the process that it started itself hold an end of these pipes; nothing else is ever unpickled.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.statistics.table import StatisticsTable

if TYPE_CHECKING:
    from snip_megatron.sensitivity.request import SolveRequest
    from snip_megatron.solver.solution import Solution

FAILURES = ("died", "exception", "infeasible", "deadline", "oom")
MAX_FRAME_BYTES = 2**31
"""No job or answer comes near; a length beyond it is noise."""
_MAGIC = b"SNIP"
_HEADER = struct.Struct("<4sQQL")


@dataclass(frozen=True)
class SolveJob:
    """One update for the sidecar.

    Attributes:
        table: the update's statistics.
        request: what is asked; its ``version`` names the job in the result.
        hint: formats by item id to start from; None: none.
    """

    table: StatisticsTable
    request: SolveRequest
    hint: Mapping[str, Format] | None = None


@dataclass(frozen=True)
class SidecarFailure:
    """Why there is no map.

    Attributes:
        kind: ``died`` (the process ended), ``exception``, ``infeasible``, ``deadline`` (no answer in time) or ``oom``.
        message: one line. detail: a traceback, or empty.
    """

    kind: str
    message: str
    detail: str = ""


@dataclass(frozen=True)
class SidecarResult:
    """The outcome of one job: a map or a failure.

    Attributes:
        version: the request's. failure: None for a map.
        precision_map, solution: None on failure.
        problem_json: the problem that was solved; None where it failed before.
        scores: what stood behind the problem, as its builder gave it.
        timings: seconds of ``build`` and ``solve`` inside the sidecar.
        latency_s: from ``submit`` to the arrival of the answer, or to the failure's discovery.
    """

    version: int
    failure: SidecarFailure | None = None
    precision_map: PrecisionMap | None = None
    solution: Solution | None = None
    problem_json: str | None = None
    scores: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    latency_s: float = 0.0


@dataclass(frozen=True)
class Answer:
    """What the worker sends back: either ``solution`` or ``failure`` is set."""

    failure: SidecarFailure | None = None
    solution: Solution | None = None
    problem_json: str | None = None
    scores: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)


class BrokenFrameError(ValueError):
    """The stream holds something else than frames: nothing after it can be trusted."""


def write_frame(stream: BinaryIO, number: int, payload: bytes) -> None:
    """One message: its number, its length, its bytes and their checksum."""
    stream.write(_HEADER.pack(_MAGIC, number, len(payload), zlib.crc32(payload)))
    stream.write(payload)
    stream.flush()


def read_frame(stream: BinaryIO) -> tuple[int, bytes] | None:
    """The next message; None at the end of the stream, also in the middle of a message.

    Raises:
        BrokenFrameError: what arrived was not written by :func:`write_frame`, or changed on its way.
    """
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    magic, number, size, checksum = _HEADER.unpack(header)
    if magic != _MAGIC or size > MAX_FRAME_BYTES:
        raise BrokenFrameError("no frame begins here")
    payload = stream.read(size)
    if len(payload) < size:
        return None
    if zlib.crc32(payload) != checksum:
        raise BrokenFrameError("a frame's checksum differs")
    return number, payload
