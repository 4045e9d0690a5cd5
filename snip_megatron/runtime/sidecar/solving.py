"""Solves a job inside the sidecar: builds the problem, solves it, and turns solutions into maps and plans."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from snip_megatron.precision.budget import Budget
from snip_megatron.precision.phases import PlanPhase, PrecisionPlan
from snip_megatron.runtime.sidecar.messages import SidecarFailure, SidecarResult, SolveJob

if TYPE_CHECKING:
    from snip_megatron.solver.solution import Solution


class SolverInProcess:
    """Takes the place of a :class:`SidecarClient`. A job is solved in this process, when it is submitted."""

    restarts = 0
    last_error: str | None = None

    def __init__(self) -> None:
        self._results: list[SidecarResult] = []

    def start(self) -> None:
        """Nothing is to be started."""

    def submit(self, job: SolveJob) -> None:
        """Solve a job. :meth:`poll` returns its result."""
        started = time.perf_counter()
        result = solve_job(job)
        latency = time.perf_counter() - started
        self._results.append(dataclasses.replace(result, version=job.request.version, latency_s=latency))

    def poll(self) -> SidecarResult | None:
        """Return the oldest result that has not been returned, or None."""
        return self._results.pop(0) if self._results else None

    def close(self) -> None:
        """Nothing is to be ended."""


def solve_job(job: SolveJob) -> SidecarResult:
    """Solve an update: for a map, or for the plan of the remaining phases.

    A plan's budget that past steps have made impossible is replaced by the reachable value. This happens once: if the
    solver finds that value infeasible as well, the job fails.
    """
    from snip_megatron.sensitivity.problem import build_problem
    from snip_megatron.solver import solve

    request = job.request
    limits: dict[str, Any] = {"deterministic_time": request.deterministic_time, "seed": request.seed % 2**31}
    problem, scores = build_problem(job.table, request)
    solution, out_of_reach = solve(problem, **limits), None
    if request.phases is not None and solution.fault is not None and solution.fault.reachable is not None:
        out_of_reach, reachable = solution.fault.why, Budget(problem.budget.kind, solution.fault.reachable)
        problem = dataclasses.replace(problem, budget=reachable)
        solution = solve(problem, **limits)
    result = SidecarResult(problem_json=problem.to_json(), scores=scores)
    if solution.status == "infeasible":
        why = str(solution.fault)
        if request.phases is not None:
            why += f" (phases 0, 1, … begin at steps {', '.join(map(str, request.phases.begins))})"
            why += "; lower its budget in --snip-schedule, or pin less"
        return dataclasses.replace(result, failure=SidecarFailure("infeasible", why))
    if request.phases is None:
        return dataclasses.replace(result, precision_map=solution.to_precision_map(request.version))
    plan = _plan(job, solution, scores)
    return dataclasses.replace(result, precision_map=plan.at(0), plan=plan, out_of_reach=out_of_reach)


def _plan(job: SolveJob, solution: Solution, scores: Mapping[str, Any]) -> PrecisionPlan:
    """Return the plan of a solution. Every map also holds its loss if it stayed, which the guard compares."""
    assert job.request.phases is not None
    plan = solution.to_plan(job.request.phases.begins, job.request.version)

    def with_loss(phase: PlanPhase) -> PlanPhase:
        chosen = (scores[key].get(fmt.value) for key, fmt in phase.precision_map.choices.items())
        loss = math.fsum(score["q"] for score in chosen if score is not None)  # a pinned format has no score
        return PlanPhase(phase.begin, phase.precision_map.with_fields(loss=loss))

    return dataclasses.replace(plan, phases=tuple(map(with_loss, plan.phases)))
