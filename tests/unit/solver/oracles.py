"""Independent answers to the same problems: exhaustion, and HiGHS through SciPy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from snip_megatron.precision import Format
from snip_megatron.solver import Budget, Choice, Item, Problem

FORMATS = tuple(Format)


def make_problem(
    losses: list[list[float]],
    savings: list[list[float]],
    costs: list[float],
    stages: list[int],
    target: float,
    tolerance: float | None = None,
) -> Problem:
    """Formats are taken in the order of ``Format``."""
    items = tuple(
        Item(f"i{i:04d}", stages[i], costs[i], tuple(map(Choice, FORMATS, losses[i], savings[i])))
        for i in range(len(costs))
    )
    return Problem(Budget(target, tolerance), items)


def random_problem(rng: np.random.Generator, items: int, formats: int, stages: int, tolerance: float | None) -> Problem:
    """Heavy-tailed losses, savings a random share of the cost."""
    costs = rng.choice([5.0, 4.0, 28.0, 14.0], items) * 2.0**40
    share = np.sort(rng.uniform(0, 1, (items, formats)), axis=1)
    losses = np.exp(rng.normal(0, 2, (items, 1))) * np.sort(rng.uniform(0, 1, (items, formats)), axis=1)
    target = float(rng.uniform(0.1, 0.6))
    stage = rng.integers(0, stages, items)
    return make_problem(
        losses.tolist(), (share * costs[:, None]).tolist(), costs.tolist(), stage.tolist(), target, tolerance
    )


def needs(problem: Problem) -> list[tuple[list[int], float]]:
    """(indices of items, least Σ saving): the budget as docs/method.md defines it."""
    target, tolerance = problem.budget.target, problem.budget.stage_tolerance
    rows = [(list(range(len(problem.items))), target)]
    if tolerance is not None:
        stages = sorted({item.stage for item in problem.items})
        rows += [([i for i, x in enumerate(problem.items) if x.stage == k], target - tolerance) for k in stages]
    out = []
    for members, share in rows:
        need = share * math.fsum(problem.items[i].cost for i in members)
        out.append((members, need - abs(need) * 1e-9))
    return out


def feasible(problem: Problem, choice: list[Choice]) -> bool:
    return all(math.fsum(choice[i].saving for i in members) >= need for members, need in needs(problem))


def chosen(problem: Problem, formats: dict[str, Format]) -> list[Choice]:
    """The Choice objects behind a solution's formats."""
    return [next(c for c in item.choices if c.format is formats[item.id]) for item in problem.items]


def exhaust(problem: Problem) -> float | None:
    """The smallest Σ loss over all combinations; None when none is feasible."""
    best = None
    for combination in itertools.product(*(item.choices for item in problem.items)):
        if feasible(problem, list(combination)):
            loss = math.fsum(c.loss for c in combination)
            best = loss if best is None else min(best, loss)
    return best


def highs(problem: Problem) -> float | None:
    """Σ loss in float64 of HiGHS' optimal choice (gap 0); None when HiGHS calls it infeasible."""
    flat = [(i, c) for i, item in enumerate(problem.items) for c in item.choices]
    loss = np.array([c.loss for _, c in flat])
    owner = np.array([i for i, _ in flat])
    scale = max(item.cost for item in problem.items) or 1.0
    constraints = [LinearConstraint((owner == np.arange(len(problem.items))[:, None]).astype(float), 1, 1)]
    for members, need in needs(problem):
        row = np.array([c.saving / scale if i in set(members) else 0.0 for i, c in flat])
        constraints.append(LinearConstraint(row, lb=need / scale))
    spread = float(np.abs(loss).max()) or 1.0
    # HiGHS stops at an absolute gap of 1e-6 whatever is asked: losses are brought to a scale where that is nothing.
    result = milp(
        loss / spread * 1e4,
        constraints=constraints,
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        return None
    picks = [flat[j] for j in np.nonzero(result.x > 0.5)[0]]
    assert [i for i, _ in picks] == list(range(len(problem.items)))
    return math.fsum(c.loss for _, c in picks)


def hard_problem(kind: str, *, integers: bool = False, stages: int = 1, seed: int = 0, items: int = 960) -> Problem:
    """Losses that follow savings (Pisinger 2005, "Where are the hard knapsack problems?"): bf16, fp8 or fp4 an item.

    Args:
        kind: a name of ``HARD``.
        integers: round losses and savings to whole numbers.
    """
    rng = np.random.default_rng(seed)
    loss, saving = HARD[kind](rng, np.sort(rng.uniform(1, RANGE, (items, 2)), axis=1))
    if integers:
        loss, saving = loss.round(), saving.round()
    losses, savings = (np.pad(values, ((0, 0), (1, 0))).tolist() for values in (loss, saving))
    costs = (1.25 * saving.max(axis=1)).tolist()
    return make_problem(losses, savings, costs, [i * stages // items for i in range(items)], 0.4, 0.02)


RANGE = 1000.0
HARD: dict[str, Callable[[np.random.Generator, np.ndarray], tuple[np.ndarray, np.ndarray]]] = {
    "proportional": lambda rng, w: (w * (1 + 1e-3 * rng.uniform(-1, 1, w.shape)), w),
    "subset sum": lambda rng, w: (w, w),
    "weakly correlated": lambda rng, w: (np.maximum(w + rng.uniform(-RANGE / 10, RANGE / 10, w.shape), 1), w),
    "strongly correlated": lambda rng, w: (w + RANGE / 10, w),
    "inverse strongly correlated": lambda rng, w: (w, w + RANGE / 10),
    "almost strongly correlated": lambda rng, w: (w + RANGE / 10 + rng.uniform(-RANGE / 500, RANGE / 500, w.shape), w),
}
"""Kind → (losses, savings) of fp8 and fp4 from sorted weights [items, 2] of 1 to ``RANGE``."""
