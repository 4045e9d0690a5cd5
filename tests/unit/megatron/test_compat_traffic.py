"""Which bytes of collectives are counted. The process group is torch's fake one, which exchanges nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.testing._internal.distributed.fake_pg import FakeStore

from snip_megatron.megatron.compat import Traffic

RANKS = 4
MIB = 2**20
PARTS = [MIB, 5 * MIB, 2 * MIB, 0]  # rank 1 keeps 5 MiB


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    counting = Traffic()
    undo = counting.install()
    yield counting
    undo()


def mib(count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(count * MIB // dtype.itemsize, dtype=dtype)


def bytes_of(count: int) -> torch.Tensor:
    return mib(count, torch.uint8)


def coalesced(collective: Callable[[], None]) -> None:
    with _coalescing_manager():
        collective()
        collective()


@pytest.mark.parametrize(
    ("collective", "kind", "sent"),
    [
        (lambda: dist.all_gather_into_tensor(mib(8), mib(2)), "all_gather", 6),
        (lambda: dist.all_gather_into_tensor(mib(8, torch.uint8), mib(2, torch.uint8)), "all_gather", 6),
        (lambda: dist.all_gather([mib(2) for _ in range(RANKS)], mib(2)), "all_gather", 6),
        (lambda: coalesced(lambda: dist.all_gather_into_tensor(mib(8), mib(2))), "all_gather", 12),
        (lambda: dist.reduce_scatter_tensor(mib(2), mib(8)), "reduce_scatter", 6),
        (lambda: dist.reduce_scatter(mib(2), [mib(2) for _ in range(RANKS)]), "reduce_scatter", 6),
        (lambda: coalesced(lambda: dist.reduce_scatter_tensor(mib(2), mib(8))), "reduce_scatter", 12),
        (lambda: dist.all_reduce(mib(8, torch.float32)), "all_reduce", 12),
        (lambda: dist.all_reduce(mib(8), async_op=True), "all_reduce", 12),
        (lambda: coalesced(lambda: dist.all_reduce(mib(8))), "all_reduce", 24),
        (lambda: dist.all_to_all_single(mib(8), mib(8)), "all_to_all", 6),
        (lambda: dist.all_to_all_single(bytes_of(8), bytes_of(8), PARTS, PARTS), "all_to_all", 3),
        (lambda: dist.broadcast(mib(8), 0), "broadcast", 6),
        (lambda: dist.send(mib(3), 2), "send", 3),
    ],
)
def test_bytes_are_those_that_a_ring_sends(
    traffic: Traffic, collective: Callable[[], None], kind: str, sent: int
) -> None:
    collective()
    assert traffic.take() == {kind: sent * MIB}
    assert traffic.take() == {}


def test_a_group_of_one_sends_nothing_and_an_end_is_one(traffic: Traffic) -> None:
    alone = dist.new_group([1])
    dist.all_reduce(mib(1), group=alone)
    assert traffic.take() == {}
    second = Traffic()
    undo = second.install()
    dist.all_reduce(mib(2))
    undo()
    dist.all_reduce(mib(2))
    assert second.take() == {"all_reduce": 3 * MIB}
    assert traffic.take() == {"all_reduce": 6 * MIB}
