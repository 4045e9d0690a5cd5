"""Runs torchrun on one node and passes signals on to its ranks.

On SIGTERM torchrun gives its ranks 30 seconds, less than a large checkpoint takes, and SIGUSR1 ends it at once. Here
torchrun ignores both signals and this process sends its ranks SIGTERM instead. With ``--exit-signal-handler`` Megatron
then saves a checkpoint after the current step and exits with code 0. So it does on SIGHUP, when a terminal closes: the
ranks are in sessions of their own and would train on without torchrun.

If a rank fails, this process exits with the rank's code and writes it to a file that all nodes see. srun then sends
SIGTERM to the other nodes. There, the file tells this process that there is nothing to save: it ends its ranks, which
may wait for the failed one, and exits with the same code.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from snip_megatron.megatron.startup import EXIT_CODE_FILE
from snip_megatron.precision.errors import SnipError

ENTRY = "snip_megatron.pretrain_gpt"
#: Value of ``--local-address``: the address from which this node reaches the rendezvous.
ROUTE = "route"
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
#: Signals of keys, which the terminal sends to torchrun too. It then ends its ranks.
_KEY_SIGNALS = (signal.SIGINT, signal.SIGQUIT)
_POLL_S = 0.2


def torchrun_command(
    nodes: int, gpus_per_node: int, rendezvous: str | None, rendezvous_id: str, local_address: str | None
) -> list[str]:
    """Return torchrun's command on this node, without the arguments of the training entry.

    ``rendezvous`` is HOST:PORT of one of the nodes, and may be None on a single node. ``local_address`` is the address
    of this node, or None if its host name resolves. Raises SnipError if there are several nodes and no rendezvous.
    """
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", str(nodes), "--nproc-per-node", str(gpus_per_node), "--max-restarts", "0"]
    if tuple(int(part) for part in metadata.version("torch").split(".")[:2]) >= (2, 10):
        command += ["--signals-to-handle", ",".join(number.name for number in _KEY_SIGNALS)]
    if nodes > 1 or rendezvous is not None:
        if rendezvous is None or not rendezvous.rpartition(":")[2].isdigit():
            raise SnipError(
                f"--nodes {nodes}: give --rendezvous HOST:PORT, the same on every node, and start this on each of"
                " them (launch/slurm.sh does both)"
            )
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", rendezvous, "--rdzv-id", rendezvous_id]
    else:
        command.append("--standalone")
    if local_address == ROUTE:
        local_address = _address_towards(rendezvous)
    if local_address is not None:
        command += ["--local-addr", local_address]
    return [*command, "-m", ENTRY]


def _address_towards(rendezvous: str | None) -> str | None:
    """Return the address of this node on the route to the rendezvous. None without a rendezvous. Sends nothing."""
    if rendezvous is None:
        return None
    host, _, port = rendezvous.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise SnipError(f"--rendezvous {rendezvous}: {host} cannot be reached from this node: {error}") from None


def environment(gpus_per_node: int, *, cpu: bool) -> dict[str, str]:
    """Return the environment variables to add for the ranks. Variables that the user has set are not among them."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, min(16, len(os.sched_getaffinity(0)) // gpus_per_node))),
        "NCCL_DEBUG": "WARN",
        # A rank that fails or hangs ends the job, which can then be restarted from its checkpoint.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    return added | ({"CUDA_VISIBLE_DEVICES": ""} if cpu else {})


def check_devices(gpus_per_node: int) -> None:
    """Raise SnipError if this node has fewer GPUs than ranks."""
    import torch

    count = torch.cuda.device_count()
    if count < gpus_per_node:
        raise SnipError(
            f"--gpus-per-node {gpus_per_node}: this node has {count} GPUs"
            " (a trial without GPUs: --cpu --smoke --gpus-per-node 2 and --tp, --pp that divide 2)"
        )


def failure_file(save: Path) -> Path | None:
    """Return the file in which a node records its failure, or None outside SLURM, where nothing ends the other nodes.

    Its name has the job, its start and its step, so that no other start reads it.
    """
    if "SLURM_STEP_ID" not in os.environ:
        return None
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    return save / f"failed-{'.'.join(os.environ.get(name, '0') for name in names)}"


def supervise(
    command: Sequence[str],
    variables: Mapping[str, str],
    failed: Path | None = None,
    *,
    output: IO[bytes] | None = None,
) -> tuple[int, str | None]:
    """Run torchrun's command until it ends.

    ``failed`` is the result of :func:`failure_file`. The ranks write to ``output``, or to this process's own standard
    output and error if it is None.

    Returns the exit code (that of the rank that failed, or 128 + n after signal n), and the name of the first signal
    that asked the job to end. The name is None if there was no such signal.
    """
    received: list[str] = []

    def record(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)

    # A signal that is ignored at the start stays ignored (nohup). This process ignores keys, because it would leave the
    # ranks behind.
    handlers = {number: record for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}
    numbers = (*_STOP_SIGNALS, *_KEY_SIGNALS)
    previous = {number: signal.signal(number, handlers.get(number, signal.SIG_IGN)) for number in numbers}
    with tempfile.TemporaryDirectory(prefix="snip-launch-") as folder:
        code_file = Path(folder) / "code"
        environment = {**os.environ, **variables, EXIT_CODE_FILE: str(code_file)}
        try:
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, preexec_fn=_set_signals_of_torchrun
            )
            code = _wait(process, received, failed)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        code = code if code >= 0 else 128 - code
        if code:
            code = _read_code(code_file) or code
            if failed is not None and not failed.exists():  # the first node that fails tells the others
                with contextlib.suppress(OSError):  # they are then killed by srun
                    failed.parent.mkdir(parents=True, exist_ok=True)
                    failed.write_text(f"{code}\n", encoding="ascii")
    return code, received[0] if received else None


def _set_signals_of_torchrun() -> None:
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    for number in _KEY_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _wait(process: subprocess.Popen[bytes], received: Sequence[str], failed: Path | None) -> int:
    """Wait until torchrun ends, and return its exit code. Once a stop signal is received, pass it on to the ranks."""
    signalled: set[int] = set()
    while (code := process.poll()) is None:
        if received and failed is not None and failed.exists():
            # torchrun is ended first, because it would otherwise report its ranks as failed.
            ranks = _children(process.pid, recursive=True)
            for each in (psutil.Process(process.pid), *ranks):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()
            print(f"snip launch: another node failed ({failed}); the ranks of this one are ended", flush=True)
            return _read_code(failed) or 1
        if received:
            _signal_ranks(process.pid, signalled)
        time.sleep(_POLL_S)
    return code


def _children(pid: int, *, recursive: bool = False) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=recursive))
    except psutil.NoSuchProcess:
        return []


def _read_code(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _signal_ranks(torchrun_pid: int, signalled: set[int]) -> None:
    """Send SIGTERM once to each rank that has a handler for it. Processes that ranks have started get none.

    A rank that has not yet installed Megatron's handler gets the signal at a later call. No rank gets it twice: a
    process that is about to exit has removed its handlers and would die of the second signal.
    """
    for child in _children(torchrun_pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.pid not in signalled and ENTRY in child.cmdline() and _catches(child.pid, signal.SIGTERM):
                child.send_signal(signal.SIGTERM)
                signalled.add(child.pid)


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for the signal, according to ``/proc``."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
