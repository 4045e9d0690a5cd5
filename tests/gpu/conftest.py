"""What tests on a GPU need of it."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def hopper() -> Iterator[None]:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU (sm_90)")
    yield
    torch.cuda.empty_cache()
