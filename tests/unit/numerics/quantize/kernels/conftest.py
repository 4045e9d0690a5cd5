"""Triton's quantisers, and replays: ``replay.cpp``, really compiled, over a driver whose kernels run on the host."""

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from snip_megatron.numerics.quantize.kernels import replay
from snip_megatron.numerics.quantize.kernels.replay import launcher

from .interpreter import Quantizers
from .replay_library import Library


@pytest.fixture(scope="session")
def quantizers(interpreter: ProcessPoolExecutor) -> Quantizers:
    return Quantizers(interpreter)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def extension(library: Library) -> Any:
    result = replay.compiled_extension()
    launcher.value = library.address("launch")
    result.configure(replay.CONSTANTS, lambda _: 0)
    return result
