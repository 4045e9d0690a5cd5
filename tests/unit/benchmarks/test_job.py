"""The table of whole trainings: why one failed, what updates and kernels cost."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.jobs import turns as job_turns
from benchmarks.jobs.kernels import FILE, gaps_between, host_of, summary
from benchmarks.jobs.updates import accounts


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Traceback (most recent call last):\n  File\nRuntimeError: no such device\n", "RuntimeError: no such device"),
        ("[rank0]: RuntimeError: first\n[rank0]:[W722] a warning of the destructor\n", "RuntimeError: first"),
        ("pretrain_gpt: --x is wrong\n[W722] a warning of the destructor\n", "pretrain_gpt: --x is wrong"),
        ("Killed\n\n", "Killed"),
        ("", ""),
    ],
)
def test_the_line_that_says_why(text: str, line: str) -> None:
    assert job_turns.last_error(text).startswith(line)
    assert bool(line) == bool(job_turns.last_error(text))


def test_an_update_is_accounted_for() -> None:
    events: list[dict[str, Any]] = [
        {"step": 4, "event": "probe", "kind": "statistics", "wait_s": 0.2},
        {"step": 4, "event": "probe", "kind": "forward_noise", "wait_s": 0.1},
        {"step": 4, "event": "submit", "wait_s": 0.1},
        {"step": 6, "event": "adopt", "wait_s": 0.2},
        {"step": 6, "event": "recapture", "wait_s": 2.0},
        {"step": 6, "event": "metric", "wait_s": None},
        {"step": 12, "event": "submit", "wait_s": 0.1},
        {"step": 14, "event": "adopt", "wait_s": 0.0},
    ]
    ms = [9000.0, 100.0, 100.0, 100.0, 500.0, 100.0, 2300.0, 90.0, 80.0, 80.0, 80.0, 80.0]
    ms += [180.0, 80.0, 70.0, 70.0, 70.0, 70.0, 70.0]
    first, second = accounts(events, ms)
    assert (first["update_step"], first["adopt_step"], second["update_step"]) == (4, 6, 12)
    assert first["usual_ms"] == {"before": 100.0, "after": 80.0}
    assert first["longer_s"] == pytest.approx(0.4 + 2.22 + 0.01)
    assert first["from_adoption_s"] == pytest.approx(2.23)
    assert first["events_s"] == pytest.approx(2.6)
    assert first["events"] == pytest.approx({"probe": 0.3, "submit": 0.1, "adopt": 0.2, "recapture": 2.0})
    assert first["probe_s"] == {"statistics": 0.2, "forward_noise": 0.1}
    assert second["probe_s"] == {}
    assert second["longer_s"] == pytest.approx(0.1)


def test_a_step_is_summed_by_kind(tmp_path: Path) -> None:
    assert summary(tmp_path) is None
    rows = [["nvjet_a", 3, 1.5], ["memset", 1, 0.25], ["tile_kernel", 2, 4.0], ["nvjet_b", 1, 0.5]]
    times = [(0.0, 500.0, "a"), (100.0, 200.0, "b"), (1500.0, 1600.0, "c"), (4600.0, 4700.0, "d"), (6700.0, 7e3, "c")]
    names = ["cudaLaunchKernel", "cuLaunchKernelEx", "cudaLaunchKernelExC", "cudaGraphLaunch", "cudaMemcpyAsync"]
    names += ["cudaStreamSynchronize", "cudaMemcpy", "cudaDeviceSynchronize", "cudaStreamWaitEvent"]
    host = host_of(names, 0.875, waits=1)
    (tmp_path / FILE).write_text(json.dumps([rows, [*gaps_between(times), ("a", "c", 1.0)], host]))
    result = summary(tmp_path)
    assert result is not None
    assert result["host"] == {"busy": 0.875, "synchronisations": 2, "launches": 4}
    assert result["ms"] == {"quantisation": 4.0, "gemm": 2.0, "other": 0.25}
    assert result["longest"][0] == {"kernel": "tile_kernel", "launches": 2, "ms": 4.0}
    assert result["idle"] == 7.0
    assert result["waits"][0] == {"after": "c", "before": "d", "times": 1, "ms": 3.0}
    assert result["waits"][1] == {"after": "a", "before": "c", "times": 2, "ms": 2.0}
