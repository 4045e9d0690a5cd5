"""Process groups of one and the process of interpreted kernels, for tests of several rooms."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch.distributed as dist
from triton_interpreter import choose_interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process, started by its first job, in which Triton interprets its kernels."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), choose_interpreter) as pool:
        yield pool


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model_parallel_of_one(one_rank: None) -> Iterator[None]:
    """Megatron's process groups over this process alone."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
