"""The sidecar as a real process: answers, and every way it can fail. Linux only, for /proc and signals."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sidecar_jobs import alive, environment_of_a_rank, make_job, next_result, state, wait_until

from snip_megatron.precision import Format
from snip_megatron.runtime.solving import SidecarClient
from snip_megatron.solver import Problem

Start = Callable[..., SidecarClient]
TESTS = Path(__file__).resolve().parent


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts clients, ends them with the test."""
    clients: list[SidecarClient] = []

    def make(solve: str = "sidecar_solvers:by_policy", **options: float) -> SidecarClient:
        client = SidecarClient(solve=solve, **options)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


def test_a_job_gives_a_map(start: Start) -> None:
    client = start("sidecar_solvers:plain")
    client.submit(make_job(version=5, target=0.5))
    result = next_result(client)
    assert result.failure is None
    (candidate,) = result.candidates
    solved = candidate.precision_map
    assert result.version == solved.version == 5
    assert solved.status == "optimal"
    # Eight linears, ‖X‖² = 1 … 8: the four smallest take fp4.
    assert solved.objective == 1 + 2 + 3 + 4
    problem = Problem.from_json(result.problem_json)
    assert [item.id for item in problem.items] == list(solved.choices)
    assert sum(fmt is Format.FP4 for fmt in solved.choices.values()) == 4
    assert result.scores["pid"] != os.getpid()
    assert result.latency_s > 0
    assert client.poll() is None


def test_the_worker_is_no_rank(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_of_a_rank().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    client = start("sidecar_solvers:environment")
    client.submit(make_job())
    assert next_result(client).scores == {"rank": {}, "cuda": "", "imported": []}


def test_failures_are_told_apart(start: Start) -> None:
    """The output of a job does not reach the answers either."""
    client = start()
    for policy, kind, message in (
        ("print", None, ""),
        ("raise", "exception", "RuntimeError: no such score (sidecar_solvers.py:"),
        ("oom", "oom", "out of memory"),
        ("exit", "died", "exit code 7"),
    ):
        client.submit(make_job(version=4, policy=policy))
        result = next_result(client)
        assert (result.version, result.failure) == (4, kind)
        assert message in (result.message or "")
        assert "\n" not in (result.message or "")
    client.submit(make_job(version=5))
    assert next_result(client).candidates


def test_killed_in_mid_job(start: Start, tmp_path: Path) -> None:
    client = start()
    mark = tmp_path / "running"
    client.submit(make_job(version=1, policy=f"sleep:{mark}"))
    client.submit(make_job(version=2))
    wait_until(mark.exists)
    first = client.pid
    os.kill(first, signal.SIGKILL)
    result = next_result(client)
    assert (result.version, result.failure) == (1, "died")
    assert "SIGKILL" in result.message
    # The job behind it is not lost.
    assert next_result(client).candidates[0].precision_map.version == 2
    assert client.restarts == 1


def test_sigterm_to_all_processes_of_a_step_is_for_the_ranks(start: Start) -> None:
    """A scheduler sends it at any time, also before the process has run its first line."""
    client = start()
    wait_until(lambda: client.pid)
    os.kill(client.pid, signal.SIGTERM)
    client.submit(make_job(version=1))
    assert next_result(client).failure is None
    wait_until(lambda: client.pid)
    os.kill(client.pid, signal.SIGTERM)
    client.submit(make_job(version=2))
    assert next_result(client).candidates[0].precision_map.version == 2
    assert client.restarts == 0


def test_a_worker_that_cannot_load_fails_every_job(start: Start) -> None:
    """It does so at once, and not only after the deadline."""
    client = start("sidecar_solvers:no_such_function")
    client.submit(make_job(version=3))
    result = next_result(client)
    assert (result.version, result.failure) == (3, "died")
    assert "exit code 1" in result.message


def test_stopped_past_its_deadline(start: Start) -> None:
    client = start(deadline_s=0.1)
    wait_until(lambda: client.pid)
    stopped = client.pid
    os.kill(stopped, signal.SIGSTOP)
    client.submit(make_job(version=1))
    result = next_result(client)
    assert (result.version, result.failure) == (1, "deadline")
    assert not alive(stopped)
    client._deadline = 600.0
    client.submit(make_job(version=2))
    answer = next_result(client)
    assert (answer.version, answer.failure) == (2, None)
    assert client.restarts == 1


def test_submit_and_poll_return_while_the_worker_is_stopped(start: Start) -> None:
    """A job larger than a pipe holds: writing it from the caller's thread would hang until the deadline."""
    client = start(deadline_s=600.0)
    wait_until(lambda: client.pid)
    os.kill(client.pid, signal.SIGSTOP)
    wait_until(lambda: state(client.pid) == "T")
    job = make_job()
    object.__setattr__(job, "padding", b"0" * 2_000_000)
    client.submit(job)
    assert client.poll() is None
    os.kill(client.pid, signal.SIGCONT)
    assert next_result(client).failure is None


def test_close_leaves_no_process(start: Start, tmp_path: Path) -> None:
    client = start()
    mark = tmp_path / "running"
    client.submit(make_job(policy=f"sleep:{mark}"))
    wait_until(mark.exists)
    pid = client.pid
    client.close()
    assert not Path(f"/proc/{pid}").exists()
    assert client.pid is None


def test_ends_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed in mid-job while the worker is stopped. No process is left."""
    mark = tmp_path / "running"
    command = [sys.executable, "-m", "sidecar_parent", f"sleep:{mark}"]
    parent = subprocess.Popen(
        command,
        cwd=TESTS,
        env=environment_of_a_rank() | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        worker = int(parent.stdout.readline())
        wait_until(mark.exists)
        assert alive(worker)
        os.kill(worker, signal.SIGSTOP)
        wait_until(lambda: state(worker) == "T")
        parent.kill()
    wait_until(lambda: not alive(worker))
