"""The sidecar's problem builder with faults: what to do at which update stands in ``$FAULTS``.

Runs in the solver process, as ``SidecarClient(build="faults.builder:build")``.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from snip_megatron.precision import Format
from snip_megatron.runtime.sidecar.messages import write_frame
from snip_megatron.sensitivity.problem import build_problem
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.solver import Problem
from snip_megatron.statistics.table import StatisticsTable

GARBAGE = ("noise", "length", "object", "torn")


def build(table: StatisticsTable, request: SolveRequest) -> tuple[Problem, Any]:
    """The real Problem, after what the plan says of this update."""
    folder = Path(os.environ["FAULTS"])
    for fault in json.loads((folder / "plan.json").read_text()):
        if fault["step"] == table.step and fault["kind"] in _ACTIONS:
            if fault["kind"] not in ("sidecar killed", "sidecar stopped"):  # these are noted by whom signals
                with (folder / "notes_builder.jsonl").open("a") as notes:
                    notes.write(json.dumps({"fault": fault["number"], "what": "injected"}) + "\n")
            problem = _ACTIONS[fault["kind"]](fault["params"], table, request)
            if problem is not None:
                return problem, {}
    return build_problem(table, request)


def _sleep(params: dict[str, Any], table: StatisticsTable, request: SolveRequest) -> None:
    time.sleep(params["build_s"])


def _raise_memory_error(params: dict[str, Any], table: StatisticsTable, request: SolveRequest) -> None:
    raise MemoryError


def _exhaust_memory(params: dict[str, Any], table: StatisticsTable, request: SolveRequest) -> None:
    """The kernel's own refusal, under a limit on the address space."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + params["room_mib"] * 2**20, before[1]))
    try:
        kept = []
        while True:
            kept.append(bytearray(16 * 2**20))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _raise(params: dict[str, Any], table: StatisticsTable, request: SolveRequest) -> None:
    raise {"RuntimeError": RuntimeError, "ZeroDivisionError": ZeroDivisionError, "KeyError": KeyError}[params["error"]](
        "injected"
    )


def _infeasible(params: dict[str, Any], table: StatisticsTable, request: SolveRequest) -> Problem:
    problem = build_problem(table, request)[0]
    items = tuple(
        replace(item, choices=tuple(c for c in item.choices if c.format is not Format.FP4)) for item in problem.items
    )
    return replace(problem, items=items)


def _garbage(params: dict[str, Any], table: StatisticsTable, request: SolveRequest) -> None:
    stream = next(f.f_locals["answers"] for f in _frames() if "answers" in f.f_locals)
    rng = random.Random(params["seed"])
    if params["mode"] == "object":
        write_frame(stream, 1, pickle.dumps({"solution": "no"}))
        return
    _write_noise(stream, params["mode"], rng)
    if params["mode"] == "torn":
        os._exit(3)


def _write_noise(stream: BinaryIO, mode: str, rng: random.Random) -> None:
    magic = b"" if mode == "noise" else b"SNIP" + (1).to_bytes(8, "little")
    size = {"noise": b"", "length": b"\xff" * 8, "torn": (4096).to_bytes(8, "little")}[mode]
    stream.write(magic + size + rng.randbytes(rng.randrange(64, 2048)))
    stream.flush()


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


_ACTIONS: dict[str, Any] = {
    "sidecar killed": _sleep,
    "sidecar stopped": _sleep,
    "past its deadline": _sleep,
    "solver delayed": _sleep,
    "out of memory (MemoryError)": _raise_memory_error,
    "out of memory (RLIMIT_AS)": _exhaust_memory,
    "solver exception": _raise,
    "infeasible": _infeasible,
    "garbage on the pipe": _garbage,
}
