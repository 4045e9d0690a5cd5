"""The lock of a run directory: two jobs never write into one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import CONFIG, new_run, recorded_run

from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.run_data import read_metrics
from snip_megatron.runtime.run_directory import LOCK, SILENT_S, read_lock

WRITER = """
import sys
from snip_megatron.runtime.run_directory import RunDirectory
run = RunDirectory(sys.argv[1], {}, overwrite=True, resume_step=None)
run.metric(0, loss=1.0, grad_norm=1.0, fp4_fraction=0.0)
print("writes", flush=True)
sys.stdin.read()
"""


def another_job(path: Path) -> subprocess.Popen[str]:
    """Start a process that writes into ``path`` until its input ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], **pipes)
    assert process.stdout.readline() == "writes\n"
    return process


def of_another_host(path: Path, age: float, **fields: object) -> None:
    """Leave the record of a job on another host that wrote for the last time ``age`` seconds ago."""
    recorded_run(path)
    lock = {"schema": "snip.lock/1", "host": "node-9", "process": 4711, "born": 1, "job": "7", **fields}
    (path / LOCK).write_text(json.dumps(lock))
    for file in (path / LOCK, path / "events.jsonl", path / "metrics.jsonl"):
        at = file.stat().st_mtime - age
        os.utime(file, (at, at))


def test_a_directory_in_use_is_refused_whatever_is_asked_for(tmp_path):
    with another_job(tmp_path) as process:
        before = sorted((p, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file())
        for fields in ({}, {"overwrite": True}, {"resume_step": 1, "config": {}}):
            with pytest.raises(SnipError, match=f"belongs to process {process.pid} .*still runs; end it or choose"):
                new_run(tmp_path, **fields)
        assert sorted((p, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file()) == before
        process.stdin.close()
        assert process.wait(60) == 0
    assert not (tmp_path / LOCK).exists()  # it ended without closing its record
    new_run(tmp_path, overwrite=True).close()


def test_a_killed_job_keeps_nobody_out(tmp_path):
    with another_job(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        assert os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is dead, but its parent has not asked yet
        assert read_lock(tmp_path).has_ended
        with new_run(tmp_path, overwrite=True):
            assert read_lock(tmp_path).process == os.getpid()
    assert read_metrics(tmp_path) == []
    assert not (tmp_path / LOCK).exists()


def test_a_job_of_another_host_that_may_live_is_refused(tmp_path, monkeypatch):
    of_another_host(tmp_path, 10.0)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    with pytest.raises(SnipError, match=r"process 4711 of job 7 on node-9, whose last write is 1\d s old; .*remove "):
        new_run(tmp_path, CONFIG, overwrite=True)


@pytest.mark.parametrize(("age", "own_job"), [(SILENT_S + 60.0, "8"), (10.0, "7")])
def test_a_silent_job_and_an_earlier_start_of_the_same_one_give_way(tmp_path, monkeypatch, age, own_job):
    of_another_host(tmp_path, age)
    monkeypatch.setenv("SLURM_JOB_ID", own_job)
    new_run(tmp_path, CONFIG, resume_step=6).close()
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("text", ["{", '{"host": "a", "process": "x", "born": 0, "job": 1}'])
def test_a_torn_lock_is_none(tmp_path, text):
    recorded_run(tmp_path)
    (tmp_path / LOCK).write_text(text)
    new_run(tmp_path, resume_step=6).close()
