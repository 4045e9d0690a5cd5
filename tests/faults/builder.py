"""The sidecar's solver with faults: what to do at which update stands in ``$FAULTS``.

Runs in the solver process, as ``SidecarClient(solve="faults.builder:solve")``.
"""

import json
import os
import pickle
import random
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from snip_megatron.runtime.solving import SidecarResult, SolveJob, solve_job


def solve(job: SolveJob) -> SidecarResult:
    """The real answer, after what the plan says of this update."""
    folder = Path(os.environ["FAULTS"])
    for fault in json.loads((folder / "plan.json").read_text()):
        if fault["step"] == job.table.step and fault["kind"] in _ACTIONS:
            if fault["kind"] not in ("sidecar killed", "sidecar stopped"):  # these are noted by whom signals
                with (folder / "notes_builder.jsonl").open("a") as notes:
                    notes.write(json.dumps({"fault": fault["number"], "what": "injected"}) + "\n")
            job = _ACTIONS[fault["kind"]](fault["params"], job) or job
    return solve_job(job)


def _sleep(params: dict[str, Any], job: SolveJob) -> None:
    time.sleep(params["build_s"])


def _raise_memory_error(params: dict[str, Any], job: SolveJob) -> None:
    raise MemoryError


def _exhaust_memory(params: dict[str, Any], job: SolveJob) -> None:
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


def _raise(params: dict[str, Any], job: SolveJob) -> None:
    raise {"RuntimeError": RuntimeError, "ZeroDivisionError": ZeroDivisionError, "KeyError": KeyError}[params["error"]](
        "injected"
    )


def _infeasible(params: dict[str, Any], job: SolveJob) -> SolveJob:
    return replace(job, request=replace(job.request, pins=(("*", "bf16"),)))


def _garbage(params: dict[str, Any], job: SolveJob) -> None:
    frame = sys._getframe()
    while "answers" not in frame.f_locals:  # worker.main's
        assert frame.f_back is not None
        frame = frame.f_back
    stream = frame.f_locals["answers"]
    rng = random.Random(params["seed"])
    whole = pickle.dumps({"solution": "no"})
    stream.write({"noise": rng.randbytes(rng.randrange(64, 2048)), "object": whole, "torn": whole[:-1]}[params["mode"]])
    stream.flush()
    if params["mode"] == "torn":
        os._exit(3)


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
