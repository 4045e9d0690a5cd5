"""The phases of a run whose map changes with time: the plan that an update before its first step would make."""

import math
from collections.abc import Sequence
from typing import Any

from snip_megatron.planner.request import PlanRequest, build_problem, gemm_counts
from snip_megatron.planner.step_time import StepModel, StepTime
from snip_megatron.precision import ALL_BF16, fp4_fraction
from snip_megatron.precision.errors import cut
from snip_megatron.sensitivity.request import STANDING_SHARE, STANDING_WEIGHTS, PhasedRequest, carried_weights
from snip_megatron.solver import Solution, solve

ASSUMPTIONS = (
    "phases: one plan for the whole run from losses of one moment; the learning rate falls as half a cosine to 0, and"
    f" {STANDING_SHARE:g} of an fprop's loss is gone as soon as the fprop is precise",
)
_SOLVE_SECONDS = 10.0
_RATES = 1000  # samples of the learning rate

Body = dict[str, Any]


def plan_phases(step: StepModel, request: PlanRequest, fixed: Solution) -> Body | None:
    """Plan the phases of a run, over which the budget is the average; None without phases.

    ``fixed`` is the one map under the same budget, for comparison. Raises SnipError (exit code 3) if nothing meets the
    budget.
    """
    config = request.config
    if config.phases is None or request.train_iters is None:
        return None
    steps, rates = request.train_iters, [1.0 + math.cos(math.pi * i / _RATES) for i in range(_RATES + 1)]
    phased = PhasedRequest.of_schedule(
        config.phases,
        (0, steps),
        0,
        carried=lambda begins: carried_weights(0, begins, steps, rates),
        standing=STANDING_WEIGHTS[config.deployed],
    )
    problem = build_problem(request, step, phased)
    asked = f"--budget {cut(str(config.budget))} over --schedule {cut(config.schedule)}"
    solution = solve(problem, time_limit_s=_SOLVE_SECONDS).met(asked, "; lower the budget, or those of the phases")
    bf16 = step.step(lambda row: ALL_BF16)
    rows = [_phase(step, bf16, *each) for each in zip(phased.begins, phased.steps, solution.phases, strict=True)]
    return {
        "schedule": config.schedule,
        "train_iters": request.train_iters,
        "deployed": config.deployed,
        "asked": str(config.budget),
        "status": solution.status,
        "solve_seconds": solution.solve_seconds,
        "loss": solution.loss,
        "bound": solution.bound,
        "static_loss": math.fsum(c.loss for i in problem.items for c in i.choices if c.format is fixed.choices[i.id]),
        "phases": rows,
        **_averages(bf16, rows, solution),
    }


def _phase(step: StepModel, bf16: StepTime, begin: int, steps: int, solution: Solution) -> Body:
    rows, chosen = step.layout.model.rows, solution.to_precision_map()
    time = step.step(lambda row: chosen.formats_of(row.name))
    return {
        "from_step": begin,
        "steps": steps,
        "gemms": gemm_counts(rows, chosen),
        "fp4_share": fp4_fraction(chosen, {row.name: row.flops for row in rows}),
        "seconds": time.total,
        "speedup": bf16.total / time.total,
        "linears_seconds": time.linears,
        "saved_seconds": steps * (bf16.total - time.total),
        "loss": solution.loss,
    }


def _averages(bf16: StepTime, rows: Sequence[Body], solution: Solution) -> Body:
    """The averages over the run: of times, those of the means."""
    steps = sum(row["steps"] for row in rows)

    def mean(name: str) -> float:
        return float(math.fsum(row["steps"] * row[name] for row in rows) / steps)

    seconds = mean("seconds")
    return {
        "average_fp4_share": mean("fp4_share"),
        "average_seconds": seconds,
        "bf16_seconds": bf16.total,
        "average_speedup": bf16.total / seconds,
        "average_linears_speedup": bf16.linears / mean("linears_seconds"),
        "achieved": solution.achieved,
        "saved_seconds": math.fsum(row["saved_seconds"] for row in rows),
    }
