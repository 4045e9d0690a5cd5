"""Staleness of scores: the change of a run's scores over training steps, early and late in training."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from snip_megatron.errors import SnipError
from snip_megatron.evaluation.proxy import spearman
from snip_megatron.precision import Gemm, split_option_id
from snip_megatron.sensitivity.policies import divergences
from snip_megatron.sensitivity.problem import build_problem
from snip_megatron.sensitivity.quality import in_lowest
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.solver import Problem, solve
from snip_megatron.statistics.table import StatisticsTable

PHASES = ("early", "late")
DETERMINISTIC_S = 10.0


@dataclass(frozen=True)
class Apart:
    """The comparison of two updates of one run.

    Scores are those of the format with the fewest bits. Correlations are None if they cannot be computed.

    Attributes:
        step: the step of the older update.
        lag: the number of steps between the updates.
        phase: ``early`` or ``late``.
        loss: Spearman correlation of ΔL over fprop options.
        drift: Spearman correlation of ΔW over all options.
        score: Spearman correlation of Q over all options.
        excess: the cost of the older map minus that of the newer one, both by the newer scores, as a share of the cost
            of the worst format of every option; None if a map cannot be solved.
    """

    step: int
    lag: int
    phase: str
    loss: float | None
    drift: float | None
    score: float | None
    excess: float | None


@dataclass(frozen=True)
class Summary:
    """Medians of :class:`Apart` over all pairs of one phase and lag."""

    phase: str
    lag: int
    pairs: int
    loss: float | None
    drift: float | None
    score: float | None
    excess: float | None


@dataclass(frozen=True)
class _Snapshot:
    step: int
    loss: list[float]
    drift: list[float]
    score: list[float]
    problem: Problem
    choices: dict[str, str]


def stale(tables: Sequence[StatisticsTable], request: SolveRequest) -> list[Apart]:
    """Compare all pairs of updates within the first half of the steps (early), and within the second (late).

    Raises:
        SnipError: there are fewer than three tables, so that no half has two, or they are of different models.
    """
    if len(tables) < 3:
        raise SnipError("staleness needs the statistics of at least three updates of one run")
    if len({table.linears for table in tables}) > 1:
        raise SnipError("staleness needs statistics of one run: the linears differ")
    ordered = sorted(tables, key=lambda table: table.step)
    middle = (ordered[0].step + ordered[-1].step) / 2
    pairs = []
    for phase in PHASES:
        own = [table for table in ordered if (table.step <= middle) == (phase == PHASES[0])]
        pairs += [_apart(a, b, phase) for a, b in combinations([_snapshot(table, request) for table in own], 2)]
    return pairs


def summarise(pairs: Sequence[Apart]) -> list[Summary]:
    """Return the medians, sorted by phase and lag."""
    groups: dict[tuple[str, int], list[Apart]] = {}
    for pair in pairs:
        groups.setdefault((pair.phase, pair.lag), []).append(pair)
    return [
        Summary(
            phase,
            lag,
            len(members),
            _median(pair.loss for pair in members),
            _median(pair.drift for pair in members),
            _median(pair.score for pair in members),
            _median(pair.excess for pair in members),
        )
        for (phase, lag), members in sorted(groups.items())
    ]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _snapshot(table: StatisticsTable, request: SolveRequest) -> _Snapshot:
    loss, drift = divergences(table, request)
    problem, scores = build_problem(table, request)
    solution = solve(problem, deterministic_time=DETERMINISTIC_S, seed=request.seed % 2**31)
    return _Snapshot(
        step=table.step,
        loss=loss[:, 0, request.lowest(Gemm.FPROP)].tolist(),
        drift=in_lowest(request, drift).ravel().tolist(),
        score=[
            by_format[request.formats[request.lowest(split_option_id(key)[1])]]["q"]
            for key, by_format in scores.items()
        ],
        problem=problem,
        choices={key: fmt.value for key, fmt in solution.choices.items()},
    )


def _apart(old: _Snapshot, new: _Snapshot, phase: str) -> Apart:
    return Apart(
        step=old.step,
        lag=new.step - old.step,
        phase=phase,
        loss=spearman(old.loss, new.loss),
        drift=spearman(old.drift, new.drift),
        score=spearman(old.score, new.score),
        excess=_excess(old, new),
    )


def _excess(old: _Snapshot, new: _Snapshot) -> float | None:
    if not old.choices or not new.choices:
        return None
    losses = {item.id: {c.format.value: c.loss for c in item.choices} for item in new.problem.items}
    worst = sum(max(by_format.values()) for by_format in losses.values())
    if worst <= 0.0:
        return None
    stale_cost, fresh_cost = (
        float(np.sum([losses[key][fmt] for key, fmt in snapshot.choices.items()])) for snapshot in (old, new)
    )
    return (stale_cost - fresh_cost) / worst
