"""What measured collectives say about other sizes and groups, and a measurement over real gloo ranks."""

from __future__ import annotations

import pytest

from snip_megatron.errors import SnipError
from snip_megatron.timing.calibration.collectives import measure_collectives
from snip_megatron.timing.collectives import COLLECTIVES, Exchange, MeasuredCollectives

MEASURED = MeasuredCollectives(
    {
        Exchange("all_gather", "bf16", 2, 1000): 1e-5,
        Exchange("all_gather", "bf16", 2, 3000): 2e-5,
        Exchange("all_gather", "bf16", 8, 1000): 4e-5,
    }
)


@pytest.mark.parametrize(("sent", "seconds"), [(1, 1e-5), (1000, 1e-5), (2000, 1.5e-5), (3000, 2e-5), (6000, 4e-5)])
def test_sizes_between_and_beyond_those_measured(sent: int, seconds: float) -> None:
    assert MEASURED.seconds("all_gather", "bf16", 2, sent) == pytest.approx(seconds)


def test_the_nearest_group_of_the_same_kind() -> None:
    assert MEASURED.seconds("all_gather", "bf16", 3, 500) == 1e-5
    assert MEASURED.seconds("all_gather", "bf16", 6, 500) == 4e-5
    assert MEASURED.seconds("all_gather", "uint8", 2, 500) is None
    assert MEASURED.ranks() == [2, 8]


def test_collectives_of_two_processes() -> None:
    found = measure_collectives("cpu", 2)
    assert {(key.collective, key.dtype) for key in found} == {
        *((kind, "bf16") for kind in COLLECTIVES), ("all_gather", "uint8"), ("all_to_all", "uint8"),
    }  # fmt: skip
    assert {(key.ranks, key.bytes) for key in found} == {(2, 4**5), (2, 4**8)}
    assert min(found.values()) > 0


def test_a_machine_without_so_many_gpus_says_so() -> None:
    with pytest.raises(SnipError, match="--ranks 999: this machine has"):
        measure_collectives("cuda", 999)
