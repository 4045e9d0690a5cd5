"""The matrices of layouts and of resumes. The suite runs a part of them, ``pytest -m matrix`` the rest."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from agreement import agree, worst_differences
from layouts import FAST, LAYOUTS, MODELS, LayoutRuns
from resumes import FAST_OTHER, OTHER_LAYOUT, RESHARDED_POINTS, SAME_LAYOUT, ResumeRuns
from warm_ranks import WarmRanks


@pytest.fixture(scope="module")
def layouts(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> LayoutRuns:
    return LayoutRuns(warm, tmp_path_factory.mktemp("layouts"), steps=3, lag=1)


@pytest.fixture(scope="module")
def resumes(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> ResumeRuns:
    return ResumeRuns(warm, tmp_path_factory.mktemp("resumes"))


BASES = {model.base for model in MODELS.values()}


def rows(fast: Iterable[Any], full: Iterable[Any]) -> list[Any]:
    """The rows of a matrix, those that are not ``fast`` on request. Tuples are the arguments of a test."""
    fast = list(fast)
    slow = [row if isinstance(row, tuple) else (row,) for row in full if row not in fast]
    return [*fast, *(pytest.param(*row, marks=pytest.mark.matrix) for row in slow)]


@pytest.mark.parametrize("name", rows(FAST, [name for name in LAYOUTS if name not in BASES]))
def test_a_layout_measures_maps_and_trains_like_one_rank(layouts: LayoutRuns, name: str) -> None:
    if "--num-distributed-optimizer-instances" in LAYOUTS[name].arguments:
        pytest.importorskip("einops", reason="Megatron's groups need einops")
    layouts.check(name)


def test_every_column_is_measured(layouts: LayoutRuns) -> None:
    table = layouts.trained("world-1").table
    assert table.non_finite() == []
    assert table.tokens == table.tokens_per_step == 4 * 128
    assert [row.stage for row in layouts.trained("pp2-virtual").table.linears] == ([0] * 4 + [1] * 4) * 2
    for name, array in table.arrays.items():
        # Nothing branches off above the last boundary.
        rows = array[:-1] if name in ("boundary.branch_h2", "boundary.branch_r2") else array
        assert (rows > 0).all(), name


@pytest.mark.parametrize(
    ("name", "point"),
    rows(
        ((name, point) for name, case in SAME_LAYOUT.items() for point in case.fast),
        ((name, point) for name, case in SAME_LAYOUT.items() for point in case.points),
    ),
)
def test_resumed_is_uninterrupted_bit_for_bit(resumes: ResumeRuns, name: str, point: int) -> None:
    resumes.resume(name, point)


@pytest.mark.parametrize(
    ("source", "target", "point"),
    rows(FAST_OTHER, ((*places, point) for places in OTHER_LAYOUT for point in RESHARDED_POINTS)),
)
def test_another_layout_takes_over_the_update_on_its_way(
    resumes: ResumeRuns, source: str, target: str, point: int
) -> None:
    state = resumes.move(source, target, point)
    assert state == "no map, update on its way" or (source, target, point) not in FAST_OTHER


@pytest.mark.parametrize("name", rows(["world-1"], ["pp2-virtual"]))
def test_a_checkpoint_goes_to_plain_megatron_and_one_of_its_comes_back(resumes: ResumeRuns, name: str) -> None:
    resumes.leave_snip(name, 7)
    resumes.enter_snip(name)


def test_what_differs_is_found(layouts: LayoutRuns) -> None:
    table = layouts.trained("world-1").table
    assert agree(worst_differences(table, table))
    changed = replace(table, arrays=table.arrays | {"linear.x2": table.linear["x2"] * (1 + 3e-5)})
    result = worst_differences(table, changed)
    assert not agree(result)
    assert result["value"] == pytest.approx(3e-5, rel=1e-3)
    assert result["column"] == "linear.x2"
    # Flips touch some layers' entries of a kind of linear, a fault touches all of them.
    for factor, layers, good in ((1.05, 2, True), (1.0 + 2e-5, 4, False), (1.2, 1, False), (np.nan, 1, False)):
        c2 = table.by_format["c2"].copy()
        c2[: 4 * layers : 4] *= factor
        moved = worst_differences(table, replace(table, arrays=table.arrays | {"by_format.c2": c2}))
        assert agree(moved) is good, (factor, layers, moved)
    # A last bit of the update is more of a small drift than of a large one.
    for column, good in ((0, True), (-1, False)):
        drift2 = table.arrays["drift2"].copy()
        drift2[:, column] *= 1 + 5e-5
        assert agree(worst_differences(table, replace(table, arrays=table.arrays | {"drift2": drift2}))) is good
