"""Independent answers to the same problems: the definitions in plain Python, exhaustion, and HiGHS through SciPy."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from snip_megatron.precision import Format
from snip_megatron.precision.budget import Budget
from snip_megatron.solver import Choice, Item, Phase, Problem, Solution, Spent

FORMATS = tuple(Format)
GAP = 1e-4
Choices = Sequence[Sequence[Choice]]
"""By phase, by item."""


def fp4(target: float) -> Budget:
    return Budget("fp4", target)


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
        Item(f"i{i:04d}", stages[i], costs[i], tuple(map(Choice, FORMATS, [(x,) for x in losses[i]], savings[i])))
        for i in range(len(costs))
    )
    return Problem(fp4(target), items, tolerance)


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


def random_phased(
    rng: np.random.Generator,
    items: int,
    formats: int,
    stages: int,
    phases: int,
    *,
    kind: str = "fp4",
    tolerance: float | None = 0.05,
    proportional: bool = False,
) -> Problem:
    """Heavy-tailed losses, savings a random share of the cost, some of the phases with a target of their own.

    ``proportional``: the losses of all phases are the same up to a factor a phase, as those of a run.
    """
    costs = rng.choice([5.0, 4.0, 28.0, 14.0], items)
    share = np.sort(rng.uniform(0, 1, (items, formats)), axis=1)
    base = np.exp(rng.normal(0, 1.5, (items, 1, 1))) * np.sort(rng.uniform(0, 1, (items, formats, 1)), axis=1)
    factors = rng.uniform(0.2, 1, (1, 1, phases))
    if not proportional:
        factors = factors * np.exp(rng.normal(0, 1, (items, 1, phases)))
    losses = base * factors
    reach = float((share.max(axis=1) * costs).sum() / costs.sum())
    target = float(rng.uniform(0.3, 0.8)) * reach
    steps = [int(x) for x in rng.integers(1, 400, phases)]
    floors = [float(rng.uniform(0, 1)) * target if kind != "loss" and rng.random() < 0.3 else None for _ in steps]
    if kind == "speedup":
        floors = [None if floor is None else 1 / (1 - 0.5 * floor) for floor in floors]
    spent = Spent(int(rng.integers(0, 200)), target * 0.95 if kind == "fp4" else 1 / (1 - target))
    fixed = tuple((k, float(rng.uniform(0, 20))) for k in range(stages)) if kind != "fp4" else ()
    expected = {
        "fp4": target,
        "speedup": 1 / (1 - 0.6 * target),
        "loss": float(np.quantile(losses.sum(axis=(0, 2)), rng.uniform(0.1, 0.6))),
    }[kind]
    stage = rng.integers(0, stages, items).tolist()
    decisions = tuple(
        Item(
            f"i{i:04d}",
            stage[i],
            float(costs[i]),
            tuple(
                Choice(FORMATS[f], tuple(losses[i, f].tolist()), float(share[i, f] * costs[i])) for f in range(formats)
            ),
            keeps=tuple(p for p in range(1, phases) if rng.random() < 0.2),
        )
        for i in range(items)
    )
    return Problem(
        Budget(kind, expected),
        decisions,
        tolerance if kind == "fp4" else None,
        fixed,
        tuple(Phase(n, f) for n, f in zip(steps, floors, strict=True)),
        spent if kind != "loss" and rng.random() < 0.5 else None,
    )


def static_of_seed(seed: int) -> Problem:
    """A problem of one map to compare with HiGHS: 20 to 89 items, 2 to 6 formats, 1 to 4 stages, any kind of budget."""
    rng = np.random.default_rng(seed)
    stages = int(rng.integers(1, 5))
    tolerance = rng.choice([0.02, 0.2, None])
    problem = random_problem(rng, int(rng.integers(20, 90)), int(rng.integers(2, 7)), stages, tolerance)
    low, high = (sum(f(c.loss for c in item.choices) for item in problem.items) for f in (min, max))
    budget = (problem.budget, Budget("speedup", 1.2), Budget("loss", low + 0.2 * (high - low)))[seed % 3]
    return replace(problem, budget=budget, stage_tolerance=None if budget.timed else tolerance)


def phased_of_seed(seed: int) -> Problem:
    """The same over phases: 10 to 39 items, 2 to 4 formats and phases."""
    rng = np.random.default_rng([seed, 2])
    items, formats, stages, phases = (int(rng.integers(a, b)) for a, b in ((10, 40), (2, 5), (1, 5), (2, 5)))
    kind = ("fp4", "fp4", "speedup", "loss")[seed % 4]
    tolerance = rng.choice([0.02, 0.1, None])
    return random_phased(
        rng, items, formats, stages, phases, kind=kind, tolerance=tolerance, proportional=seed % 2 == 0
    )


# -- the definitions ---------------------------------------------------------------------------------------------
def phases_of(problem: Problem) -> tuple[Phase, ...]:
    return problem.phases or (Phase(1),)


def effective(problem: Problem, chosen: Sequence[Choice]) -> float:
    """The effective share of a phase."""
    rows = [(range(len(chosen)), 0.0)]
    if problem.stage_tolerance is not None:
        stages = {item.stage for item in problem.items}
        indices = ([k for k, item in enumerate(problem.items) if item.stage == stage] for stage in stages)
        rows += [(each, problem.stage_tolerance) for each in indices]
    shares = []
    for indices, tolerance in rows:
        saved, cost = math.fsum(chosen[k].saving for k in indices), math.fsum(problem.items[k].cost for k in indices)
        shares.append(saved / cost + tolerance if cost else -math.inf if saved < 0 else math.inf)
    return min(min(shares), 1.0 if all(math.isinf(s) for s in shares) else math.inf)


def slowest(problem: Problem, chosen: Sequence[Choice] | None) -> float:
    """The time of the slowest stage, in the reference formats if there are no choices."""
    times = dict(problem.fixed_cost)
    for stage in {item.stage for item in problem.items}:
        indices = [k for k, item in enumerate(problem.items) if item.stage == stage]
        cost, saved = math.fsum(problem.items[k].cost for k in indices), 0.0
        if chosen:
            saved = math.fsum([*(chosen[k].saving for k in indices), *jointly(problem, chosen, indices)])
        times[stage] = times.get(stage, 0.0) + cost - saved
    return max(times.values())


def jointly(problem: Problem, chosen: Sequence[Choice], indices: Sequence[int]) -> list[float]:
    """The joint savings of some of the items."""
    formats = {item.id: choice.format for item, choice in zip(problem.items, chosen, strict=True)}
    items = [problem.items[k] for k in indices]
    each = [(formats[item.id], other, savings) for item in items for other, savings in item.joint.items()]
    return [savings.get(fmt, 0.0) for fmt, other, savings in each if formats[other] is fmt]


def with_joint(problem: Problem, rng: np.random.Generator) -> Problem:
    """Every third item saves jointly with the two before it, which come to its stage; all three change together."""
    items = list(problem.items)
    for k in range(2, len(items), 3):
        savings = {c.format: float(rng.uniform(0, 0.3)) * items[k].cost for c in items[k].choices[1:]}
        for j in (k - 2, k - 1):
            items[j] = replace(items[j], stage=items[k].stage, keeps=items[k].keeps)
        items[k] = replace(items[k], joint={items[j].id: savings for j in (k - 2, k - 1)})
    return replace(problem, items=tuple(items))


def total_time(problem: Problem, choices: Choices) -> float:
    each = zip(phases_of(problem), choices, strict=True)
    return math.fsum(phase.steps * slowest(problem, choice) for phase, choice in each)


def total_loss(choices: Choices) -> float:
    return math.fsum(choice.losses[p] for p, phase in enumerate(choices) for choice in phase)


def feasible(problem: Problem, choices: Choices) -> bool:
    """Return whether the choices meet the budget up to 1e-9, agree with pins, and change only where they may."""
    budget, spent = problem.budget, problem.spent or Spent(0, 1.0)
    for k, item in enumerate(problem.items):
        formats = [phase[k].format for phase in choices]
        if any(formats[p] is not formats[p - 1] for p in item.keeps):
            return False
        if item.pin is not None and set(formats) != {item.pin}:
            return False
    if budget.kind == "loss":
        return total_loss(choices) <= budget.value
    if budget.kind == "speedup":
        reference = slowest(problem, None)
        for phase, choice in zip(phases_of(problem), choices, strict=True):
            if phase.target is not None and slowest(problem, choice) * phase.target > reference * (1 + 2e-9):
                return False
        allowed = problem.steps / budget.value * (1 + 1e-9) - spent.steps / spent.achieved
        return total_time(problem, choices) <= reference * (allowed + 1e-12)
    worth = [effective(problem, phase) for phase in choices]
    for phase, reached in zip(phases_of(problem), worth, strict=True):
        if phase.target is not None and reached < phase.target * (1 - 1e-9):
            return False
    terms = [phase.steps * reached for phase, reached in zip(phases_of(problem), worth, strict=True)]
    return math.fsum([*terms, spent.steps * spent.achieved]) >= budget.value * problem.steps * (1 - 1e-9)


def chosen(problem: Problem, solution: Solution) -> Choices:
    """The choices behind a solution's formats."""
    maps = [phase.choices for phase in solution.phases] or [solution.choices]
    return [[next(c for c in i.choices if c.format is formats[i.id]) for i in problem.items] for formats in maps]


