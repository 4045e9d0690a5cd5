"""The benchmark of an update at the size of a cluster, where it is small."""

import pytest

from benchmarks.reliability.scale import run_case


@pytest.mark.parametrize("ranks", [1024, 2048])
def test_a_rank_exchanges_what_the_plan_says(ranks: int) -> None:
    """With 1,024 ranks, each expert is on one data parallel rank alone."""
    result = run_case("a rank", "experts-256", 16, ranks)
    assert result["as_planned"]
    assert ("expert data" in result["collectives"]) == (ranks > 1024)
