"""Which runs of the benchmark of several GPUs go side by side, and on which GPUs. The runs are made up here."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.jobs import multi_gpu, multi_gpu_runs

Answer = Callable[[str], int]
"""Name of a run → its exit code."""


class Host:
    """Takes the place of torchrun; knows what ran, in which order, and what ran on a GPU that was taken."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self._lock = answer, threading.Lock()
        self.started: list[str] = []
        self.gpus: dict[str, str | None] = {}
        self.ranks: dict[str, int] = {}
        self.running: set[str] = set()
        self.most = 0
        self.clashes: list[tuple[str, str]] = []

    def run(
        self, ranks: int, _arguments: Sequence[str], folder: Path, gpus: str | None
    ) -> subprocess.CompletedProcess[str]:
        name, mine = folder.name, set((gpus or "").split(",")) - {""}
        with self._lock:
            self.clashes += [(name, other) for other in self.running if mine & set((self.gpus[other] or "").split(","))]
            self.started.append(name)
            self.gpus[name], self.ranks[name] = gpus, ranks
            self.running.add(name)
            self.most = max(self.most, len(self.running))
        code = self._answer(name)
        with self._lock:
            self.running.remove(name)
        printed = "".join(f"elapsed time per iteration (ms): {ms}.0\n" for ms in range(1, 25))
        return subprocess.CompletedProcess([], code, printed, f"RuntimeError: {name} broke\n" if code else "")


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,GPU-7")
    monkeypatch.setattr(multi_gpu, "compared", lambda one, other, _: {"runs": [one.parent.name, other.parent.name]})
    monkeypatch.setattr(multi_gpu, "update_cost", lambda run, ms: {"of": run.parent.name})


def rows(tmp_path: Path, host: Host, code: int, *arguments: str, part: str) -> dict[str, Any]:
    out = tmp_path / "result.json"
    command = ["--gpus", "4", "--part", part, "--out", str(out), "--work", str(tmp_path), *arguments]
    assert multi_gpu.main(command, host.run) == code
    found: dict[str, Any] = json.loads(out.read_text())[part]
    return found


def pause(_: str) -> int:
    """Long enough for a neighbour to start, were there one."""
    time.sleep(0.05)
    return 0


def test_timed_layouts_side_by_side_on_gpus_of_their_own(tmp_path: Path) -> None:
    """tp2 beside pp2, whose runs meet one by one; four GPUs alone; dp2, for which no place was left, alone."""
    together = threading.Barrier(2)

    def answer(name: str) -> int:
        if name.startswith(("time-tp2-pp2", "time-dp2")):
            return pause(name)
        together.wait(timeout=20)
        return 0

    host = Host(answer)
    found = rows(tmp_path, host, 0, "--layouts", "tp2,tp2-pp2,pp2,dp2", part="time")
    assert not host.clashes
    assert host.most == 2
    where = {name: (row["gpus"], row["beside"]) for name, row in found.items()}
    assert where == {
        "tp2": ("4,5", ["pp2"]),
        "pp2": ("6,GPU-7", ["tp2"]),
        "tp2-pp2": ("4,5,6,GPU-7", []),
        "dp2": ("4,5", []),
    }
    for name, row in found.items():
        runs = [f"time-{name}-{kind}" for kind in ("without", "all-bf16", "75")]
        assert [run for run in host.started if run in runs] == runs
        assert {host.gpus[run] for run in runs} == {row["gpus"]}
        assert list(row["run_seconds"]) == runs
        assert row["ms_a_step"]["without"] == 21.0  # of the steps 18 to 24
        assert row["update"] == {"of": f"time-{name}"}


def test_a_timed_run_that_fails_leaves_its_neighbour_alone(tmp_path: Path) -> None:
    host = Host(lambda name: int(name == "time-pp2-all-bf16"))
    found = rows(tmp_path, host, 1, "--layouts", "tp2,pp2", part="time")
    assert "ms_a_step" in found["tp2"]
    assert "time-pp2-all-bf16 broke" in found["pp2"]["failed"]
    assert list(found["pp2"]["run_seconds"]) == ["time-pp2-without", "time-pp2-all-bf16"]
    assert found["pp2"]["beside"] == ["tp2"]

    again = Host(lambda _: 0)  # only what failed, with a GPU to itself
    found = rows(tmp_path, again, 0, "--layouts", "tp2,pp2", part="time")
    assert again.started == [f"time-pp2-{kind}" for kind in ("without", "all-bf16", "75")]
    assert (found["pp2"]["gpus"], found["pp2"]["beside"]) == ("4,5", [])


def test_a_file_keeps_rows_of_one_commit(tmp_path: Path) -> None:
    host = Host(lambda _: 0)
    rows(tmp_path, host, 0, "--layouts", "tp2", "--commit", "abc", part="time")
    rows(tmp_path, host, 0, "--layouts", "pp2", "--commit", "abc", part="time")
    assert json.loads((tmp_path / "result.json").read_text())["layouts"] == ["tp2", "pp2"]
    with pytest.raises(SystemExit, match="its rows are of commit abc, not def: choose another file"):
        rows(tmp_path, host, 0, "--layouts", "pp2", "--commit", "def", part="time")


def test_gpus_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert multi_gpu_runs.visible_gpus(2) == ["4", "5"]
    with pytest.raises(SystemExit, match=r"--gpus 5, but CUDA_VISIBLE_DEVICES=4,5,6,GPU-7 names 4"):
        multi_gpu.main(["--gpus", "5"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert multi_gpu_runs.visible_gpus(3) == ["0", "1", "2"]
