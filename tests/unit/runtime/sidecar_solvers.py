"""Solvers that the worker imports: one for each way a job can go."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from snip_megatron.precision import Format
from snip_megatron.runtime.solving import Candidate, SidecarResult, SolveJob
from snip_megatron.solver import Choice, Item, Problem, solve

RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def plain(job: SolveJob) -> SidecarResult:
    """One item a linear; the loss of fp4 is ‖X‖² of the table."""
    items = tuple(
        Item(row.name, row.stage, 1.0, (Choice(Format.FP8, (0.0,), 0.0), Choice(Format.FP4, (float(x2),), 1.0)))
        for row, x2 in zip(job.table.linears, job.table.linear["x2"], strict=True)
    )
    problem = Problem(job.request.budget, items)
    scores = {"pid": float(os.getpid())}
    solved = solve(problem).to_precision_map(job.request.version)
    return SidecarResult(
        candidates=(Candidate(solved, job.request.policy, 0.0),), problem_json=problem.to_json(), scores=scores
    )


def by_policy(job: SolveJob) -> SidecarResult:
    """The request's policy says what to do."""
    what, _, argument = job.request.policy.partition(":")
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
    return plain(job)


def environment(job: SolveJob) -> SidecarResult:
    """Reports what the worker sees instead of scores."""
    variables = {name: os.environ[name] for name in RANK_NAMES if name in os.environ}
    heavy = [m for m in ("torch", "megatron", "__mp_main__") if m in sys.modules]
    scores: dict[str, Any] = {"rank": variables, "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"), "imported": heavy}
    return SidecarResult(candidates=plain(job).candidates, scores=scores)
