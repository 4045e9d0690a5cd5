"""launch/slurm.sh against stand-ins for SLURM's commands: ``srun`` starts two agents on this host, which train.

The stand-ins do what SLURM's manual says of the real ones: srun sets SLURM_PROCID, starts a task a node and hands
signals on to them; scontrol lists host names, shows a job, requeues.
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

from snip_megatron.reporting.readers import read_events, read_metrics

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
import os, sys
with open(os.environ["STUB_LOG"], "a") as log:
    print("scontrol", *sys.argv[1:], file=log)
if sys.argv[1:3] == ["show", "hostnames"]:
    print("localhost\\nlocalhost")
if sys.argv[1:3] == ["show", "job"]:
    print("JobId=4711 JobName=snip PreemptEligibleTime=Unknown PreemptTime=" + os.environ.get("STUB_PREEMPTED", "None"))
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


def start(cluster: dict[str, str], tmp: Path, restart: int, *megatron: str) -> tuple[subprocess.Popen[bytes], Path]:
    """The job's script, and the file that it writes to."""
    output = tmp / f"job{restart}.log"
    wishes = [
        "1b",
        "--smoke",
        "--cpu",
        "--gpus-per-node",
        "1",
        "--local-address",
        "127.0.0.1",
        "--save",
        str(tmp / "c"),
    ]
    with output.open("ab") as file:
        process = subprocess.Popen(
            ["bash", str(SCRIPT), *wishes, "--megatron", *megatron],
            stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=tmp,
            env=job(cluster, restart), start_new_session=True,
        )  # fmt: skip
    return process, output


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


def test_stopped_queued_again_and_resumed(cluster: dict[str, str], tmp_path: Path) -> None:
    # Far more steps than the test waits for: what ends the first job is the signal.
    process, output = start(cluster, tmp_path, 0, "--train-iters", "100000")
    wait_for(" iteration        4/", 1, process, output)
    process.send_signal(signal.SIGUSR1)
    text = wait(process, output, 120)
    assert process.returncode == 0, text[-4000:]
    assert "snip: SIGUSR1: the ranks save a checkpoint after this step" in text
    assert text.count("snip launch: ended on SIGUSR1; the same command goes on from") == 2
    assert text.splitlines()[-1] == "snip: training left with exit code 0; the job is queued again"
    assert log(cluster)[-1] == "scontrol requeue 4711"
    saved = int((tmp_path / "c" / "latest_checkpointed_iteration.txt").read_text())
    assert saved >= 4

    process, output = start(cluster, tmp_path, 1, "--train-iters", "100000", "--exit-interval", str(saved + 3))
    text = wait(process, output, 180)
    assert process.returncode == 0, text[-4000:]
    assert "srun: --nodes=2 --ntasks-per-node=1 --kill-on-bad-exit=1" in text
    assert text.count("snip launch: goes on from the checkpoint in") == 2
    assert f"iteration {saved + 1:8d}/" in text
    assert f"iteration {saved:8d}/" not in text
    assert log(cluster).count("scontrol requeue 4711") == 1
    run = tmp_path / "c" / "snip"
    assert [figure["step"] for figure in read_metrics(run)] == list(range(saved + 3))
    assert any(event["event"] == "adopt" for event in read_events(run))


STAND_IN = """
import signal, sys, time
if "--dry-run" in sys.argv:
    sys.exit(0)
got = []
signal.signal(signal.SIGUSR1, lambda *a: got.append(1))
print("training", flush=True)
while not got:
    time.sleep(0.05)
time.sleep(0.5)  # a checkpoint
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
    ],
    ids=["preempted", "cancelled", "always", "never", "failed-while-it-saved", "failed"],
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
    program.write_text(STAND_IN if sent else "import sys\nsys.exit('--dry-run' not in sys.argv and int(sys.argv[-1]))")
    output = tmp_path / "out"
    with output.open("ab") as file:
        process = subprocess.Popen(
            ["bash", str(SCRIPT), "1b", str(code)], stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env=job(cluster) | environment | {"SNIP": f"{sys.executable} {program}"},
        )  # fmt: skip
    if sent is not None:
        wait_for("training\n", 2, process, output)
        process.send_signal(sent)
    text = wait(process, output, 60)
    assert process.returncode == code, text
    assert ("scontrol requeue 4711" in log(cluster)) == requeued
