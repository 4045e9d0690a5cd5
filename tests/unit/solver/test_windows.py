"""Bounds from windows of the phases' worths: none of them excludes the optimum, and the search with them finds it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from snip_megatron.solver.limits import Limits
from snip_megatron.solver.phased import PhasedProblem, PhasedSolution, exact, solve_phased
from snip_megatron.solver.phased import combinations as combining
from snip_megatron.solver.phased.build import build_table
from snip_megatron.solver.phased.cells import profile
from snip_megatron.solver.phased.combinations import bounds_of_choices, combine, likely
from snip_megatron.solver.phased.prices import phased_gap, relax_phased
from snip_megatron.solver.phased.rounding import rounded
from snip_megatron.solver.phased.table import PhasedTable
from snip_megatron.solver.phased.windows import Windows, find_windows
from snip_megatron.solver.table import Ints

from .phased_oracles import random_phased

FOUR_KINDS = [("target", False), ("target", True), ("speedup", False), ("speedup", True)]


def binding(seed: int, kind: str, *, groups: bool) -> PhasedProblem:
    """A problem whose stages bind; with ``groups`` some items of different stages are decided together."""
    rng = np.random.default_rng([seed, 21])
    problem = random_phased(rng, 36, 3, 3, 3, kind=kind, tolerance=0.01, proportional=seed % 2 == 0)
    if groups:
        made = tuple(replace(item, group=f"g{i // 2}") if i < 8 else item for i, item in enumerate(problem.items))
        return replace(problem, items=made)
    return replace(problem, items=tuple(replace(item, keeps=()) for item in problem.items))


def best(problem: PhasedProblem, table: PhasedTable, monkeypatch: pytest.MonkeyPatch) -> Ints | None:
    """The columns of an optimum that was found without windows."""
    with monkeypatch.context() as patch:
        patch.setattr(exact, "NARROW_ABOVE", math.inf)
        solution = solve_phased(problem, deterministic_time=20)
    if solution.status == "infeasible":
        return None
    assert solution.status == "optimal"
    return columns_of(table, solution)


def columns_of(table: PhasedTable, solution: PhasedSolution) -> Ints:
    formats = [solution.phases[d.phases[0]].choices[d.ids[0]] for d in table.decisions]
    return np.array([table.formats.index(f) for f in formats])


def windows_of(table: PhasedTable, pick: Ints) -> tuple[Windows | None, float]:
    """Windows within the gap of the picks, and their Σ shifted loss."""
    relaxation = relax_phased(table)
    value = math.fsum(table.loss[np.arange(len(pick)), pick])
    return find_windows(table, relaxation, phased_gap(table, relaxation, pick)), value


@pytest.mark.parametrize(("kind", "groups"), FOUR_KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_no_bound_is_above_the_optimum(seed: int, kind: str, groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = binding(seed, kind, groups=groups)
    table = build_table(problem)
    pick = best(problem, table, monkeypatch)
    if pick is None:
        return
    windows, value = windows_of(table, rounded(table, relax_phased(table)))
    if windows is None:
        prices = relax_phased(table)  # only the phases' own targets bind, or no stage does
        assert prices.need_price == 0 or (kind == "target" and not prices.row_price[:, 1:].any())
        return
    rows = np.arange(len(pick))
    optimum, worth = math.fsum(table.loss[rows, pick]), table.worth(pick)
    met = [int(np.searchsorted(phase.high, w)) for phase, w in zip(windows.phases, worth, strict=True)]
    for phase, window in zip(windows.phases, met, strict=True):
        for cell, first in zip(phase.cells, phase.first[:, window], strict=True):
            own = pick[table.owner[cell.entries]]
            saved = cell.saving[np.arange(len(own)), own]
            for price, least in zip(phase.prices, cell.least[:, first], strict=True):
                assert least <= math.fsum(cell.loss[np.arange(len(own)), own] - price * saved) + windows.slack
    bound = sum(phase.bound[:, window] for phase, window in zip(windows.phases, met, strict=True)) + windows.paid
    assert bound.max() <= optimum + windows.slack
    found = combine(windows, value + 2 * windows.slack)
    assert found is not None
    assert found.lowest <= optimum
    if found.complete:
        assert (bounds_of_choices(table, windows, found)[rows, pick] <= optimum + windows.slack).all()
    monkeypatch.setattr(combining, "MOST_COMBINATIONS", 5)
    few = combine(windows, value + 2 * windows.slack)
    assert few is None or few.complete == (len(found.bound) <= 5 and found.complete)
    assert few is None or few.lowest <= optimum


@pytest.mark.parametrize("seed", range(4))
def test_rounding_errors_within_the_slack_exclude_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of windows are raised by an error that puts that of the optimum above the best picks."""
    problem = binding(seed, "target", groups=False)
    table = build_table(problem)
    optimum = best(problem, table, monkeypatch)
    assert optimum is not None
    relaxation = relax_phased(table)
    search = exact._Search(table, relaxation, rounded(table, relaxation), Limits(math.inf, 1.0, 1))
    genuine, value = windows_of(table, search.pick)
    assert genuine is not None
    found = combine(genuine, value)
    assert found is not None
    error = 2 * (value - found.lowest)
    phases = [replace(phase, bound=phase.bound + error / len(genuine.phases)) for phase in genuine.phases]
    monkeypatch.setattr(exact, "find_windows", lambda *_: Windows(phases, genuine.paid, error + genuine.slack))
    assert search._bound_choices() is not None
    assert -math.inf < search.bound <= table.objective(optimum)
    assert search.open_choices()[np.arange(len(optimum)), optimum].all()


