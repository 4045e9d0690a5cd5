"""The group of Megatron's linears."""

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def group(one_rank: dist.ProcessGroup) -> dist.ProcessGroup:
    return one_rank
