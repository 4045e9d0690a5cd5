"""One node's torchrun: its command, its environment, and signals that reach the ranks in time.

torchrun answers SIGTERM by giving its ranks 30 seconds, less than a large checkpoint takes, and dies of SIGUSR1. So it
ignores both here, and this process hands them on to the ranks as the signal that Megatron's ``--exit-signal-handler``
waits for: after the step at hand they save a checkpoint and leave with exit code 0.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

from snip_megatron.errors import SnipError
from snip_megatron.launch.job import Job

ENTRY = "snip_megatron.pretrain_gpt"
_STOPS = (signal.SIGTERM, signal.SIGUSR1)
_POLL_S = 0.2


def torchrun(job: Job, rendezvous: str | None, rendezvous_id: str, local_address: str | None) -> list[str]:
    """torchrun's command on this node, up to the entry's arguments.

    Raises SnipError: several nodes without a rendezvous.
    """
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", str(job.nodes), "--nproc-per-node", str(job.gpus_per_node), "--max-restarts", "0"]
    if _chooses_signals():
        command += ["--signals-to-handle", "SIGINT"]
    if job.nodes > 1 or rendezvous is not None:
        if rendezvous is None or not rendezvous.rpartition(":")[2].isdigit():
            raise SnipError(
                f"--nodes {job.nodes}: give --rendezvous HOST:PORT, the same on every node, and start this on each of"
                " them (launch/slurm.sh does both)"
            )
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", rendezvous, "--rdzv-id", rendezvous_id]
    else:
        command.append("--standalone")
    if local_address is not None:
        command += ["--local-addr", local_address]
    return [*command, "-m", ENTRY]


def _chooses_signals() -> bool:
    """Whether this torchrun can be told which signals to handle (not before torch 2.10); torch is not imported."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise SnipError("torch is not installed; install the package's requirements (scripts/bootstrap.sh)")
    source = Path(torch.origin).parent / "distributed" / "run.py"
    return "--signals-to-handle" in source.read_text(encoding="utf-8")


def environment(job: Job, *, cpu: bool) -> dict[str, str]:
    """Variables that this launch adds; what is already set stays as it is."""
    cores = len(os.sched_getaffinity(0))
    wanted = {
        "OMP_NUM_THREADS": str(max(1, min(16, cores // job.gpus_per_node))),
        "NCCL_DEBUG": "WARN",
        # A rank that fails or hangs ends the job, which is then started again from its checkpoint.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    return added | ({"CUDA_VISIBLE_DEVICES": ""} if cpu else {})


def check_devices(job: Job) -> None:
    """Raises SnipError where this node has fewer GPUs than ranks."""
    import torch

    found = torch.cuda.device_count()
    if found < job.gpus_per_node:
        raise SnipError(
            f"--gpus-per-node {job.gpus_per_node}: this node has {found} GPUs"
            " (a trial without GPUs: --cpu --smoke --nodes 1 --gpus-per-node 2 and --tp, --pp that divide 2)"
        )


def supervise(command: Sequence[str], added: Mapping[str, str]) -> tuple[int, str | None]:
    """Run torchrun to its end. Returns its exit code (128 + n for signal n) and the signal that asked for the end."""
    asked: list[str] = []

    def stop(number: int, frame: FrameType | None) -> None:
        asked.append(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in _STOPS}
    # Ctrl-C reaches torchrun too, which then ends its ranks; here it would only leave them behind.
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(command, env={**os.environ, **added}, preexec_fn=_signals_of_torchrun)
        code = _wait(process, asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code, asked[0] if asked else None


def _signals_of_torchrun() -> None:
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _wait(process: subprocess.Popen[bytes], asked: Sequence[str]) -> int:
    told: set[int] = set()
    while (code := process.poll()) is None:
        if asked:
            _tell_ranks(process.pid, told)
        time.sleep(_POLL_S)
    return code


def _tell_ranks(torchrun_pid: int, told: set[int]) -> None:
    """SIGTERM, once, to torchrun's children that run the entry and wait for it, not to what these have started.

    A rank that has not reached Megatron yet ignores it: its turn comes later. Not twice: a Python that is about to
    leave has taken its handlers away, and would die of it.
    """
    try:
        children = psutil.Process(torchrun_pid).children()
    except psutil.NoSuchProcess:
        return
    for child in children:
        try:
            if child.pid not in told and ENTRY in child.cmdline() and _catches(child.pid, signal.SIGTERM):
                child.send_signal(signal.SIGTERM)
                told.add(child.pid)
        except psutil.NoSuchProcess:
            continue


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for the signal, as the kernel says."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