def least(problem: Problem) -> float:
    """Σ of each decision's least loss: of each item and run of phases that it keeps its format in."""
    total = []
    for item in problem.items:
        begins = [p for p in range(len(phases_of(problem))) if p not in item.keeps]
        choices = [c for c in item.choices if item.pin in (None, c.format)]
        for a, b in zip(begins, [*begins[1:], len(phases_of(problem))], strict=True):
            total.append(min(math.fsum(c.losses[a:b]) for c in choices))
    return math.fsum(total)


def value_of(problem: Problem, choices: Choices) -> float:
    """The value that is minimised."""
    return total_time(problem, choices) if problem.budget.kind == "loss" else total_loss(choices)


def check(problem: Problem, solution: Solution, best: float | None = None) -> None:
    """Assert that a solution with choices is feasible, and that its figures, bound and gap are true."""
    choices = chosen(problem, solution)
    assert feasible(problem, choices)
    assert solution.loss == pytest.approx(total_loss(choices), rel=1e-12)
    value = value_of(problem, choices)
    assert solution.objective == pytest.approx(value, rel=1e-9, abs=1e-12 * slowest(problem, None))
    assert solution.bound <= solution.objective
    if best is not None:
        tiny = 1e-9 * abs(best) + 1e-12 * max(abs(least(problem)), 1e-290)
        whole = value if problem.budget.kind == "loss" else value - least(problem)
        assert solution.bound <= best + tiny
        assert value - best <= solution.gap * whole + tiny


