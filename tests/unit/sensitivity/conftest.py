"""One small Llama, trained once a session, and what brute force says about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from snip_megatron.statistics.table import StatisticsTable

from . import small_llama
from .brute_force import true_drift, true_loss_change
from .reference_recorder import record
from .small_llama import Trained

STEPS, SEQUENCES, SEED = 120, 16, 1


@contextmanager
def one_thread() -> Iterator[None]:
    """The same sums whatever the machine's cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def trained() -> Trained:
    with one_thread():
        return small_llama.train(small_llama.corpus(), STEPS, SEQUENCES, SEED)


@pytest.fixture(scope="session")
def probe_batch() -> tuple[Tensor, Tensor]:
    return small_llama.batch(small_llama.corpus(), SEQUENCES, 999)


@pytest.fixture(scope="session")
def table(trained: Trained, probe_batch: tuple[Tensor, Tensor]) -> StatisticsTable:
    with one_thread():
        return record(trained, *probe_batch)


@dataclass(frozen=True)
class Truth:
    """Every option in fp4 alone: drift [linears, 3] and change of the loss by fprop [linears]."""

    drift: np.ndarray
    loss: np.ndarray


@pytest.fixture(scope="session")
def truth(trained: Trained, probe_batch: tuple[Tensor, Tensor]) -> Truth:
    data = small_llama.corpus()
    batches = [small_llama.batch(data, 4 * SEQUENCES, 5000 + i) for i in range(2)]
    with one_thread():
        return Truth(true_drift(trained, [probe_batch], "fp4"), true_loss_change(trained, batches, "fp4"))
