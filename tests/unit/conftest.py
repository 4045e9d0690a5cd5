"""Process groups of one, for tests of several rooms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


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
