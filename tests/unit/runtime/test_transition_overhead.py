"""How much longer steps took after an update or an adoption, from their times alone."""

from __future__ import annotations

import pytest

from snip_megatron.runtime.transition_overhead import TransitionCost, TransitionOverhead


def run(overhead: TransitionOverhead, *seconds: float) -> list[TransitionCost]:
    return [found for s in seconds if (found := overhead.step(s)) is not None]


def test_an_update_is_compared_with_the_steps_before_it() -> None:
    overhead = TransitionOverhead()
    assert run(overhead, 9.0, 1.0, 1.0, 1.0) == []
    assert overhead.begin("update", 4, 7) is None
    assert run(overhead, 1.5, 1.0) == []
    (found,) = run(overhead, 1.25)
    assert found == TransitionCost("update", 4, 7, 3, pytest.approx(0.75))


def test_an_adoption_is_compared_with_the_steps_after_it() -> None:
    overhead = TransitionOverhead()
    run(overhead, 9.0, 1.0, 1.0)
    overhead.begin("adopt", 3, 7)
    assert run(overhead, 20.0, 0.5, 0.6, 0.5, 0.5, 0.5, 9.0) == []
    assert run(overhead, 0.5) == [TransitionCost("adopt", 3, 7, 3, pytest.approx(19.6))]
    overhead.begin("update", 11, 8)  # held against the new map's steps
    (found,) = run(overhead, 0.7, 0.5, 0.5)
    assert found.wait_s == pytest.approx(0.2)


def test_an_adoption_ends_the_account_of_its_update() -> None:
    overhead = TransitionOverhead()
    run(overhead, 1.0, 1.0)
    overhead.begin("update", 2, 1)
    run(overhead, 1.5, 1.0)
    assert overhead.begin("adopt", 4, 1) == TransitionCost("update", 2, 1, 2, pytest.approx(0.5))
