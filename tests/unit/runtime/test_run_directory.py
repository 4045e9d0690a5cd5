"""The run directory: formats and restarts."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_runs import CONFIG, FC1, content, new_run, recorded_run, strict_json

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.phases import PlanPhase, PrecisionPlan
from snip_megatron.runtime.run_data import (
    load_run,
    read_config,
    read_events,
    read_maps,
    read_metrics,
    read_plans,
    read_scores,
)
from snip_megatron.runtime.run_directory import LOCK, read_lock


# -- formats -------------------------------------------------------------------------------------------------------
def test_lines_and_files_hold_what_was_written(tmp_path):
    precision_map = PrecisionMap.uniform([FC1], Format.FP4, version=3, status="optimal", achieved=0.75)
    plan = PrecisionPlan((PlanPhase(8, precision_map),), 20, version=3)
    scores = {f"{FC1}:fprop": {"fp4": {"delta_loss": 1e-3, "delta_weight": 2e-3, "q": 3e-3}}}
    with new_run(tmp_path / "a" / "run", facts={"world_size": 2}) as run:
        run.step_s = 0.5
        run.event(4, "probe", kind="statistics", seconds=0.25, tokens=np.int64(512), wait_s=0.2)
        run.metric(4, loss=np.float32(2.5), grad_norm=1.0, fp4_fraction=0.75, lr=1e-3)
        run.write("maps", 8, precision_map.to_json())
        run.write("plans", 8, plan.to_json())
        run.write_scores(4, scores, version=3)
        run.write("problems", 4, '{"schema": "snip.problem/1"}')
        run.set_fact("request", {"wait": False})
    path = tmp_path / "a" / "run"
    facts = {"world_size": 2, "request": {"wait": False}}
    assert read_config(path) == {"schema": "snip.run/1", "config": CONFIG, "facts": facts}
    (event,) = read_events(path)
    assert event.pop("time") > 1e9
    expected = {"step": 4, "event": "probe", "step_s": 0.5, "wait_s": 0.2, "kind": "statistics", "seconds": 0.25}
    assert event == {**expected, "tokens": 512}
    (metric,) = read_metrics(path)
    assert (metric["loss"], metric["grad_norm"], metric["fp4_fraction"], metric["lr"]) == (2.5, 1.0, 0.75, 1e-3)
    assert read_maps(path) == {8: precision_map}
    assert read_plans(path) == load_run(path).plans == {8: plan}
    assert read_scores(path)[4]["scores"] == scores
    assert strict_json((path / "problems" / "step_4.json").read_text()) == {"schema": "snip.problem/1"}
    assert not list(path.rglob("*.part"))


def test_non_finite_fields_become_null(tmp_path):
    with new_run(tmp_path) as run:
        run.metric(0, loss=math.nan, grad_norm=np.float64("inf"), fp4_fraction=0.0)
        run.event(0, "guard", values=[1.0, -math.inf], table={"a": np.array([np.nan, 2.0])})
    metric = strict_json((tmp_path / "metrics.jsonl").read_text())
    assert metric["loss"] is None
    assert metric["grad_norm"] is None
    event = strict_json((tmp_path / "events.jsonl").read_text())
    assert event["values"] == [1.0, None]
    assert event["table"] == {"a": [None, 2.0]}


# -- torn and broken files -----------------------------------------------------------------------------------------
def test_readers_skip_torn_lines(tmp_path):
    recorded_run(tmp_path, 3)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "loss": 2.\n[1]\n{"step": "x"}\n' + b"[" * 100_000 + b'\n{"step": 4, "lo')
    skipped: list[str] = []
    assert [m["step"] for m in read_metrics(tmp_path, skipped=skipped)] == [0, 1, 2]
    assert skipped == [f"{tmp_path / 'metrics.jsonl'}: 4 damaged lines, the first is line 4"]
    assert read_events(tmp_path / "absent") == []


def test_broken_map_is_an_error_or_listed(tmp_path):
    recorded_run(tmp_path, 5)
    (tmp_path / "maps" / "step_4.json").write_bytes(b"\xff{")
    with pytest.raises(SnipError, match=r"step_4\.json"):
        read_maps(tmp_path)
    skipped: list[str] = []
    assert list(read_maps(tmp_path, skipped=skipped)) == [0]
    assert "step_4.json" in skipped[0]


# -- restarts ------------------------------------------------------------------------------------------------------
def test_resume_cuts_back_and_keeps_the_tail(tmp_path):
    recorded_run(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    with new_run(tmp_path, resume_step=6) as run:
        run.metric(6, loss=1.0, grad_norm=1.0, fp4_fraction=0.0)
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(b"".join(before[:6]))
    assert (tmp_path / "metrics.jsonl.1").read_bytes() == b"".join(before[6:])
    assert [m["step"] for m in read_metrics(tmp_path)] == [*range(6), 6]
    assert [(e["step"], e["event"]) for e in read_events(tmp_path)] == [(0, "adopt"), (4, "adopt"), (6, "resume")]
    assert read_events(tmp_path)[-1]["cut_records"] == 4 + 1
    assert list(read_maps(tmp_path)) == [0, 4]
    assert (tmp_path / "maps" / "step_8.json.1").exists()


def test_the_validation_before_the_save_of_the_loaded_checkpoint_is_kept(tmp_path):
    with new_run(tmp_path) as run:
        for step in (3, 6, 9):
            run.event(step, "validation", formats="map", loss=float(step))
            run.event(step, "adopt", version=step)
    new_run(tmp_path, resume_step=6).close()
    events = [(event["event"], event["step"]) for event in read_events(tmp_path)]
    assert events == [("validation", 3), ("adopt", 3), ("validation", 6), ("resume", 6)]


def test_resume_removes_a_torn_last_line(tmp_path):
    recorded_run(tmp_path, 3)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 1')
    with new_run(tmp_path, resume_step=3) as run:
        run.metric(3, loss=1.0, grad_norm=1.0, fp4_fraction=0.0)
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        strict_json(line)
    assert (tmp_path / "metrics.jsonl.1").read_bytes() == b'{"step": 1\n'


@pytest.mark.parametrize(
    ("change", "key"),
    [({"budget": {"fp4": 0.5}}, r"budget\.fp4 is 0\.75 there and 0\.5 here"),
     ({"policy": "random", "update_interval": 8}, "policy is "), ({"extra": 1}, "extra is absent"),
     ({"pins": ["a"]}, "pins is ")],
)  # fmt: skip
def test_another_configuration_is_refused_naming_the_key(tmp_path, change, key):
    recorded_run(tmp_path)
    before = content(tmp_path)
    for resume_step in (None, 6):
        with pytest.raises(SnipError, match=key):
            new_run(tmp_path, CONFIG | change, resume_step=resume_step)
    assert content(tmp_path) == before


def test_a_first_start_that_may_resume_is_no_resume(tmp_path):
    """``--load`` names the folder of ``--save`` from the first start on."""
    new_run(tmp_path, resume_step=0).close()
    assert read_events(tmp_path) == []
    recorded_run(tmp_path / "killed")
    new_run(tmp_path / "killed", resume_step=0).close()
    (resumed,) = read_events(tmp_path / "killed")
    assert (resumed["event"], resumed["step"]) == ("resume", 0)
    assert resumed["cut_records"] > 0


def test_earlier_events_without_resume_are_refused(tmp_path):
    recorded_run(tmp_path)
    with pytest.raises(SnipError, match="earlier run"):
        new_run(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(SnipError, match="no config"):
        new_run(tmp_path, resume_step=6)


def test_overwrite_removes_our_files_only(tmp_path):
    recorded_run(tmp_path)
    new_run(tmp_path, resume_step=6).close()
    (tmp_path / "maps" / "notes.txt").write_text("mine")
    (tmp_path / "thesis.tex").write_text("mine")
    new_run(tmp_path, CONFIG | {"policy": "random"}, overwrite=True).close()
    files = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert files == {"config.json", "maps/notes.txt", "thesis.tex"}
    assert read_config(tmp_path)["config"]["policy"] == "random"


def test_overwrite_with_resume_keeps_the_history_and_names_the_change(tmp_path):
    recorded_run(tmp_path)
    new_run(tmp_path, CONFIG | {"policy": "random"}, overwrite=True, resume_step=6).close()
    assert len(read_metrics(tmp_path)) == 6
    assert read_events(tmp_path)[-1]["changed_key"] == "policy"
    assert read_config(tmp_path)["config"]["policy"] == "random"


WRITER = """
import sys
from snip_megatron.runtime.run_directory import RunDirectory
run = RunDirectory(sys.argv[1], {}, overwrite=True, resume_step=None)
run.metric(0, loss=1.0, grad_norm=1.0, fp4_fraction=0.0)
run.writer.flush()
print("writes", flush=True)
sys.stdin.read()
"""


def another_job(path: Path) -> subprocess.Popen[str]:
    """Start a process that writes into ``path`` until its input ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], **pipes)
    assert process.stdout.readline() == "writes\n"
    return process


