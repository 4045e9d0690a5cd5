"""Trainings that start side by side and train one after the other: the processes of :mod:`benchmarks.job`."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.common import ROOT

_POLL_S = 0.05
_ANSWERS = 600.0  # seconds in which imports end, or never


@dataclass(frozen=True)
class Outcome:
    """How a turn ended.

    Attributes:
        printed: standard output of all ranks.
        error: the last line of the error output of the first rank that failed. None if all succeeded.
        seconds: from the start of the turn to the end of the last rank.
    """

    printed: str
    error: str | None
    seconds: float


class Training:
    """The ranks of one training on this host. As a context manager it leaves no process behind.

    Args:
        ranks: number of ranks. Each uses the GPU with its number.
        arguments: arguments of the training entry.
        folder: working directory and folder of the output. It is created if it does not exist.
        variables: environment variables in addition to those of this process. Its ``PYTHONPATH`` comes first.
    """

    def __init__(
        self, ranks: int, arguments: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
        threads = {"OMP_NUM_THREADS": "1"} if ranks > 1 else {}  # as torchrun does: more would take each other's cores
        common = {**threads, **os.environ, "LOCAL_WORLD_SIZE": str(ranks), **rendezvous, **(variables or {})}
        paths = (str(ROOT), (variables or {}).get("PYTHONPATH"), os.environ.get("PYTHONPATH"))
        common["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = [sys.executable, "-u", "-m", "benchmarks.jobs.process", str(folder), *arguments]
        self._ranks = [
            self._start(command, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, rank) for rank in range(ranks)
        ]

    def _start(self, command: Sequence[str], environment: dict[str, str], rank: int) -> subprocess.Popen[str]:
        with open(self._output(rank), "w") as output, open(self._errors(rank), "w") as errors:
            return subprocess.Popen(
                command, cwd=self._folder, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=errors,
                text=True, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Training:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def wait_ready(self) -> None:
        """Return when every rank waits for its turn or has ended."""
        until = time.monotonic() + _ANSWERS
        while time.monotonic() < until and not all(map(self._is_ready, range(len(self._ranks)))):
            time.sleep(_POLL_S)

    def take_turn(self, limit: float) -> Outcome:
        """Train. Ranks that have not ended after ``limit`` seconds are ended."""
        started = time.monotonic()
        for process in self._ranks:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has failed already, and says why
                process.stdin.write("turn\n")
                process.stdin.close()
        late = not self._ended(started + limit)
        seconds = time.monotonic() - started
        self._end()
        error = f"did not end within {limit:.0f} s" if late else self._error()
        return Outcome("".join(self._read(self._output(r)) for r in range(len(self._ranks))), error, seconds)

    def _ended(self, until: float) -> bool:
        """Wait for all ranks, or until one fails, because its peers would wait for it."""
        while time.monotonic() < until:
            codes = [process.poll() for process in self._ranks]
            if all(code is not None for code in codes) or any(codes):
                return True
            time.sleep(_POLL_S)
        return False

    def _error(self) -> str | None:
        codes = [process.returncode for process in self._ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        # A rank that this ended (negative) did not fail by itself.
        for rank in sorted(failed, key=lambda rank: codes[rank] < 0):
            return last_error(self._read(self._errors(rank))) or f"rank {rank}: exit code {codes[rank]}"
        return None

    def _end(self) -> None:
        """End the ranks and the processes that they started."""
        for process in self._ranks:
            if process.stdin is not None and not process.stdin.closed:
                process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _is_ready(self, rank: int) -> bool:
        return (self._folder / f"ready.{rank}").exists() or self._ranks[rank].poll() is not None

    def _output(self, rank: int) -> Path:
        return self._folder / f"stdout.{rank}"

    def _errors(self, rank: int) -> Path:
        return self._folder / f"stderr.{rank}"

    @staticmethod
    def _read(path: Path) -> str:
        return path.read_text(encoding="utf-8", errors="replace")


def last_error(text: str) -> str:
    """Return the most informative line of a failed process's error output: the last exception, else the last line."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line.strip()) for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _is_error(line)]
    return (errors or lines or [""])[-1][:500]


def _is_error(line: str) -> bool:
    """Return whether a line has the form ``some.Error: what happened``, or is an error of the entry."""
    name, colon, _ = line.partition(":")
    return bool(colon) and (name == "pretrain_gpt" or (name.endswith(("Error", "Exception")) and " " not in name))


def _free_port() -> int:
    """Return a free port below those that the system takes for connections, so that it is still free at the turn."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("", port))
            return port