# -- best values ---------------------------------------------------------------------------------------------------
def exhaust(problem: Problem) -> float | None:
    """The smallest value over all combinations; None when none is feasible."""
    maps = list(itertools.product(*(item.choices for item in problem.items)))
    combinations = itertools.product(maps, repeat=len(phases_of(problem)))
    return min((value_of(problem, c) for c in combinations if feasible(problem, c)), default=None)


def highs(problem: Problem) -> float | None:
    """The value of HiGHS' best choices; None when HiGHS calls it infeasible. For problems without pins."""
    phases, items, budget = phases_of(problem), problem.items, problem.budget
    flat = [(p, k, c) for p in range(len(phases)) for k, item in enumerate(items) for c in item.choices]
    count, width = len(flat), len(flat) + len(phases)
    place = {(p, k, c.format): j for j, (p, k, c) in enumerate(flat)}
    rows, low = [], []

    def add(terms: list[tuple[int, float]], at_least: float) -> None:
        row = np.zeros(width)
        for j, value in terms:
            row[j] += value
        rows.append(row)
        low.append(at_least)

    for p in range(len(phases)):
        for k, item in enumerate(items):
            for sign in (1.0, -1.0):
                add([(place[p, k, c.format], sign) for c in item.choices], sign)
                for c in item.choices if p in item.keeps else ():
                    add([(place[p, k, c.format], sign), (place[p - 1, k, c.format], -sign)], 0)
    spent, steps = problem.spent or Spent(0, 1.0), problem.steps
    reference, total = slowest(problem, None), math.fsum(item.cost for item in items)
    bounds = []
    for p, phase in enumerate(phases):
        by_stage = {s: [k for k, i in enumerate(items) if i.stage == s] for s in {i.stage for i in items}}
        sums = [(list(range(len(items))), total, 0.0)] if budget.kind == "fp4" else []
        for stage, indices in by_stage.items():
            cost = math.fsum(items[k].cost for k in indices)
            if budget.kind != "fp4":
                sums.append((indices, reference, 1 - (dict(problem.fixed_cost).get(stage, 0.0) + cost) / reference))
            elif problem.stage_tolerance is not None:
                sums.append((indices, cost, problem.stage_tolerance))
        for indices, unit, offset in sums:
            terms = [(place[p, k, c.format], 1e2 * c.saving / unit) for k in indices for c in items[k].choices]
            add([*terms, (count + p, -1e2)], -1e2 * offset)
        floor = -10.0 if phase.target is None else phase.target * (1 - 1e-9)
        if phase.target is not None and budget.kind != "fp4":
            floor = 1 - (1 + 1e-9) / phase.target
        bounds.append((floor, 1.0))
    worth = [(count + p, 1e4 * phase.steps / steps) for p, phase in enumerate(phases)]
    # HiGHS stops at an absolute gap of 1e-6 whatever is asked: losses are brought to a scale where that is nothing.
    loss = np.array([c.losses[p] for p, _, c in flat])
    spread = (float(np.abs(loss).max()) or 1.0) / 1e4
    objective = np.concatenate([loss / spread, np.zeros(len(phases))])
    if budget.kind == "fp4":
        add(worth, 1e4 * (budget.value * (1 - 1e-9) - spent.steps * spent.achieved / steps))
    elif budget.kind == "speedup":
        remaining = steps - spent.steps
        add(worth, 1e4 * ((remaining + spent.steps / spent.achieved) / steps - (1 + 1e-9) / budget.value))
    else:
        add([(j, -x / spread) for j, x in enumerate(loss.tolist())], -budget.value / spread)
        objective = np.zeros(width)
        for j, weight in worth:
            objective[j] = -weight
    result = milp(
        objective,
        constraints=LinearConstraint(np.array(rows), np.array(low)),
        integrality=np.array([1] * count + [0] * len(phases)),
        bounds=Bounds([0.0] * count + [b[0] for b in bounds], [1.0] * count + [b[1] for b in bounds]),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        return None
    on = [flat[j] for j in np.nonzero(result.x[:count] > 0.5)[0]]
    return value_of(problem, [[c for q, _, c in on if q == p] for p in range(len(phases))])


def hard_problem(kind: str, stages: int) -> Problem:
    """Losses that follow savings (Pisinger 2005, "Where are the hard knapsack problems?"): bf16, fp8 or fp4 an item."""
    rng, items = np.random.default_rng(0), 960
    loss, saving = HARD[kind](rng, np.sort(rng.uniform(1, RANGE, (items, 2)), axis=1))
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
