"""The benchmark of several GPUs runs on the CPU, so that its first call on GPUs works."""

import functools
import json
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from launch import cpu_environment
from warm_ranks import WarmRanks

from benchmarks.jobs import multi_gpu


def ranks(
    warm: WarmRanks,
    one_job: threading.Lock,
    count: int,
    arguments: Sequence[str],
    folder: Path,
    _: str | None,
) -> subprocess.CompletedProcess[str]:
    with one_job:
        return warm.run(count, arguments, tmp=folder, timeout=600)


@pytest.fixture
def run(warm: WarmRanks) -> Callable[..., subprocess.CompletedProcess[str]]:
    return functools.partial(ranks, warm, threading.Lock())


@pytest.mark.matrix
def test_tensor_parallel_against_one_rank_and_its_times(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cpu_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(multi_gpu, "has_transformer_engine", lambda: False)
    out = tmp_path / "result.json"
    command = ["--device", "cpu", "--gpus", "2", "--layouts", "tp2,cp2", "--out", str(out), "--commit", "abc"]
    assert multi_gpu.main([*command, "--work", str(tmp_path / "work")], run) == 0
    result = json.loads(out.read_text())
    row = result["equivalence"]["tp2"]
    assert row["same_tokens"]
    assert 0.0 < row["statistics_median"] < 4e-3  # bf16, and not one rank held against itself
    assert row["map_agreement"] > 0.8
    assert row["adopted"] == [[5], [5]]
    assert row["loss"] < 2e-2
    time = result["time"]["tp2"]
    assert set(time["ms_a_step"]) == {"without", "all-bf16 map", "75 % map"}
    assert time["75 % map over without"] == pytest.approx(time["ms_a_step"]["75 % map"] / time["ms_a_step"]["without"])
    assert all(len(ms) == multi_gpu.SIZES["tiny"].timed_steps for ms in time["steps_ms"].values())
    assert set(time["run_seconds"]) == {"time-tp2-without", "time-tp2-all-bf16", "time-tp2-75"}
    assert set(row["run_seconds"]) == {"to-saved", "equal-1", "equal-tp2"}
    assert set(time["update"]["passes_ms"]) == {"statistics", "reduction"}
    assert time["update"]["ms"] > sum(time["update"]["passes_ms"].values()) * 0.9  # of one update, not of both
    assert time["update"]["fp4_fraction"] == [pytest.approx(0.75, abs=0.02)]
    assert result["equivalence"]["cp2"] == {"skipped": "needs Transformer Engine's attention"}

    before = out.read_text()  # a second call finds nothing left to do
    assert multi_gpu.main([*command, "--work", str(tmp_path / "other")], run) == 0
    assert out.read_text() == before
