"""Problem builders that the worker imports: one for each way a job can go."""

from __future__ import annotations

import io
import os
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from snip_megatron.precision import Format
from snip_megatron.runtime.sidecar.messages import write_frame
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.solver import Budget, Choice, Item, Problem
from snip_megatron.statistics.table import StatisticsTable

RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def plain(table: StatisticsTable, request: SolveRequest) -> tuple[Problem, dict[str, float]]:
    """One item a linear; the loss of fp4 is ‖X‖² of the table."""
    items = tuple(
        Item(row.name, row.stage, 1.0, (Choice(Format.FP8, 0.0, 0.0), Choice(Format.FP4, float(x2), 1.0)))
        for row, x2 in zip(table.linears, table.linear["x2"], strict=True)
    )
    return Problem(Budget(request.target, None), items), {"pid": float(os.getpid())}


def by_policy(table: StatisticsTable, request: SolveRequest) -> tuple[Problem, dict[str, float]]:
    """What to do stands in the request's policy."""
    what, _, argument = request.policy.partition(":")
    if what == "sleep":
        Path(argument).touch()
        time.sleep(600)
    elif what == "raise":
        raise RuntimeError("no such\nscore")
    elif what == "oom":
        raise MemoryError
    elif what == "exit":
        os._exit(7)
    elif what == "print":
        print("a library that prints", flush=True)
        os.system("echo and its child")
    elif what == "garbage":
        answers = next(f.f_locals["answers"] for f in _frames() if "answers" in f.f_locals)  # worker.main's
        answers.write(WRONG_BYTES[argument])
        answers.flush()
    return plain(table, request)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frame(payload: bytes) -> bytes:
    stream = io.BytesIO()
    write_frame(stream, 1, payload)
    return stream.getvalue()


WRONG_BYTES = {
    "noise": bytes(range(256)) * 8,
    "length": _frame(b"x" * 64).replace((64).to_bytes(8, "little"), (2**62).to_bytes(8, "little")),
    "bit": _frame(pickle.dumps(0)[:-1] + b"\0"),
    "flipped": _frame(b"x" * 64)[:-1] + b"y",
    "object": _frame(pickle.dumps({"solution": None})),
}


def environment(table: StatisticsTable, request: SolveRequest) -> tuple[Problem, dict[str, object]]:
    """Reports what the worker sees instead of scores."""
    import sys

    problem, _ = plain(table, request)
    seen = {name: os.environ[name] for name in RANK_NAMES if name in os.environ}
    heavy = [m for m in ("torch", "megatron", "__mp_main__") if m in sys.modules]
    return problem, {"rank": seen, "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"), "imported": heavy}
