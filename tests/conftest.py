"""Markers and workers by folder, warm ranks, process groups of one rank, and settings of property tests."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

TESTS = Path(__file__).resolve().parent
# Under xdist (--dist loadgroup) a group stays on one worker. Ranks share a server of warm processes; commands, mostly
# one process, run beside them. The files of tests/distributed from LATER_RANKS on are a group of their own, so that two
# workers have about as much to do: 320 s with tests/faults, and 280 s.
GROUPS = {"distributed": "ranks", "e2e": "commands", "faults": "ranks", "gpu": "ranks", "slurm": "slurm"}
LATER_RANKS = "test_layout_matrix.py"

# A deadline would assert a time; derandomised, a failure on one machine is a failure on every machine.
settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")


def cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def warm() -> Iterator[Any]:
    """One server of warm ranks for all tests of a worker that use it."""
    from warm_ranks import WarmRanks

    server = WarmRanks()
    yield server
    server.close()


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Any]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model_parallel_of_one(one_rank: None) -> Iterator[None]:
    """Megatron's process groups over this process alone."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


@pytest.fixture(autouse=True)
def torch_stays_as_it_is() -> Iterator[None]:
    """Fail a test that leaves torch patched for the CPU, which would change the tests after it on the same worker.

    Commands that import Megatron, as ``snip doctor``, patch torch. They run in a process of their own.
    """
    yield
    patches = sys.modules.get("snip_megatron.megatron.cpu_device")
    assert patches is None or not patches.is_installed(), "the test has patched torch in this process"


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_gpu = None
    for item in items:
        if not item.path.is_relative_to(TESTS):
            continue
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in GROUPS:
            item.add_marker(getattr(pytest.mark, folder))
            later = folder == "distributed" and item.path.name >= LATER_RANKS
            item.add_marker(pytest.mark.xdist_group("later ranks" if later else GROUPS[folder]))
        elif "interpreter" in item.fixturenames:  # tests/unit/conftest.py: one process for all of them
            item.add_marker(pytest.mark.xdist_group("interpreter"))
        if folder == "gpu":
            if skip_gpu is None:
                skip_gpu = not cuda_is_available()
            if skip_gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
