"""One worker process and the two threads that keep rank 0 from ever waiting for its pipes."""

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

from snip_megatron.sidecar.messages import Answer, BrokenFrameError, read_frame, write_frame

# What torchrun, SLURM and NCCL tell a rank. A process that is no rank must not believe it is one.
_RANK_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "NCCL_", "GROUP_", "ROLE_", "PMI_", "PMIX_", "OMPI_")
_RANK_NAMES = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "SLURM_PROCID")
)


def worker_environment() -> dict[str, str]:
    """The parent's environment without rank and devices, with the parent's module path."""
    kept = {k: v for k, v in os.environ.items() if k not in _RANK_NAMES and not k.startswith(_RANK_PREFIXES)}
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return kept | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}


_REAP_S = 1.0  # a killed process is gone in a millisecond, unless it hangs in the kernel


class WorkerProcess:
    """A running worker. ``answers`` yields (number, arrival time, Answer), then (None, time, None) when it ended.

    Raises OSError where no process can be started (the host is out of processes or memory).
    """

    def __init__(self, build: str) -> None:
        self._garbled = False
        bound = "bound" if threading.current_thread() is threading.main_thread() else "free"
        command = [sys.executable, "-m", "snip_megatron.sidecar.worker", str(os.getpid()), build, bound]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=worker_environment()
        )
        self._jobs: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[int | None, float, Answer | None]] = queue.SimpleQueue()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            for target, stream in ((self._write, self._process.stdin), (self._read, self._process.stdout)):
                threading.Thread(target=target, args=(stream,), name="snip-sidecar", daemon=True).start()
        except RuntimeError as error:  # no thread left for us
            self.kill()
            raise OSError(str(error)) from None

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, number: int, payload: bytes) -> None:
        """Hand over a job; returns at once."""
        self._jobs.put((number, payload))

    def kill(self) -> None:
        """End the process, whatever state it is in, and reap it. SIGKILL also ends a stopped process."""
        self._process.kill()
        self._jobs.put(None)
        try:
            self._process.wait(timeout=_REAP_S)
        except subprocess.TimeoutExpired:  # inside the kernel, for instance on a file system that hangs
            threading.Thread(target=self._process.wait, name="snip-sidecar-reaper", daemon=True).start()

    def has_ended(self) -> bool:
        """Whether the process is known to be gone."""
        return self._process.poll() is not None

    def how_it_ended(self) -> str:
        """One line about a process whose pipe has ended."""
        if self._garbled:
            self.kill()
            return "the solver process sent something that is no answer; it was killed"
        try:
            code = self._process.wait(timeout=0.05)
        except subprocess.TimeoutExpired:  # it closed its pipe but lives: of no use any more
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
        except OSError:  # the process is gone: the reading thread tells
            pass

    def _read(self, stream: BinaryIO) -> None:
        try:
            with stream:
                while (frame := read_frame(stream)) is not None:
                    answer = pickle.loads(frame[1])  # of our own child, over a pipe that nobody else holds
                    if not isinstance(answer, Answer):
                        raise BrokenFrameError("the message is no answer")
                    self.answers.put((frame[0], time.monotonic(), answer))
        except Exception:  # whatever unpickling raises: this process is of no use any more
            self._garbled = True
        finally:
            self.answers.put((None, time.monotonic(), None))
