"""The process of interpreted kernels and a recorded run, for tests of several rooms."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from triton_interpreter import choose_interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process, started by its first job, in which Triton interprets its kernels."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), choose_interpreter) as pool:
        yield pool


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import synthetic_run

    return synthetic_run.write_run(tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture(autouse=True)
def nothing_of_megatron_is_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """A C++ compiler takes half a minute for Megatron's fused functions. The entry on a CPU compiles none either."""
    if "megatron" not in request.path.parts:
        yield
        return
    import torch

    with torch.compiler.set_stance("force_eager"):
        yield
