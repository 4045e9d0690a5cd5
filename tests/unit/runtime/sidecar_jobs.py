"""Jobs for the sidecar, and waiting for what becomes of them."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from sensitivity.synthetic import make_table

from snip_megatron.precision.budget import Budget
from snip_megatron.runtime.solving import SidecarClient, SidecarResult, SolveJob
from snip_megatron.sensitivity.request import SolveRequest

PATIENCE = 300.0  # a process that imports the solver has taken a minute on a busy machine


def make_job(version: int = 1, *, target: float = 0.5, policy: str = "snip") -> SolveJob:
    table = make_table(layers=2)
    size = np.arange(1.0, len(table.linears) + 1)
    table = replace(table, arrays={**table.arrays, "linear.x2": size})
    return SolveJob(
        table, SolveRequest(policy=policy, version=version, budget=Budget("fp4", target), stage_tolerance=None)
    )


def wait_until(condition: Callable[[], object]) -> None:
    """Poll for a condition; the limit only ends a test that has failed."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def next_result(client: SidecarClient) -> SidecarResult:
    results: list[SidecarResult] = []

    def polled() -> bool:
        result = client.poll()
        if result is not None:
            results.append(result)
        return bool(results)

    wait_until(polled)
    return results[0]


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def environment_of_a_rank() -> dict[str, str]:
    """Variables that torchrun sets, beside our own."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "TORCHELASTIC_RUN_ID": "none"}
    return {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", **address}
