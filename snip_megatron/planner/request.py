"""What a plan is asked for, and its Problem: candidate formats, costs and losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from snip_megatron.config.conflicts import in_nats
from snip_megatron.config.defaults import candidates, defaults
from snip_megatron.config.run import SnipConfig
from snip_megatron.config.values import parse_tolerance
from snip_megatron.errors import SnipError, cut
from snip_megatron.planner.layout import Layout
from snip_megatron.planner.step_time import StepModel
from snip_megatron.planner.synthetic import synthetic_losses
from snip_megatron.precision import DENSE_LAYER, FOUR_BIT, Format, LinearId, candidates_fault, split_option_id
from snip_megatron.precision.budget import Budget
from snip_megatron.sensitivity.policies import UNSOLVED
from snip_megatron.sensitivity.times import OptionTimes
from snip_megatron.solver.items import Choice, Item
from snip_megatron.solver.problem import Problem
from snip_megatron.statistics.table import StatisticsTable

BUDGETS = ("fp4", "speedup", "step", "loss")
"""The kinds of budget of a plan. ``step`` is the speedup of the whole step."""
_GRANULARITY, _TOLERANCE = SnipConfig.granularity, parse_tolerance(SnipConfig.stage_tolerance)
_DIGITS = 1e5  # of a speedup named for a training, which is rounded down so that it stays within reach


@dataclass(frozen=True)
class PlanRequest:
    """A budget, and the settings with which it is solved.

    Attributes:
        kind: ``fp4`` (share of FLOPs), ``speedup`` (of the linears on the slowest stage), ``loss``, or ``step``
            (speedup of the whole step).
        wanted: the value of the budget.
        formats: the candidate formats.
        granularity: ``--snip-granularity``.
        tolerance: ``--snip-stage-tolerance``; None for no constraint of stages.
        statistics: a run's ``stats/step_<N>.npz``; None for synthetic losses.
        seed: the seed of synthetic losses.
        policy: ``--snip-policy``, by which ``statistics`` are scored.
        estimator: ``--snip-estimator``, likewise.
    """

    kind: str
    wanted: float
    formats: tuple[Format, ...]
    granularity: str = _GRANULARITY
    tolerance: float | None = _TOLERANCE
    statistics: Path | None = None
    seed: int = 1
    policy: str = "snip"
    estimator: str = "noise"

    @property
    def text(self) -> str:
        """The budget as an argument, such as ``fp4=0.75``."""
        return str(Budget(self.kind, self.wanted))

    def training_arguments(self, budget: str | None) -> str | None:
        """Return the arguments with which a training solves this request under ``budget``; None if it has none."""
        if budget is None:
            return None
        arguments = f"--snip-budget {budget} --snip-formats {','.join(self.formats)}"
        if self.granularity != _GRANULARITY:
            arguments += f" --snip-granularity {self.granularity}"
        if self.kind == "fp4" and self.tolerance != _TOLERANCE:
            arguments += f" --snip-stage-tolerance {'none' if self.tolerance is None else _number(self.tolerance)}"
        return arguments


def _number(value: float) -> str:
    """Return all digits of a number, without those of a fraction of 0."""
    return repr(value).removesuffix(".0")


def parse_request(
    budget: str | None,
    formats: str | None,
    measured: tuple[Format, ...],
    *,
    backend: str | None = None,
    granularity: str,
    tolerance: float | None,
    statistics: Path | None,
    seed: int,
    policy: str = "snip",
    estimator: str = "noise",
) -> PlanRequest:
    """Parse the arguments of ``snip plan``.

    Args:
        budget: ``KIND=VALUE``; None for that of a training.
        formats: the candidate formats, comma separated; None for those of a training with this budget.
        measured: the formats that the cost model can predict.
        backend: the GEMM backend whose times the cost model has; None for ideal times.
        granularity: see :class:`PlanRequest`.
        tolerance: see :class:`PlanRequest`.
        statistics: see :class:`PlanRequest`.
        seed: see :class:`PlanRequest`.
        policy: see :class:`PlanRequest`.
        estimator: see :class:`PlanRequest`.

    Raises:
        SnipError: the budget or a format is invalid, or a training would refuse their combination.
    """
    if budget is None:
        budget = str(defaults({"policy": policy}, backend, ends=False)["budget"])
    asked = Budget.parse(budget, "--budget", BUDGETS)
    kind, wanted = asked.kind, asked.value
    if kind == "loss" and policy not in UNSOLVED and not in_nats(policy, SnipConfig.q):
        raise SnipError(
            f"--budget {cut(budget)} bounds a loss, and the scores of --policy {policy} are none; use another"
        )
    if formats is None:
        chosen = tuple(Format(fmt) for fmt in candidates(kind, backend))
    else:
        names = formats.split(",")
        unknown = [name for name in names if name not in Format._value2member_map_]
        if unknown or len(set(names)) != len(names):
            known = ", ".join(fmt.value for fmt in Format)
            raise SnipError(f"--formats {cut(formats)}: give distinct names among {known}")
        chosen = tuple(Format(name) for name in names)
        if (why := candidates_fault(names, granularity=granularity, share=kind == "fp4")) is not None:
            raise SnipError(f"--formats {cut(formats)}: {why}")
    missing = [fmt.value for fmt in chosen if fmt not in measured and fmt.base not in measured]
    if missing:
        raise SnipError(
            f"--formats {cut(formats or ','.join(chosen))}: the timings have no {missing[0]} (they have"
            f" {', '.join(measured)}); give --timings flops, or a file of snip calibrate that has it"
        )
    return PlanRequest(kind, wanted, chosen, granularity, tolerance, statistics, seed, policy, estimator)


def build_problem(request: PlanRequest, step: StepModel) -> Problem:
    """Build the Problem of a request. Raises SnipError if the statistics are of another model or lack a format."""
    layout = step.layout
    if request.kind == "fp4":
        return Problem(Budget("fp4", request.wanted), tuple(_items(request, layout)), request.tolerance)
    budget = Budget("loss" if request.kind == "loss" else "speedup", request.wanted)
    fixed = tuple(step.fixed_seconds().items()) if request.kind == "step" else ()
    items = _items(request, layout, step.option_times(request.formats))
    return Problem(budget, tuple(items), fixed_cost=fixed)


def training_budget(request: PlanRequest, problem: Problem) -> str | None:
    """Return the ``--snip-budget`` with which a training gets a step as fast as the planned one.

    A ``speedup=`` bounds the linears of all stages alike. A ``step=`` may leave stages alone that have little work
    outside of their linears, so that its training may save more on these stages than the plan does.

    Returns:
        The budget. None if no ``speedup=`` within reach gives such a step.
    """
    if request.kind != "step":
        return request.text
    bf16 = dict.fromkeys((item.stage for item in problem.items), 0.0)
    least = dict(bf16)
    for item in problem.items:
        savings = [choice.saving for choice in item.choices]
        bf16[item.stage] += item.cost
        least[item.stage] += item.cost - max(savings)
    fixed = dict(problem.fixed_cost)
    step = max(fixed[stage] + seconds for stage, seconds in bf16.items()) / request.wanted
    most = min((step - fixed[stage] for stage in bf16 if fixed[stage] + bf16[stage] > step), default=math.inf)
    speedup = math.floor(max(1.0, max(bf16.values()) / most) * _DIGITS) / _DIGITS
    return f"speedup={_number(speedup)}" if max(least.values()) * speedup <= max(bf16.values()) else None


def _items(request: PlanRequest, layout: Layout, times: OptionTimes | None = None) -> list[Item]:
    """Return items with costs and savings in seconds; without ``times`` in FLOPs, of which 4-bit formats save all."""
    losses = option_losses(request, layout)
    stages = layout.stage_of()
    items = []
    for key, by_format in losses.items():
        linear, gemm = split_option_id(key)
        if times is None:
            n, k = layout.model.linears[linear.path]
            cost = 2.0 * layout.seq_length * layout.global_batch_size * n * k * (1 if gemm is not None else 3)
            savings = {fmt: cost if fmt in FOUR_BIT else 0.0 for fmt in by_format}
        else:
            cost = times.of(str(linear), gemm, Format.BF16)
            savings = {fmt: cost - times.of(str(linear), gemm, fmt) for fmt in by_format}
        choices = tuple(Choice(fmt, (loss,), savings[fmt]) for fmt, loss in by_format.items())
        items.append(Item(key, stages[linear.layer], cost, choices))
    return items


def option_losses(request: PlanRequest, layout: Layout) -> Mapping[str, Mapping[Format, float]]:
    """Return option id → candidate format → loss. Raises SnipError if the statistics do not fit the request."""
    if request.statistics is None:
        blocks, granularity = layout.model.blocks, request.granularity
        return synthetic_losses(blocks, request.formats, request.seed, granularity=granularity)
    from snip_megatron.sensitivity.problem import build_problem as score_problem
    from snip_megatron.sensitivity.request import SolveRequest

    table = _restaged(StatisticsTable.load(request.statistics), layout, request.statistics)
    quantised = tuple(fmt for fmt in request.formats if fmt is not Format.BF16)
    missing = [fmt.value for fmt in quantised if fmt.value not in table.formats]
    if missing:
        recorded = ", ".join(table.formats)
        raise SnipError(f"--statistics {request.statistics}: recorded without {missing[0]} (it has {recorded})")
    scored = SolveRequest(
        policy=request.policy,
        estimator=request.estimator,
        formats=tuple(fmt.value for fmt in quantised),
        granularity=request.granularity,
        target=0.0,
        prefix="--",
    )
    problem, _ = score_problem(table, scored)
    losses = {item.id: {choice.format: choice.loss for choice in item.choices} for item in problem.items}
    if Format.BF16 in request.formats:
        return {key: {Format.BF16: 0.0, **by_format} for key, by_format in losses.items()}
    return losses


def _restaged(table: StatisticsTable, layout: Layout, path: Path) -> StatisticsTable:
    """Return the table with the stages of this layout. Raises SnipError if its linears are not those of the model."""
    wanted = {
        str(LinearId("decoder", layer, kind)): layout.model.linears[kind]
        for layer in range(layout.model.blocks)
        for kind in DENSE_LAYER
    }
    found = {row.name: (row.n, row.k) for row in table.linears}
    if found != wanted:
        differing = sorted(name for name in {**wanted, **found} if wanted.get(name) != found.get(name))
        raise SnipError(
            f"--statistics {path}: of another model than {layout.model.name}: {differing[0]} is"
            f" {found.get(differing[0], 'absent')}, expected {wanted.get(differing[0], 'none')}"
        )
    stages = layout.stage_of()
    return replace(table, linears=tuple(replace(row, stage=stages[row.id.layer]) for row in table.linears))
