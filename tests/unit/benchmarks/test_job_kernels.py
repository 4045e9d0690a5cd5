"""The kinds of kernels of a step."""

import json
import time
from pathlib import Path

import torch

from benchmarks.jobs.kernels import FILE, gaps_between, host_of, recorded, summary


def test_the_time_between_two_operators_is_a_gap() -> None:
    def call() -> None:
        torch.ones(4)
        time.sleep(0.02)
        torch.ones(4)

    _, rows, gaps, host = recorded(call)
    assert rows
    assert 0.0 < host["busy"] < 0.5  # it sleeps
    assert max(ms for _, _, ms in gaps) > 15.0


def test_a_step_is_summed_by_kind(tmp_path: Path) -> None:
    assert summary(tmp_path) is None
    rows = [["nvjet_a", 3, 1.5], ["memset", 1, 0.25], ["tile_kernel", 2, 4.0], ["nvjet_b", 1, 0.5]]
    times = [(0.0, 500.0, "a"), (100.0, 200.0, "b"), (1500.0, 1600.0, "c"), (4600.0, 4700.0, "d"), (6700.0, 7e3, "c")]
    names = ["cudaLaunchKernel", "cuLaunchKernelEx", "cudaLaunchKernelExC", "cudaGraphLaunch", "cudaMemcpyAsync"]
    names += ["cudaStreamSynchronize", "cudaMemcpy", "cudaDeviceSynchronize", "cudaStreamWaitEvent"]
    host = host_of(names, 0.875, waits=1)
    (tmp_path / FILE).write_text(json.dumps([rows, [*gaps_between(times), ("a", "c", 1.0)], host]))
    found = summary(tmp_path)
    assert found is not None
    assert found["host"] == {"busy": 0.875, "synchronisations": 2, "launches": 4}
    assert found["ms"] == {"quantisation": 4.0, "gemm": 2.0, "other": 0.25}
    assert found["longest"][0] == {"kernel": "tile_kernel", "launches": 2, "ms": 4.0}
    assert found["idle"] == 7.0
    assert found["waits"][0] == {"after": "c", "before": "d", "times": 1, "ms": 3.0}
    assert found["waits"][1] == {"after": "a", "before": "c", "times": 2, "ms": 2.0}
