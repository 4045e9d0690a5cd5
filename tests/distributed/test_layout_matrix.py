"""The fast part of the matrices of layouts and resumes; ``python -m layout_matrix --full`` runs all of them."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
from agreement import agree, worst_differences
from layouts import FAST, LayoutRuns, loss_differences, passed
from resumes import FAST_OTHER, SAME_LAYOUT, ResumeRuns
from warm_ranks import WarmRanks


@pytest.fixture(scope="module")
def layouts(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> LayoutRuns:
    return LayoutRuns(warm, tmp_path_factory.mktemp("layouts"), steps=3, lag=1)


@pytest.fixture(scope="module")
def resumes(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> ResumeRuns:
    return ResumeRuns(warm, tmp_path_factory.mktemp("resumes"))


# -- layouts ---------------------------------------------------------------------------------------------------


REPEATS = ("tp2", "recompute-selective")
"""What tp2-sp and recompute-full show as well: on request."""
TRAINED = [name for name in FAST if name not in REPEATS]
INSTANCES = pytest.param(
    "dp2-two-distributed-optimizers",
    marks=pytest.mark.skipif(importlib.util.find_spec("einops") is None, reason="Megatron's groups need einops"),
)


@pytest.mark.parametrize(
    "name", [*TRAINED, INSTANCES, *(pytest.param(name, marks=pytest.mark.matrix) for name in REPEATS)]
)
def test_a_layout_measures_maps_and_trains_like_one_rank(layouts: LayoutRuns, name: str) -> None:
    row = layouts.compare(name)
    assert row["passed"], row
    assert row["steps"] == 3
    assert row["adopted"][0][1] > 0  # a map that changes formats


def test_every_column_is_measured(layouts: LayoutRuns) -> None:
    table = layouts.trained("world-1").table
    assert table.non_finite() == []
    assert table.tokens == table.tokens_per_step == 4 * 128
    assert [row.stage for row in layouts.trained("pp2-virtual").table.linears] == ([0] * 4 + [1] * 4) * 2
    assert {row.stage for row in layouts.trained("pp3-embedding-and-loss-alone").table.linears} == {1}
    for name, array in table.arrays().items():
        # Nothing branches off above the last boundary.
        rows = array[:-1] if name in ("boundary.branch_h2", "boundary.branch_r2") else array
        assert (rows > 0).all(), name


# -- resumes ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "point"), [(n, p) for n, case in SAME_LAYOUT.items() for p in case.fast])
def test_resumed_is_uninterrupted_bit_for_bit(resumes: ResumeRuns, name: str, point: int) -> None:
    row = resumes.resume(name, point)
    assert row["passed"], row


@pytest.mark.parametrize(
    ("source", "target", "point"),
    [*FAST_OTHER, pytest.param("dp2-sharded", "world-1-sharded", 4, marks=pytest.mark.matrix)],
)
def test_another_layout_takes_over_the_update_on_its_way(
    resumes: ResumeRuns, source: str, target: str, point: int
) -> None:
    row = resumes.move(source, target, point)
    assert row["state"] == "no map, update on its way"
    assert row["passed"], row


def test_a_checkpoint_goes_to_plain_megatron_and_one_of_its_comes_back(resumes: ResumeRuns) -> None:
    away = resumes.leave_snip("world-1", 7)
    assert away["passed"], away
    back = resumes.enter_snip("world-1")
    assert back["passed"], back


# -- the judgement ---------------------------------------------------------------------------------------------
def test_what_differs_is_found(layouts: LayoutRuns) -> None:
    base = layouts.trained("world-1")
    table = base.table
    assert agree(worst_differences(table, table))
    changed = replace(table, linear=dict(table.linear, x2=table.linear["x2"] * (1 + 3e-5)))
    found = worst_differences(table, changed)
    assert not agree(found)
    assert found["value"] == pytest.approx(3e-5, rel=1e-3)
    assert found["column"] == "linear.x2"
    # Flips touch some layers' entries of a kind of linear, a fault touches all of them.
    for factor, layers, good in ((1.05, 2, True), (1.0 + 2e-5, 4, False), (1.2, 1, False), (np.nan, 1, False)):
        c2 = table.by_format["c2"].copy()
        c2[: 4 * layers : 4] *= factor
        moved = worst_differences(table, replace(table, by_format=dict(table.by_format, c2=c2)))
        assert agree(moved) is good, (factor, layers, moved)
    # A last bit of the update is more of a small drift than of a large one.
    for column, good in ((0, True), (-1, False)):
        drift2 = table.drift2.copy()
        drift2[:, column] *= 1 + 5e-5
        assert agree(worst_differences(table, replace(table, drift2=drift2))) is good
    figures = [(step, loss * (1 + 2e-3), norm) for step, loss, norm in base.figures]
    assert loss_differences(base.figures, figures)[0] == pytest.approx(2e-3)
    assert loss_differences(base.figures, figures[1:]) == (np.inf, np.inf)
    row = layouts.compare("tp2-sp")
    assert passed(row)
    assert not passed(row | {"statistics_agree": False})
    assert not passed(row | {"map_equal": False})
    assert not passed(row | {"worst_loss_difference": 2e-3})
    assert not passed(layouts.compare("recompute-full") | {"identical": False})
