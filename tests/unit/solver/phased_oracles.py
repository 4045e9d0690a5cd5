"""Independent answers to phased problems: the definitions in plain Python, exhaustion, and HiGHS through SciPy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from snip_megatron.precision import Format
from snip_megatron.solver import Budget
from snip_megatron.solver.phased import Phase, PhasedChoice, PhasedItem, PhasedProblem, Spent

FORMATS = tuple(Format)
Choices = Sequence[Sequence[PhasedChoice]]
"""By phase, by item."""


def random_phased(
    rng: np.random.Generator,
    items: int,
    formats: int,
    stages: int,
    phases: int,
    *,
    kind: str = "target",
    tolerance: float | None = 0.05,
    proportional: bool = False,
) -> PhasedProblem:
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
    spent = Spent(int(rng.integers(0, 200)), target * 0.95 if kind == "target" else 1 / (1 - target))
    fixed = tuple((k, float(rng.uniform(0, 20))) for k in range(stages)) if kind != "target" else ()
    budget = {
        "target": Budget(target, tolerance),
        "speedup": Budget(speedup=1 / (1 - 0.6 * target), fixed_cost=fixed),
        "loss": Budget(loss=float(np.quantile(losses.sum(axis=(0, 2)), rng.uniform(0.1, 0.6))), fixed_cost=fixed),
    }[kind]
    stage = rng.integers(0, stages, items).tolist()
    made = tuple(
        PhasedItem(
            f"i{i:04d}",
            stage[i],
            float(costs[i]),
            tuple(
                PhasedChoice(FORMATS[f], float(share[i, f] * costs[i]), tuple(losses[i, f].tolist()))
                for f in range(formats)
            ),
            keeps=tuple(p for p in range(1, phases) if rng.random() < 0.2),
        )
        for i in range(items)
    )
    return PhasedProblem(
        budget,
        tuple(Phase(n, f) for n, f in zip(steps, floors, strict=True)),
        made,
        spent if kind != "loss" and rng.random() < 0.5 else None,
    )


def random_of_seed(seed: int) -> PhasedProblem:
    """The problem that is compared with HiGHS: a target or a speedup, 10 to 39 items, 2 to 4 formats and phases."""
    rng = np.random.default_rng([seed, 2])
    items, formats, stages, phases = (int(rng.integers(a, b)) for a, b in ((10, 40), (2, 5), (1, 5), (2, 5)))
    return random_phased(
        rng,
        items,
        formats,
        stages,
        phases,
        kind="speedup" if seed % 3 == 2 else "target",
        tolerance=rng.choice([0.02, 0.1, None]),
        proportional=seed % 2 == 0,
    )


def effective(problem: PhasedProblem, chosen: Sequence[PhasedChoice]) -> float:
    """The effective share of a phase, from its definition."""
    tolerance = problem.budget.stage_tolerance
    shares = [math.fsum(c.saving for c in chosen) / math.fsum(i.cost for i in problem.items)]
    for stage in {item.stage for item in problem.items} if tolerance is not None else ():
        own = [k for k, item in enumerate(problem.items) if item.stage == stage]
        saved, cost = math.fsum(chosen[k].saving for k in own), math.fsum(problem.items[k].cost for k in own)
        shares.append(saved / cost + (tolerance or 0.0))
    return min(shares)


def slowest(problem: PhasedProblem, chosen: Sequence[PhasedChoice] | None) -> float:
    """The time of the slowest stage; of the reference without choices."""
    times = dict(problem.budget.fixed_cost)
    for k, item in enumerate(problem.items):
        times[item.stage] = times.get(item.stage, 0.0) + item.cost - (chosen[k].saving if chosen else 0.0)
    return max(times.values())


def total_time(problem: PhasedProblem, choices: Choices) -> float:
    return math.fsum(phase.steps * slowest(problem, c) for phase, c in zip(problem.phases, choices, strict=True))


def total_loss(choices: Choices) -> float:
    return math.fsum(choice.losses[p] for p, phase in enumerate(choices) for choice in phase)


def feasible(problem: PhasedProblem, choices: Choices) -> bool:
    """Whether the choices meet the budget up to 1e-9, keep what must be kept and agree in groups and with pins."""
    budget, spent = problem.budget, problem.spent or Spent(0, 1.0)
    for k, item in enumerate(problem.items):
        formats = [phase[k].format for phase in choices]
        if any(formats[p] is not formats[p - 1] for p in item.keeps):
            return False
        if item.pin is not None and set(formats) != {item.pin}:
            return False
        for other, twin in enumerate(problem.items[:k]):
            if item.group is None or twin.group != item.group:
                continue
            if formats != [phase[other].format for phase in choices]:
                return False
    if budget.loss is not None:
        return total_loss(choices) <= budget.loss
    if budget.speedup is not None:
        for phase, choice in zip(problem.phases, choices, strict=True):
            if phase.target is not None and slowest(problem, choice) * phase.target > slowest(problem, None) * (
                1 + 2e-9
            ):
                return False
        allowed = problem.steps / budget.speedup * (1 + 1e-9) - spent.steps / spent.achieved
        return total_time(problem, choices) / slowest(problem, None) <= allowed + 1e-12
    worth = [effective(problem, phase) for phase in choices]
    for phase, reached in zip(problem.phases, worth, strict=True):
        if phase.target is not None and reached < phase.target * (1 - 1e-9):
            return False
    terms = [phase.steps * reached for phase, reached in zip(problem.phases, worth, strict=True)]
    return math.fsum([*terms, spent.steps * spent.achieved]) >= budget.wanted * problem.steps * (1 - 1e-9)


def exhaust(problem: PhasedProblem) -> float | None:
    """The smallest Σ loss (under a ``loss`` budget Σ time) over all combinations; None when none is feasible."""
    value = (lambda c: total_time(problem, c)) if problem.budget.kind == "loss" else total_loss
    each = [item.choices for item in problem.items]
    maps = list(itertools.product(*each))
    found = [value(c) for c in itertools.product(maps, repeat=len(problem.phases)) if feasible(problem, c)]
    return min(found, default=None)


def highs(problem: PhasedProblem) -> tuple[float, bool] | None:
    """Σ loss in float64 of HiGHS' optimal choices under a ``target`` or ``speedup``, and whether they are feasible in
    float64; None when HiGHS calls it infeasible. For problems without groups and pins."""
    phases, items = problem.phases, problem.items
    flat = [(p, k, c) for p in range(len(phases)) for k, item in enumerate(items) for c in item.choices]
    count, width = len(flat), len(flat) + len(phases)
    place = {(p, k, c.format): j for j, (p, k, c) in enumerate(flat)}
    rows, low, high = [], [], []

    def add(terms: list[tuple[int, float]], at_least: float, at_most: float = math.inf) -> None:
        row = np.zeros(width)
        for j, value in terms:
            row[j] += value
        rows.append(row)
        low.append(at_least)
        high.append(at_most)

    for p in range(len(phases)):
        for k, item in enumerate(items):
            add([(place[p, k, c.format], 1.0) for c in item.choices], 1, 1)
            for c in item.choices if p in item.keeps else ():
                add([(place[p, k, c.format], 1.0), (place[p - 1, k, c.format], -1.0)], 0, 0)
    budget, spent = problem.budget, problem.spent or Spent(0, 1.0)
    reference, total = slowest(problem, None), math.fsum(item.cost for item in items)
    fixed = dict(budget.fixed_cost)
    bounds = []
    for p, phase in enumerate(phases):
        by_stage = {s: [k for k, i in enumerate(items) if i.stage == s] for s in {i.stage for i in items}}
        sums = [(list(range(len(items))), total, 0.0)] if budget.target is not None else []
        for stage, own in by_stage.items():
            cost = math.fsum(items[k].cost for k in own)
            if budget.target is None:
                sums.append((own, reference, 1 - (fixed.get(stage, 0.0) + cost) / reference))
            elif budget.stage_tolerance is not None:
                sums.append((own, cost, budget.stage_tolerance))
        for own, unit, offset in sums:
            terms = [(place[p, k, c.format], 1e2 * c.saving / unit) for k in own for c in items[k].choices]
            add([*terms, (count + p, -1e2)], -1e2 * offset)
        cap = 1 - max([fixed[s] for s in fixed if s not in by_stage], default=0.0) / reference
        floor = -10.0 if phase.target is None else phase.target * (1 - 1e-9)
        if phase.target is not None and budget.target is None:
            floor = 1 - (1 + 1e-9) / phase.target
        bounds.append((floor, max(cap, floor)))
    steps = problem.steps
    if budget.target is not None:
        need = budget.target * (1 - 1e-9) - spent.steps * spent.achieved / steps
    else:
        remaining = steps - spent.steps
        need = (remaining + spent.steps / spent.achieved) / steps - (1 + 1e-9) / budget.wanted
    add([(count + p, 1e4 * phase.steps / steps) for p, phase in enumerate(phases)], 1e4 * need)
    loss = np.array([c.losses[p] for p, _, c in flat])
    spread = float(np.abs(loss).max()) or 1.0
    result = milp(
        # HiGHS stops at an absolute gap of 1e-6 whatever is asked: losses are brought to a scale where that is nothing.
        np.concatenate([loss / spread * 1e4, np.zeros(len(phases))]),
        constraints=LinearConstraint(np.array(rows), np.array(low), np.array(high)),
        integrality=np.array([1] * count + [0] * len(phases)),
        bounds=Bounds([0.0] * count + [b[0] for b in bounds], [1.0] * count + [b[1] for b in bounds]),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        return None
    on = [flat[j] for j in np.nonzero(result.x[:count] > 0.5)[0]]
    choices = [[c for q, _, c in on if q == p] for p in range(len(phases))]
    return total_loss(choices), feasible(problem, choices)