@pytest.mark.parametrize("seed", range(4))
def test_bounds_of_windows_hold_for_all_picks_within_the_gap(seed: int) -> None:
    """Also for those that miss the need: every phase's bound is about that phase alone."""
    table = build_table(binding(seed, "target", groups=False))
    relaxation = relax_phased(table)
    start = rounded(table, relaxation)
    gap = phased_gap(table, relaxation, start)
    windows, _ = windows_of(table, start)
    assert windows is not None
    rng, rows, checked = np.random.default_rng(seed), np.arange(len(start)), 0
    phase_of = np.array([decision.phases[0] for decision in table.decisions])
    need = windows.paid / table.need
    for _ in range(300):
        pick = (relaxation.reduced - rng.uniform(-0.02, 0.02) * table.total_saving()).argmin(axis=1)
        changed = rng.choice(len(pick), rng.integers(0, 4))
        pick[changed] = rng.integers(0, 3, len(changed))
        if not relaxation.reduced[rows, pick].sum() <= gap:
            continue
        for p, (phase, worth) in enumerate(zip(windows.phases, table.worth(pick).tolist(), strict=True)):
            if not phase.low[0] <= worth <= phase.high[-1]:
                continue
            checked += 1
            lost = math.fsum(table.loss[rows, pick][phase_of == p])
            bound = phase.bound[:, int(np.searchsorted(phase.high, worth))]
            assert (bound <= lost - need * table.steps[p] * worth + windows.slack).all()
    assert checked > 50


@pytest.mark.parametrize("seed", [0, 4])
def test_windows_raise_the_bound_and_close_choices(seed: int) -> None:
    """More than the reduced costs do, or the test above would hold for bounds of nothing."""
    problem = random_phased(np.random.default_rng([seed, 23]), 240, 3, 4, 3, tolerance=0.01, proportional=True)
    problem = replace(problem, items=tuple(replace(item, keeps=()) for item in problem.items))
    table = build_table(problem)
    pick = columns_of(table, solve_phased(problem, deterministic_time=2))
    relaxation = relax_phased(table)
    gap = phased_gap(table, relaxation, pick)
    windows, value = windows_of(table, pick)
    assert windows is not None
    found = combine(windows, value)
    assert found is not None
    assert found.complete
    assert found.lowest > value - 0.9 * gap
    open_ = (relaxation.reduced <= gap) & table.allowed
    closed = open_ & (bounds_of_choices(table, windows, found) > value)
    assert closed.sum() > 0.05 * open_.sum()
    rank = likely(table, windows, found)
    assert np.isfinite(rank).any(axis=1).all()
    assert rank[table.allowed].min() == found.lowest


@pytest.mark.parametrize(("kind", "groups"), FOUR_KINDS)
def test_the_search_with_windows_finds_the_same_optimum(
    kind: str, groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All windows at once, and where there are too many combinations for that."""
    monkeypatch.setattr(exact, "CORES", ((0, 0.05),))
    for seed, most in itertools.product(range(4), (combining.MOST_COMBINATIONS, 20)):
        problem = binding(seed, kind, groups=groups)
        table = build_table(problem)
        pick = best(problem, table, monkeypatch)
        monkeypatch.setattr(exact, "NARROW_ABOVE", -1)
        monkeypatch.setattr(exact, "WHOLE_BELOW", 30)
        monkeypatch.setattr(combining, "MOST_COMBINATIONS", most)
        solution = solve_phased(problem, deterministic_time=20)
        if pick is None:
            assert solution.status == "infeasible"
            continue
        assert solution.status == "optimal"
        assert solution.objective == pytest.approx(table.objective(pick), rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_a_profile_counts_all_choices_within_the_gap(seed: int) -> None:
    rng = np.random.default_rng([seed, 22])
    saving = np.sort(rng.uniform(0, 1, (5, 3)), axis=1)
    loss = np.sort(np.exp(rng.normal(0, 1, (5, 3))), axis=1)
    loss[0, 1] = np.inf
    price, extra, gap = 1.0, 0.5, 3.0
    found = profile(loss, saving, price, extra, gap)
    rows = np.arange(5)
    reduced = loss - (price + extra) * saving
    reduced = reduced - reduced.min(axis=1, keepdims=True)
    counted = 0
    for columns in itertools.product(range(3), repeat=5):
        saved, cost = saving[rows, columns].sum(), (loss - price * saving)[rows, columns].sum()
        if reduced[rows, columns].sum() > gap:
            continue
        counted += 1
        near = (found.saving >= saved) & (found.saving <= saved + found.rounded)
        assert (found.least[near] <= cost + 1e-12).any()
    assert counted > 10
    for position in np.nonzero(np.isfinite(found.least))[0].tolist():
        columns = found.columns(position)
        assert (loss - price * saving)[rows, columns].sum() == pytest.approx(found.least[position])
        assert found.saving[position] - found.rounded <= saving[rows, columns].sum() <= found.saving[position]
