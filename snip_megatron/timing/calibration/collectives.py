"""Measures the collectives of tensor parallel linears over several GPUs, or processes on a CPU, of this machine."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from snip_megatron.errors import SnipError
from snip_megatron.timing.collectives import Exchange

_SHARDS = {"cuda": tuple(4**power for power in range(8, 14)), "cpu": (4**5, 4**8)}
"""Bytes of a shard by the type of the device: 64 KiB to 64 MiB on a GPU, few on a CPU, whose times say nothing."""
_ROUNDS, _WARM = {"cuda": 20, "cpu": 3}, 2
_MEASURED = (
    ("all_gather", "bf16"),
    ("all_gather", "uint8"),
    ("reduce_scatter", "bf16"),
    ("all_to_all", "bf16"),
    ("all_to_all", "uint8"),
)
_DTYPES = {"bf16": torch.bfloat16, "uint8": torch.uint8}
_MOST_PROCESSES = 64
_PATIENCE = timedelta(seconds=120)


def check_ranks(device_type: str, ranks: int) -> None:
    """Raise SnipError if nothing can be measured over ``ranks`` ranks on this machine."""
    if ranks < 1:
        raise SnipError(f"--ranks {ranks}: must be a whole number of 1 or more")
    if device_type == "cpu" and ranks > _MOST_PROCESSES:
        raise SnipError(f"--ranks {ranks}: a CPU takes at most {_MOST_PROCESSES}")
    if device_type == "cuda" and ranks > torch.cuda.device_count():
        raise SnipError(f"--ranks {ranks}: this machine has {torch.cuda.device_count()} GPUs")


def measure_collectives(device_type: str, ranks: int) -> dict[Exchange, float]:
    """Measure all-gathers, reduce-scatters and all-to-alls of several sizes in bf16 and in bytes.

    Each rank has a process of its own. All collectives take turns. A time is the median of the rounds on the slowest
    rank.

    Args:
        device_type: "cuda" (NCCL, one GPU for each rank) or "cpu" (gloo).
        ranks: number of ranks. Nothing is measured over one.

    Raises:
        SnipError: There are fewer GPUs than ranks, or a rank failed.
    """
    check_ranks(device_type, ranks)
    if ranks == 1:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        of_rank = partial(_of_rank, device_type, ranks, str(Path(folder) / "store"))
        with ProcessPoolExecutor(ranks, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                taken = list(pool.map(of_rank, range(ranks)))
            except (RuntimeError, BrokenProcessPool) as error:
                why = " ".join(str(error).split())[:160]
                raise SnipError(f"--ranks {ranks}: the collectives cannot be measured: {why}") from None
    return {key: float(f"{max(each[key] for each in taken):.5g}") for key in taken[0]}


def _of_rank(device_type: str, ranks: int, store: str, rank: int) -> dict[Exchange, float]:
    """Return the median seconds of one rank. Any error becomes one that the first process can read."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    try:
        if device_type == "cuda":
            torch.cuda.set_device(device)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=_PATIENCE)
        try:
            return _measured(device, ranks)
        finally:
            dist.destroy_process_group()
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def _measured(device: torch.device, ranks: int) -> dict[Exchange, float]:
    calls = {
        Exchange(kind, dtype, ranks, (ranks - 1) * shard): _call(kind, _DTYPES[dtype], shard, ranks, device)
        for shard in _SHARDS[device.type]
        for kind, dtype in _MEASURED
    }
    take = _on_gpu if device.type == "cuda" else _on_cpu
    rounds = [take(list(calls.values()), device) for _ in range(_WARM + _ROUNDS[device.type])]
    return {key: statistics.median(times) for key, times in zip(calls, zip(*rounds[_WARM:], strict=True), strict=True)}


def _call(kind: str, dtype: torch.dtype, shard: int, ranks: int, device: torch.device) -> Callable[[], object]:
    """Return a collective in which each rank's part for another has ``shard`` bytes."""
    small = torch.zeros(shard // dtype.itemsize, dtype=dtype, device=device)
    large = small.repeat(ranks)
    if kind == "all_gather":
        return partial(dist.all_gather_into_tensor, large, small)
    if kind == "reduce_scatter":
        return partial(dist.reduce_scatter_tensor, small, large)
    return partial(dist.all_to_all_single, torch.empty_like(large), large)


def _on_cpu(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    taken = []
    for call in calls:
        dist.barrier()
        started = time.perf_counter()
        call()
        taken.append(max(time.perf_counter() - started, 1e-9))
    return taken


def _on_gpu(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Time calls by events. A small all-reduce before each makes the GPUs begin together."""
    together = torch.zeros(1, device=device)
    events = []
    for call in calls:
        dist.all_reduce(together)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in events]
