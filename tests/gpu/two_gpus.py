"""A function that runs on two GPUs, whose processes form a group of NCCL."""

import socket
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2


def run_on_two_gpus(function: Callable[[int], None]) -> None:
    """Run ``function(rank)`` in a process for each GPU, or skip the test without two GPUs."""
    if torch.cuda.device_count() < RANKS:
        pytest.skip("needs two GPUs")
    with socket.socket() as result:
        result.bind(("127.0.0.1", 0))
        port = result.getsockname()[1]
    mp.spawn(_run, args=(port, function), nprocs=RANKS)


def _run(rank: int, port: int, function: Callable[[int], None]) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    function(rank)
    dist.destroy_process_group()
