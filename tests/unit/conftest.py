"""The process of interpreted kernels, for tests of several rooms."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
from triton_interpreter import choose_interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process, started by its first job, in which Triton interprets its kernels."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), choose_interpreter) as pool:
        yield pool
