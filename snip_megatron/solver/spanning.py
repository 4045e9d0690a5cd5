"""Groups that span pipeline stages: every format of these groups is tried, and the rest is solved for each.

A decision of the solver lies on one stage, so that the saving of every stage has its own price. A group on several
stages is therefore split by stage, and its parts are pinned to one format, for every format that it may take. The best
of these solves is the best of all. Lower bounds, the cheap ones first, leave most of the solves out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format
from snip_megatron.solver.items import Item
from snip_megatron.solver.problem import Problem
from snip_megatron.solver.solution import Solution

MOST_COMBINATIONS = 512
"""Maximum number of combinations of formats of all spanning groups, for example nine groups of two formats."""


def spanning_groups(problem: Problem) -> dict[str, tuple[Format, ...]]:
    """Return group → the formats that it may take, for every group with items on more than one stage.

    Raises SnipError if there are too many combinations of these formats to try.
    """
    stages: dict[str, set[int]] = {}
    formats: dict[str, set[Format]] = {}
    for item in problem.items:
        if item.group is not None:
            stages.setdefault(item.group, set()).add(item.stage)
            own = {item.pin} if item.pin is not None else {choice.format for choice in item.choices}
            formats[item.group] = formats.get(item.group, own) & own
    found = {
        group: tuple(sorted(formats[group], key=lambda f: f.code)) for group in sorted(stages) if len(stages[group]) > 1
    }
    count = math.prod(len(f) for f in found.values())
    if count > MOST_COMBINATIONS:
        raise SnipError(
            f"{len(found)} groups span pipeline stages, which is {count} combinations of their formats to try; at most"
            f" {MOST_COMBINATIONS} are: let groups end at a stage (block:GLOB), or give fewer formats"
        )
    return found


Solve = Callable[[Problem, str], Solution]
"""(problem without spanning groups, ``cpsat`` or ``greedy``) → its solution, within what is left of the limits."""


def solve_spanning(problem: Problem, spanning: Mapping[str, tuple[Format, ...]], solver: str, solve: Solve) -> Solution:
    """Return the best solution over all formats of the spanning groups.

    If none is feasible, return the infeasible solution that comes closest to the budget.
    """
    quick = [(solve(part, "greedy"), part) for part in _cut(problem, spanning)]
    feasible = [pair for pair in quick if pair[0].status != "infeasible"]
    if not feasible:
        return max((solution for solution, _ in quick), key=_reach)
    # A stable sort: equal bounds stay in the order of formats, on every machine.
    feasible.sort(key=lambda pair: _bound(pair[0]))
    solved: list[Solution] = []
    left_out: list[float] = []
    for found, part in feasible:
        if solved and _bound(found) > min(map(_key, solved))[0]:
            left_out.append(_bound(found))
        else:
            solved.append(found if solver == "greedy" else solve(part, solver))
    best = min(solved, key=_key)
    objective, _ = _key(best)
    proven = all(one.status == "optimal" or _bound(one) >= objective for one in solved)
    return replace(
        best,
        status="optimal" if proven else "feasible",
        bound=min([objective, *left_out, *map(_bound, solved)]),
        deterministic_seconds=math.fsum(one.deterministic_seconds for one in solved),
    )


def _cut(problem: Problem, spanning: Mapping[str, tuple[Format, ...]]) -> Iterator[Problem]:
    """Yield the problem for every combination of formats, with each spanning group split by stage and pinned."""
    for combination in itertools.product(*spanning.values()):
        chosen = dict(zip(spanning, combination, strict=True))

        def cut(item: Item, chosen: Mapping[str, Format] = chosen) -> Item:
            if item.group is None or item.group not in chosen:
                return item
            return replace(item, group=f"{item.group} on stage {item.stage}", pin=chosen[item.group])

        yield Problem(budget=problem.budget, items=tuple(cut(item) for item in problem.items))


def _bound(solution: Solution) -> float:
    return -math.inf if solution.bound is None else solution.bound


def _key(solution: Solution) -> tuple[float, float]:
    """Return what is minimised: the objective, and the loss among equally fast maps."""
    objective, loss = solution.objective, solution.loss
    return (math.inf if objective is None else objective, math.inf if loss is None else loss)


def _reach(solution: Solution) -> float:
    """Return how much of the budget an infeasible combination could reach. More is better."""
    reachable = None if solution.fault is None else solution.fault.reachable
    if reachable is None:
        return -math.inf
    return -reachable if solution.kind == "loss" else reachable
