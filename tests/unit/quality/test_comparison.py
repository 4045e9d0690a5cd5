"""Comparisons: their pool of processes, and when they are complete."""

import re
import sys
import time
from pathlib import Path

import pytest

from benchmarks.quality.comparison import Comparison, make_part
from benchmarks.quality.experiment import load_experiment
from benchmarks.quality.models import Data
from benchmarks.quality.results import Results, record
from benchmarks.quality.runner import Job, Outcome, Pool

NANO = Path(__file__).resolve().parents[3] / "benchmarks/quality/experiments" / "nano.json"


def test_a_comparison_is_complete_with_all_runs_from_one_checkpoint(tmp_path: Path) -> None:
    """Those from different warm weights are not compared with each other."""
    data, experiment = Data(tmp_path, "bytes", "0" * 64, 1000, 100), load_experiment(NANO)
    part = make_part(experiment, data, Results(tmp_path / "nano.json", {}, {}, warm={"a": {}, "b": {}}), tmp_path)

    def left(**done: tuple[int, ...]) -> int:
        ran = [(part.runs[i].identity(data, sha), part.runs[i]) for sha, runs in done.items() for i in runs]
        part.results.runs = {identity: record(run, identity, status="done") for identity, run in ran}
        for entry in part.results.runs.values():
            entry["seconds"] = 1.0
        return Comparison([part], Pool([None], {}, deadline=0.0), tmp_path, {}).run()

    assert left() == 3
    assert left(a=(0, 1)) == 1
    assert left(a=(0, 1), b=(2,)) == 1
    assert left(a=(0, 1, 2)) == left(a=(0, 1, 2), b=(2,)) == 0


def job(tmp: Path, name: str, code: str, **fields: object) -> Job:
    return Job(name, [sys.executable, "-S", "-c", code], tmp / "logs" / f"{name}.txt", **fields)  # type: ignore[arg-type]


def run(pool: Pool, jobs: list[Job]) -> tuple[dict[str, Outcome], int]:
    outcomes: dict[str, Outcome] = {}
    pool.add(jobs)
    left = pool.run(lambda outcome: outcomes.update({outcome.job.name: outcome}))
    return outcomes, left


def test_processes_run_side_by_side_on_the_devices_of_their_slots(tmp_path: Path) -> None:
    """Each waits for all the others: they end only if all four run at once."""
    code = f"""
import os, time
open({str(tmp_path)!r} + "/" + str(os.getpid()) + ".here", "w").write(os.environ["CUDA_VISIBLE_DEVICES"])
while sum(n.endswith(".here") for n in os.listdir({str(tmp_path)!r})) < 4: time.sleep(.02)
"""
    outcomes, left = run(Pool(["0", "1", "0", "1"], {}), [job(tmp_path, f"j{i}", code) for i in range(4)])
    assert left == 0
    assert [o.error for o in outcomes.values()] == [None] * 4
    assert sorted(path.read_text() for path in tmp_path.glob("*.here")) == ["0", "0", "1", "1"]


def test_a_failed_run_is_tried_twice_and_stops_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = f"import sys; open({str(tmp_path / 'tries')!r}, 'a').write('x'); print('noise'); sys.exit('what went wrong')"
    unbuffered = {"PYTHONUNBUFFERED": "1"}  # as a comparison sets it: the error is the last line of the log
    outcomes, left = run(Pool([None], unbuffered), [job(tmp_path, "bad", bad), job(tmp_path, "good", "pass")])
    assert left == 0
    assert list(outcomes) == ["good", "bad"]  # the second try is behind the others
    assert outcomes["good"].error is None
    assert outcomes["bad"].error == "exit code 1: what went wrong"
    assert (tmp_path / "tries").read_text() == "xx"
    assert "what went wrong" in (tmp_path / "logs" / "bad.txt.1").read_text()
    assert re.fullmatch(
        r"bad failed after \d+ s and is tried again: exit code 1: what went wrong\n", capsys.readouterr().err
    )


def test_the_deadline_ends_what_still_runs(tmp_path: Path) -> None:
    pool = Pool([None], {}, deadline=time.monotonic() + 0.5)
    outcomes, left = run(pool, [job(tmp_path, "endless", "import time; time.sleep(1000)")])
    assert (outcomes, left, pool.busy) == ({}, 1, 0)
