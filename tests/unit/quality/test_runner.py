"""The pool with real processes that are cheap: short Python programs."""

import re
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.quality.runner import Job, Outcome, Pool


def job(tmp: Path, name: str, code: str, **fields: object) -> Job:
    return Job(
        name,
        [sys.executable, "-S", "-c", code],
        tmp / "logs" / f"{name}.txt",
        **fields,
    )  # type: ignore[arg-type]


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


def test_a_run_whose_arguments_are_refused_is_tried_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes, left = run(Pool([None], {}), [job(tmp_path, "bad", "print('no such option'); raise SystemExit(2)")])
    assert (left, outcomes["bad"].error) == (0, "exit code 2: no such option")
    assert capsys.readouterr().err == ""
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["bad.txt"]


def test_exit_code_0_without_the_result_is_a_failure(tmp_path: Path) -> None:
    def check() -> None:
        raise ValueError("no validation")

    outcomes, _ = run(Pool([None], {}), [job(tmp_path, "empty", "pass", check=check)])
    assert outcomes["empty"].error == "no validation"


def test_the_deadline_ends_what_still_runs(tmp_path: Path) -> None:
    pool = Pool([None], {}, deadline=time.monotonic() + 0.5)
    outcomes, left = run(pool, [job(tmp_path, "endless", "import time; time.sleep(1000)")])
    assert (outcomes, left, pool.busy) == ({}, 1, 0)


def test_a_stop_ends_processes_and_their_helpers(tmp_path: Path) -> None:
    helper = tmp_path / "helper"
    code = (
        "import subprocess, sys, time;"
        f"h = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(1000)']);"
        f"open({str(helper)!r}, 'w').write(str(h.pid)); time.sleep(1000)"
    )
    pool = Pool([None], {})

    def stop_when_started() -> None:
        while not (helper.exists() and helper.read_text()):
            time.sleep(0.02)
        pool.stop()

    watcher = threading.Thread(target=stop_when_started)
    watcher.start()
    outcomes, left = run(pool, [job(tmp_path, "parent", code), job(tmp_path, "next", "pass")])
    watcher.join()
    assert (outcomes, left) == ({}, 2)
    pid = int(helper.read_text())
    for _ in range(100):
        if _ended(pid):
            break
        time.sleep(0.05)
    assert _ended(pid)


def _ended(pid: int) -> bool:
    """Gone, or only its entry is left until its parent's parent collects it."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True
