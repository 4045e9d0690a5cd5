"""Runs a measurement over several GPUs, or processes on a CPU, of this machine: one process for each rank."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from snip_megatron.errors import SnipError

_MOST_PROCESSES = 64
_PATIENCE = timedelta(seconds=120)


@dataclass(frozen=True)
class Rank:
    """One of several ranks on this machine.

    Attributes:
        device_type: "cuda" (NCCL, one GPU for each rank) or "cpu" (gloo).
        rank, size: its number, and the number of ranks.
        store: a file in which the ranks find each other.
    """

    device_type: str
    rank: int
    size: int
    store: str

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return torch.device(self.device_type, self.rank) if self.device_type == "cuda" else torch.device("cpu")

    def join(self) -> None:
        """Make the default process group of all ranks, with this rank's device as the current one."""
        if self.device_type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "nccl" if self.device_type == "cuda" else "gloo"
        method = f"file://{self.store}"
        dist.init_process_group(backend, init_method=method, rank=self.rank, world_size=self.size, timeout=_PATIENCE)


def check_ranks(device_type: str, ranks: int) -> None:
    """Raise SnipError if nothing can be measured over ``ranks`` ranks on this machine."""
    if ranks < 1:
        raise SnipError(f"--ranks {ranks}: must be a whole number of 1 or more")
    if device_type == "cpu" and ranks > _MOST_PROCESSES:
        raise SnipError(f"--ranks {ranks}: a CPU takes at most {_MOST_PROCESSES}")
    if device_type == "cuda" and ranks > torch.cuda.device_count():
        raise SnipError(f"--ranks {ranks}: this machine has {torch.cuda.device_count()} GPUs")


def in_ranks[Result](device_type: str, ranks: int, measure: Callable[[Rank], Result], what: str) -> list[Result]:
    """Return what ``measure`` returns on every rank, each in a process of its own.

    Args:
        device_type: "cuda" or "cpu".
        ranks: number of ranks, 2 or more.
        measure: a function that can be pickled. It joins the ranks.
        what: what is measured, for the error.

    Raises:
        SnipError: There are fewer GPUs than ranks, or a rank failed.
    """
    check_ranks(device_type, ranks)
    with tempfile.TemporaryDirectory() as folder:
        each = [Rank(device_type, rank, ranks, str(Path(folder) / "store")) for rank in range(ranks)]
        with ProcessPoolExecutor(ranks, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                return list(pool.map(partial(_measured, measure), each))
            except (RuntimeError, BrokenProcessPool) as error:
                why = " ".join(str(error).split())[:160]
                raise SnipError(f"--ranks {ranks}: {what} cannot be measured: {why}") from None


def _measured[Result](measure: Callable[[Rank], Result], rank: Rank) -> Result:
    """Run one rank. Any error becomes one that the first process can read, whatever modules it has imported."""
    try:
        return measure(rank)
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None
