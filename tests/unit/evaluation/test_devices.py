"""Which GPUs the runs of a comparison get."""

from __future__ import annotations

import pytest

from snip_megatron.commands.compare import _devices
from snip_megatron.errors import SnipError


@pytest.mark.parametrize(
    ("gpus", "ranks", "per_gpu", "expected"),
    [
        ([], 1, None, [None]),
        ([], 2, 3, [None] * 3),
        (["0", "1"], 1, 2, ["0", "1", "0", "1"]),
        (["0"], 1, None, ["0"] * 8),
        (["0", "1", "2", "3", "4"], 2, None, ["0,1", "2,3"]),
        (["4", "5"], 2, 2, ["4,5", "4,5"]),
    ],
)
def test_a_run_of_several_ranks_has_as_many_gpus(
    gpus: list[str], ranks: int, per_gpu: int | None, expected: list[str | None]
) -> None:
    assert _devices(gpus, ranks, per_gpu) == expected


def test_too_few_gpus_and_no_run_are_refused() -> None:
    with pytest.raises(SnipError, match=r"training\.ranks: 2: a run needs as many GPUs, and 1 are used"):
        _devices(["0"], 2, None)
    with pytest.raises(SnipError, match="--per-gpu 0"):
        _devices([], 1, 0)
