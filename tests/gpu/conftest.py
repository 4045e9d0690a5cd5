"""What tests on a GPU need of it."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

# Transformer Engine loads the cuDNN of the CUDA toolkit if there is one. Where torch has loaded parts of its own cuDNN
# before, that one misses symbols. All tests, and the processes that they start, use torch's.
with contextlib.suppress(ImportError):
    if (cudnn := importlib.util.find_spec("nvidia.cudnn")) is not None:
        os.environ.setdefault("CUDNN_HOME", next(iter(cudnn.submodule_search_locations or ())))
if torch.cuda.is_available():
    with contextlib.suppress(Exception):  # a test that needs it imports it again, and fails
        import transformer_engine.pytorch  # noqa: F401


@pytest.fixture(scope="module")
def hopper() -> Iterator[None]:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU (sm_90)")
    yield
    torch.cuda.empty_cache()
