"""A worker process, with two threads that read and write its pipes so that rank 0 never waits for them."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import BinaryIO

from snip_megatron.runtime.child_signals import blocked_in_children
from snip_megatron.runtime.sidecar.messages import BrokenFrameError, SidecarResult, read_frame, write_frame

# Variables of torchrun, SLURM and NCCL, which would make libraries take the worker for a rank.
_RANK_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "NCCL_", "GROUP_", "ROLE_", "PMI_", "PMIX_", "OMPI_")
_RANK_NAMES = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "SLURM_PROCID")
)


def worker_environment() -> dict[str, str]:
    """Return the parent's environment without variables of a rank, without devices, and with its module path."""
    kept = {k: v for k, v in os.environ.items() if k not in _RANK_NAMES and not k.startswith(_RANK_PREFIXES)}
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return kept | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}


_REAP_S = 1.0  # a killed process ends within a millisecond, unless it hangs in the kernel


class WorkerProcess:
    """A running worker process.

    Args:
        build: see :class:`snip_megatron.runtime.sidecar.client.SidecarClient`.

    Attributes:
        answers: a queue of (number of the job, arrival time, answer). The last entry, after the process ended, is
            (None, time, None).
        begun: the number of the last job that the worker has acknowledged as read; 0 before the first.

    Raises:
        OSError: no process can be started (the host is out of processes or memory).
    """

    def __init__(self, build: str) -> None:
        self._garbled = False
        self.begun = 0
        bound = "bound" if threading.current_thread() is threading.main_thread() else "free"
        command = [sys.executable, "-m", "snip_megatron.runtime.sidecar.worker", str(os.getpid()), build, bound]
        # SIGTERM is for the ranks, which save a checkpoint. The worker ends with its pipe.
        with blocked_in_children():
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=worker_environment()
            )
        self._jobs: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[int | None, float, SidecarResult | None]] = queue.SimpleQueue()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            for target, stream in ((self._write, self._process.stdin), (self._read, self._process.stdout)):
                threading.Thread(target=target, args=(stream,), name="snip-sidecar", daemon=True).start()
        except RuntimeError as error:  # no further thread can be started
            self.kill()
            raise OSError(str(error)) from None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, number: int, payload: bytes) -> None:
        """Queue a job for the writing thread, without blocking."""
        self._jobs.put((number, payload))

    def kill(self) -> None:
        """End the process in any state and reap it. SIGKILL also ends a stopped process."""
        self._process.kill()
        self._jobs.put(None)
        try:
            self._process.wait(timeout=_REAP_S)
        except subprocess.TimeoutExpired:  # it is inside the kernel, for example on a file system that hangs
            threading.Thread(target=self._process.wait, name="snip-sidecar-reaper", daemon=True).start()

    def how_it_ended(self) -> str:
        """Return one line about the end of a process whose pipe has closed. The process is killed if it still runs."""
        if self._garbled:
            self.kill()
            return "the solver process sent something that is no answer; it was killed"
        try:
            code = self._process.wait(timeout=0.05)
        except subprocess.TimeoutExpired:  # it closed its pipe but still runs
            self.kill()
            return "the solver process closed its pipe"
        self._jobs.put(None)
        if code < 0:
            name = signal.Signals(-code).name if -code in signal.Signals._value2member_map_ else f"signal {-code}"
            hint = " (the kernel does this when memory runs out)" if -code == signal.SIGKILL else ""
            return f"the solver process was killed by {name}{hint}"
        return f"the solver process ended with exit code {code}"

    def _write(self, stream: BinaryIO) -> None:
        try:
            with stream:
                while (job := self._jobs.get()) is not None:
                    write_frame(stream, *job)
        except OSError:  # the process has ended, which the reading thread reports
            pass

    def _read(self, stream: BinaryIO) -> None:
        try:
            with stream:
                while (frame := read_frame(stream)) is not None:
                    number, payload = frame
                    if not payload:
                        self.begun = number
                        continue
                    answer = pickle.loads(payload)  # our own child wrote it, to a pipe that no other process holds
                    if not isinstance(answer, SidecarResult):
                        raise BrokenFrameError("the message is no answer")
                    self.answers.put((number, time.monotonic(), answer))
        except Exception:  # unpickling may raise anything; the process is not usable any more
            self._garbled = True
        finally:
            self.answers.put((None, time.monotonic(), None))
