"""The page that follows a running job, over real HTTP on this machine."""

import gzip
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import synthetic_run

from snip_megatron.reporting import live
from snip_megatron.reporting.live import LiveServer
from snip_megatron.reporting.report import render
from snip_megatron.runtime.run_data import RunData, load_run
from snip_megatron.runtime.run_directory import LOCK, RunDirectory, take_lock


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return synthetic_run.write_run(tmp_path / "run", updates=1, steps=40)


@pytest.fixture
def server(run: Path) -> Iterator[LiveServer]:
    server = LiveServer(run, port=0)
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield server
    server.close()
    thread.join()


def get(url: str) -> tuple[dict[str, str], str]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return dict(answer.headers), gzip.decompress(answer.read()).decode()


def test_the_page_follows_the_run(run: Path, server: LiveServer) -> None:
    headers, page = get(server.url)
    assert headers["Refresh"] == str(live.REFRESH_S)
    assert "training steps" in page
    assert "<dd>40</dd>" in page
    with RunDirectory(run, synthetic_run.CONFIG, overwrite=False, resume_step=40, facts=synthetic_run.FACTS) as again:
        again.metric(40, loss=3.0, grad_norm=1.0, fp4_fraction=0.75)
    assert "<dd>41</dd>" in get(server.url)[1]


def test_only_the_printed_address_has_the_page(server: LiveServer) -> None:
    assert server.http.server_address[0] == "127.0.0.1"
    for wrong in (server.url.replace(server.secret, "guess"), server.url.rstrip("/"), f"{server.url}config.json"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(wrong)
        assert refused.value.code == 404


def test_a_run_directory_that_goes_away_is_said_and_may_come_back(run: Path, server: LiveServer) -> None:
    (run / "config.json").rename(run / "away")
    with pytest.raises(urllib.error.HTTPError) as failed:
        get(server.url)
    assert failed.value.code == 503
    assert "config.json is missing" in failed.value.read().decode()
    (run / "away").rename(run / "config.json")
    assert "<dd>40</dd>" in get(server.url)[1]


def old_run(path: Path, age: float, steps: int = 40) -> RunData:
    """A run whose last record is ``age`` seconds old."""
    synthetic_run.write_run(path, updates=1, steps=steps, facts={"train_iters": 900, "global_batch_size": 8})
    for name in ("metrics.jsonl", "events.jsonl"):
        synthetic_run.rewrite(path, name, lambda row: row.update(time=time.time() - age))
    return load_run(path)


def test_a_job_that_was_killed_does_not_look_alive(tmp_path: Path) -> None:
    run = old_run(tmp_path / "run", age=3600.0)
    when = datetime.fromtimestamp(run.metrics[-1]["time"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    assert f"Stopped. Step 40 of 900, last write {when}, 60.0 min ago." in render(run, live=True)
    assert f"Stopped. Step 40 of 900, last write {when}." in render(run)  # a page that is read later
    take_lock(run.path)  # the record of a job that still runs, as this process does
    me = f"process {os.getpid()} on {socket.gethostname()}"
    silent = f"Stopped, or hangs: {me} has written nothing for 60.0 min. Step 40 of 900"
    assert silent in render(run, live=True)
    alive = old_run(tmp_path / "alive", age=5.0)
    take_lock(alive.path)
    assert "Written by the run itself. Step 40 of 900" in render(alive)
    assert f"Running: {me}. Step 40 of 900, last write " in render(alive, live=True)
    lock = json.loads((alive.path / LOCK).read_text()) | {"process": 2**22 + 1}  # no process has this id
    (alive.path / LOCK).write_text(json.dumps(lock))
    assert "Stopped, process 4194305 on " in render(alive, live=True)
    assert " was killed. Step 40 of 900, last write " in render(alive, live=True)
    assert "Ended. Step 900 of 900, last write " in render(old_run(tmp_path / "over", 3600.0, steps=900), live=True)