def of_another_host(path: Path) -> None:
    """Leave the record of a job on another host."""
    recorded_run(path)
    lock = {"schema": "snip.lock/1", "host": "node-9", "process": 4711, "born": 1, "job": "7"}
    (path / LOCK).write_text(json.dumps(lock))


def test_a_directory_in_use_is_refused_whatever_is_asked_for(tmp_path):
    with another_job(tmp_path) as process:
        before = content(tmp_path)
        for fields in ({}, {"overwrite": True}, {"resume_step": 1, "config": {}}):
            with pytest.raises(SnipError, match=f"belongs to process {process.pid} .*still runs; end it or choose"):
                new_run(tmp_path, **fields)
        assert content(tmp_path) == before
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
    of_another_host(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    with pytest.raises(SnipError, match=f"process 4711 of job 7 on node-9; .*if it is dead, remove {tmp_path / LOCK}$"):
        new_run(tmp_path, CONFIG, overwrite=True)


def test_an_earlier_start_of_the_same_job_gives_way(tmp_path, monkeypatch):
    of_another_host(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    new_run(tmp_path, CONFIG, resume_step=6).close()
    assert not (tmp_path / LOCK).exists()


TAKERS = """
import multiprocessing, os, sys
from pathlib import Path
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.run_directory import take_lock

folder, takers = Path(sys.argv[1]), int(sys.argv[2])
runs = sorted(folder.iterdir())
start = multiprocessing.get_context("fork").Barrier(takers)
if os.fork() == 0:  # a taker that is killed before it replaces the lock
    os.replace = os.rename = lambda *paths: None
    for run in runs:
        if run.name.startswith("killed taker"):
            take_lock(run)
    os._exit(0)
os.wait()
for taker in range(takers):
    if os.fork() == 0:
        for run in runs:
            start.wait(60)
            try:
                take_lock(run)
            except SnipError:
                continue
            (run / f"{os.getpid()}.winner").touch()
        start.wait(60)  # a process that has ended no longer holds its locks
        os._exit(0)
for taker in range(takers):
    assert os.wait()[1] == 0
"""


def test_one_of_many_jobs_gets_the_lock(tmp_path):
    for number in range(8):
        for stale in ("no lock", "killed job", "torn lock", "killed taker"):
            (run := tmp_path / f"{stale} {number}").mkdir()
            dead = {"host": socket.gethostname(), "process": os.getpid(), "born": 1, "job": None}
            if stale != "no lock":
                (run / LOCK).write_text("{" if stale == "torn lock" else json.dumps(dead))
    subprocess.run([sys.executable, "-c", TAKERS, str(tmp_path), "16"], check=True, timeout=120)
    for run in tmp_path.iterdir():
        (winner,) = run.glob("*.winner")
        assert read_lock(run).process == int(winner.stem)
        assert sorted(file.name for file in run.iterdir()) == [winner.name, LOCK]
