"""launch/slurm.sh where no SLURM is installed: what it submits, what it refuses, and when it queues a job again.

Stand-ins take the place of SLURM's commands: srun starts a task a node and hands signals on to them; scontrol lists
host names, shows a job, requeues. tests/slurm has the real SLURM.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "slurm.sh"
SNIP = f"{sys.executable} -m snip_megatron.cli"

SRUN = """
import os, signal, subprocess, sys, time
print("srun:", *[a for a in sys.argv[1:] if a.startswith("--n") or a.startswith("--kill")][:3], flush=True)
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
tasks = []
def hand_on(number, frame):
    for task in tasks:
        task.send_signal(number)
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, hand_on)
for node in range(nodes):
    tasks.append(subprocess.Popen(command, env=os.environ | {"SLURM_PROCID": str(node)}))
codes = {}
while len(codes) < nodes:
    for task in tasks:
        if task.pid not in codes and task.poll() is not None:
            codes[task.pid] = task.returncode
            if task.returncode:  # --kill-on-bad-exit
                hand_on(signal.SIGTERM, None)
    time.sleep(0.1)
sys.exit(max(codes.values()))
"""
SCONTROL = """
import os, sys, time
def shown(moment):
    try:
        seconds = time.mktime(time.strptime(moment, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return moment
    return time.strftime(os.environ.get("SLURM_TIME_FORMAT", "%Y-%m-%dT%H:%M:%S"), time.localtime(seconds))
with open(os.environ["STUB_LOG"], "a") as log:
    print("scontrol", *sys.argv[1:], file=log)
if sys.argv[1:3] == ["show", "hostnames"]:
    print(os.environ.get("STUB_HOST", "localhost"))
if sys.argv[1:4] == ["show", "--oneliner", "job"]:
    if "STUB_BUSY" in os.environ:
        sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    start, preempted = shown("2026-11-21T09:00:00"), shown(os.environ.get("STUB_PREEMPTED", "None"))
    print(f"JobId=4711 JobName=snip PreemptEligibleTime=Unknown StartTime={start} EndTime=Unknown", end=" ")
    print(f"PreemptTime={preempted}")
"""
SBATCH = """
import os, sys
with open(os.environ["STUB_LOG"], "a") as log:
    print("sbatch", *sys.argv[1:], file=log)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a user, with SLURM's commands in PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, program in (("srun", SRUN), ("scontrol", SCONTROL), ("sbatch", SBATCH)):
        (folder / name).write_text(f"#!{sys.executable}\n{program}")
        (folder / name).chmod(0o755)
    (tmp_path / "log").touch()
    quiet = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SNIP_", "RANK", "WORLD", "LOCAL_"))}
    return quiet | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "SNIP": SNIP,
        "STUB_LOG": str(tmp_path / "log"),
    }


def job(cluster: dict[str, str], restart: int = 0) -> dict[str, str]:
    """As SLURM sets it for a job of two nodes."""
    return cluster | {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_RESTART_COUNT": str(restart),
        "SNIP_PORT": str(free_port()),
    }


def log(cluster: dict[str, str]) -> list[str]:
    return Path(cluster["STUB_LOG"]).read_text().splitlines()


def bash(cluster: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=cluster, timeout=120)


def test_it_submits_itself_with_what_the_configuration_needs(cluster: dict[str, str]) -> None:
    asked = ("70b", "--data", "mock", "--save", "/shared/70b")
    done = bash(cluster | {"SNIP_SBATCH": "--partition=gpu --time=4:00:00"}, *asked)
    assert done.returncode == 0, done.stderr
    expected = f"--nodes=8 --gpus-per-node=8 --partition=gpu --time=4:00:00 {SCRIPT} {' '.join(asked)}"
    assert log(cluster) == [f"sbatch {expected}"]
    dry = bash(cluster, *asked, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert dry.stdout.startswith(f"# sbatch --nodes=8 --gpus-per-node=8 {SCRIPT} 70b ")
    assert "--rdzv-backend c10d" in dry.stdout
    assert len(log(cluster)) == 1  # nothing was submitted


def test_bad_input_is_one_line_and_submits_nothing(cluster: dict[str, str]) -> None:
    refused = bash(cluster, "70b", "--data", "mock", "--save", "/shared/70b", "--tp", "5")
    assert refused.returncode == 2
    assert refused.stderr.startswith("snip launch: 64 GPUs (--nodes 8 × --gpus-per-node 8) are no multiple of --tp 5")
    assert refused.stderr.count("\n") == 1
    assert log(cluster) == []


def test_bad_input_in_the_job_starts_nothing(cluster: dict[str, str]) -> None:
    refused = bash(job(cluster), "7b", "--data", "/nowhere", "--save", "/shared/7b")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "srun:" not in refused.stdout


def wait(process: subprocess.Popen[bytes], output: Path, seconds: float) -> str:
    try:
        process.wait(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return output.read_text(errors="replace")


def wait_for(text: str, times: int, process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + 180
    while output.read_text(errors="replace").count(text) < times:
        if process.poll() is not None or time.monotonic() > deadline:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(output.read_text(errors="replace")[-4000:])
        time.sleep(0.1)


def test_a_head_node_that_cannot_be_found_is_one_line(cluster: dict[str, str]) -> None:
    refused = bash(job(cluster) | {"STUB_HOST": "no-such-node"}, "7b", "--data", "mock", "--save", "/shared/7b")
    assert refused.returncode == 2
    assert refused.stderr == (
        "slurm.sh: no-such-node, the first node of this job, and its NodeAddr (none) do not resolve on it; the nodes"
        " cannot meet there\n"
    )
    assert "srun:" not in refused.stdout


def test_a_wrong_word_about_queueing_is_refused(cluster: dict[str, str]) -> None:
    refused = bash(job(cluster) | {"SNIP_REQUEUE": "yes"}, "7b", "--data", "mock", "--save", "/shared/7b")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert refused.stderr.startswith("slurm.sh: SNIP_REQUEUE=yes: give always, never or nothing")


STAND_IN = """
import os, signal, sys, time
saved = os.path.join(os.environ["STUB_FOLDER"], "saved")
if "--progress" in sys.argv:
    print(50 if os.path.exists(saved) else 0, 100)
if {"--progress", "--dry-run", "--check"} & set(sys.argv):
    sys.exit(0)
got = []
signal.signal(signal.SIGUSR1, lambda *a: got.append(1))
print("training", flush=True)
while not got and "wait" in sys.argv:
    time.sleep(0.05)
time.sleep(0.5)
open(saved, "w").close()  # a checkpoint
sys.exit(int(sys.argv[-1]))
"""


@pytest.mark.parametrize(
    ("sent", "environment", "code", "requeued"),
    [
        (signal.SIGTERM, {"STUB_PREEMPTED": "2026-11-21T10:00:00"}, 0, True),
        (signal.SIGTERM, {}, 0, False),  # scancel
        (signal.SIGTERM, {"SNIP_REQUEUE": "always"}, 0, True),
        (signal.SIGUSR1, {"SNIP_REQUEUE": "never"}, 0, False),
        (signal.SIGUSR1, {}, 3, True),  # the checkpoint failed: the job goes on from the one before
        (None, {"SNIP_REQUEUE": "always"}, 3, False),  # training failed
        (None, {"STUB_PREEMPTED": "2026-11-21T08:00:00"}, 0, False),  # in an earlier start
        (signal.SIGTERM, {"STUB_PREEMPTED": "2026-11-21T10:00:00", "SLURM_TIME_FORMAT": "%a %H:%M"}, 0, True),
        (signal.SIGUSR1, {"STUB_BUSY": "1", "SNIP_WARNING_S": "600"}, 0, True),
    ],
    ids=[
        "preempted",
        "cancelled",
        "always",
        "never",
        "failed-while-it-saved",
        "failed",
        "preempted-before",
        "times-in-the-user-s-format",
        "controller-does-not-answer",
    ],
)
def test_when_a_job_is_queued_again(
    sent: signal.Signals | None,
    environment: dict[str, str],
    code: int,
    requeued: bool,
    cluster: dict[str, str],
    tmp_path: Path,
) -> None:
    """The script alone, with a stand-in for what it runs."""
    program = tmp_path / "program.py"
    program.write_text(STAND_IN)
    output = tmp_path / "out"
    with output.open("ab") as file:
        process = subprocess.Popen(
            ["bash", str(SCRIPT), "1b", "wait" if sent else "go", str(code)],
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env=job(cluster) | environment | {"SNIP": f"{sys.executable} {program}", "STUB_FOLDER": str(tmp_path)},
        )  # fmt: skip
    if sent is not None:
        wait_for("training\n", 2, process, output)
        process.send_signal(sent)
    text = wait(process, output, 60)
    assert process.returncode == code, text
    assert ("scontrol requeue 4711" in log(cluster)) == requeued
