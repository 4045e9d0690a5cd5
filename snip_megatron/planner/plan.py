"""``snip plan``: its request, the Problem that it solves, and the plan as JSON types (``snip.plan/1``)."""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from snip_megatron.planner import memory
from snip_megatron.planner.layout import Layout
from snip_megatron.planner.memory import FormatsOf, stage_memory
from snip_megatron.planner.models import Model
from snip_megatron.planner.step_time import StepModel, StepTime
from snip_megatron.planner.updates import update_cost, update_scale
from snip_megatron.precision import ALL_BF16, Format, Gemm, LinearRow, fp4_fraction
from snip_megatron.precision.errors import SnipError, cut, plain_arguments
from snip_megatron.runtime.config import SnipConfig, backend_of, dominated, resolve
from snip_megatron.sensitivity.divergence import FloatArray
from snip_megatron.sensitivity.problem import build_problem as problem_of_statistics
from snip_megatron.sensitivity.problem import list_options, make_problem, per_option, rounded
from snip_megatron.sensitivity.table import StatisticsTable
from snip_megatron.solver import Solution, solve
from snip_megatron.solver.problem import Problem
from snip_megatron.timing.cost_model import CostModel

PLAN_SCHEMA = "snip.plan/1"
Body = dict[str, Any]

_SYNTHETIC = (
    "losses are synthetic (log-normal, larger for fprop): they show what a budget costs in time and memory, not which"
    " GEMMs get which format; --statistics uses a run's own"
)
_UNIFORM = (
    "losses are not known before a run: the map is the fastest uniform one, which every measured dense model took at"
    " the default budget; mixtures of experts kept some GEMMs in wider formats; --statistics uses a run's own losses"
)
_UPDATES = (
    "probes: each pass is a bf16 forward and backward of a microbatch, each call fills the pipeline once; what"
    " recording adds to the statistics pass, and what capturing CUDA graphs anew takes, is not modelled; gradients go"
    " over data parallel ranks exposed"
)
_PHASES = "phases: the map is one for the whole run, of which the phases have several"
_SOLVE_SECONDS = 30.0


# -- the Problem of a plan ---------------------------------------------------------------------------------------
def parse_config(
    fields: Mapping[str, Any], model: CostModel, *, has_end: bool = False, recipe: tuple[str, ...] = ()
) -> SnipConfig:
    """Return the configuration of a plan, which has the defaults of a training on the device of the cost model.

    ``fields`` are those that the user set. ``has_end`` says whether the number of steps is known. ``recipe`` names the
    formats of Megatron's own FP8 or FP4. Raises SnipError if a training would refuse the fields, or if the cost model
    lacks a format.
    """
    with plain_arguments():
        config = resolve(fields, backend_of(model), has_end=has_end, recipe=recipe)
    missing = [fmt for fmt in config.formats if not {Format(fmt), Format(fmt).base} & set(model.formats)]
    if missing:
        raise SnipError(
            f"--formats {cut(','.join(config.formats))}: the timings have no {missing[0]} (they have"
            f" {', '.join(model.formats)}); give --timings flops, or a file of snip calibrate that has it"
        )
    return config


def build_problem(config: SnipConfig, step: StepModel, statistics: Path | None = None) -> Problem:
    """Return the Problem of one map, with the losses of a run's ``stats/step_<N>.npz`` or synthetic ones.

    Raises SnipError if the statistics are of another model or lack a format.
    """
    layout = step.layout
    formats = {Format(fmt) for fmt in (*config.formats, *(fmt for _, fmt in config.pins))}
    request = config.request(times=step.option_times(formats) if config.budget.timed else None)
    with plain_arguments():
        if statistics is not None:
            return problem_of_statistics(_restaged(config, layout, statistics), request)[0]
        rows = layout.model.rows
        options = list_options(rows, request, layout.seq_length * layout.global_batch_size)
        losses = synthetic_losses(rows, tuple(map(Format, config.formats)))
        fprop_share = np.array([[float(option.gemm is Gemm.FPROP)] * len(config.formats) for option in options])
        return make_problem(options, request, rounded(per_option(losses, request)), fprop_share)


def _restaged(config: SnipConfig, layout: Layout, path: Path) -> StatisticsTable:
    """Return the statistics with the stages of this layout. Raises SnipError if they are of another model."""
    table = StatisticsTable.load(path)
    missing = [fmt for fmt in config.measured_formats if fmt not in table.formats]
    if missing:
        recorded = ", ".join(table.formats)
        raise SnipError(f"--statistics {path}: recorded without {missing[0]} (it has {recorded})")
    sizes, expected = ({row.name: (row.n, row.k) for row in rows} for rows in (table.linears, layout.model.rows))
    if sizes != expected:
        differing = min(name for name in {**expected, **sizes} if sizes.get(name) != expected.get(name))
        raise SnipError(
            f"--statistics {path}: of another model than {layout.model.name}: {differing} is"
            f" {sizes.get(differing, 'absent')}, expected {expected.get(differing, 'none')}"
        )
    stages = {row.name: row.stage for row in layout.model.rows}
    return replace(table, linears=tuple(replace(row, stage=stages[row.name]) for row in table.linears))


# -- synthetic losses: seeded, and heavy-tailed as measured losses are -----------------------------------------
_FORMAT_LOSS: Mapping[Format, float] = {
    Format.BF16: 0.0, Format.FP8: 0.02, Format.MXFP8: 0.03, Format.FP8_TENSOR: 0.05, Format.NVFP4: 0.5,
    Format.MXFP4: 0.8, Format.FP4: 1.0,
}  # fmt: skip
"""The loss of a format relative to fp4. A variant loses what its base does."""
_MEDIAN_LOSS = 1e-5  # of an fp4 option, roughly in nats
_GEMM = (10.0, 3.0, 1.0)  # factors of fprop, dgrad, wgrad
_SPREAD = 1.5


def synthetic_losses(rows: Sequence[LinearRow], formats: Sequence[Format]) -> FloatArray:
    """Return losses, float64 [linears, 3, formats]."""
    draws = np.exp(np.random.default_rng(1).normal(0, _SPREAD, (len(rows), len(Gemm))))
    relative = np.array([_FORMAT_LOSS[fmt.base] for fmt in formats])
    losses: FloatArray = (_MEDIAN_LOSS * np.array(_GEMM) * draws)[..., None] * relative
    return losses


# -- the plan --------------------------------------------------------------------------------------------------
def make_plan(
    step: StepModel, config: SnipConfig, statistics: Path | None = None, *, gpu_memory: float | None = None
) -> Body:
    """Plan one layout under one budget. ``gpu_memory`` are the bytes of a GPU, by default those of the timing table.

    Losses are those of a run's ``statistics``. Without them a budget of the loss takes the fastest uniform map, and
    other budgets take synthetic losses. Raises SnipError if the statistics are of another model, or if the budget
    cannot be met (exit code 3; the message names what can be reached).
    """
    layout, fastest = step.layout, config.budget.kind == "loss" and statistics is None
    unit = " (times in seconds a step)" if config.budget.kind == "speedup" else ""
    problem = build_problem(config, step, statistics)
    if fastest:
        solution = _fastest_uniform(problem, step, config)
    else:
        solution = solve(problem, time_limit_s=_SOLVE_SECONDS)
        solution = solution.met(f"--budget {cut(str(config.budget))}", unit)
    precision_map = solution.to_precision_map()
    variants: dict[str, FormatsOf] = {"bf16": lambda row: ALL_BF16}
    if Format.FP8 in step.model.formats:
        variants["fp8"] = lambda row: (Format.FP8,) * 3
    variants["map"] = lambda row: precision_map.formats_of(row.name)
    steps = {name: step.step(formats_of) for name, formats_of in variants.items()}
    stages = [_stage(step, stage, variants, steps, config) for stage in range(layout.pp)]
    peak, gpu = max(stage["bytes"]["map"]["peak"] for stage in stages), gpu_memory or step.gpu_memory
    return {
        "schema": PLAN_SCHEMA,
        "model": _fields(layout.model, "rows") | {"blocks": layout.model.blocks, "parameters": layout.model.parameters},
        "layout": _fields(layout, "model")
        | {"gpus": layout.ranks, "microbatches": layout.microbatches, "bubble": layout.bubble - 1.0},
        "timings": step.model.name,
        "linears": [_linear(step, kind, row) for kind, row in _kinds(layout)],
        "stages": stages,
        "memory": {"peak": peak, "gpu": gpu, "fits": None if gpu is None else peak <= gpu},
        "steps": {name: _step(layout, time, steps["bf16"]) for name, time in steps.items()},
        "budget": _budget(step, config, solution, steps)
        | {"losses": str(statistics) if statistics else None if fastest else "synthetic"},
        "overhead": update_cost(layout, config, step.links, steps)
        | {name: getattr(config, name) for name in ("policy", "estimator", "update_interval")}
        | update_scale(layout, config, precision_map),
        "assumptions": [
            *_assumptions(step, config),
            *([] if statistics else [_UNIFORM if fastest else _SYNTHETIC]),
        ],
    }


def _fastest_uniform(problem: Problem, step: StepModel, config: SnipConfig) -> Solution:
    """Return the fastest of the candidates for every GEMM that is not pinned to another format."""
    fastest = min(map(Format, config.formats), key=lambda fmt: step.step(lambda row: (fmt,) * 3).linears)
    choices = {}
    for item in problem.items:
        formats = [choice.format for choice in item.choices]
        choices[item.id] = fastest if fastest in formats else formats[0]
    return Solution(choices, "static", problem.budget)


def _fields(instance: Model | Layout, excluded: str) -> Body:
    return {f.name: getattr(instance, f.name) for f in dataclasses.fields(instance) if f.name != excluded}


def _kinds(layout: Layout) -> list[tuple[str, LinearRow]]:
    """Return (path in the layer, a row) for each different linear."""
    shapes = {(row.id.path, layout.shapes[row.name]): row for row in reversed(layout.model.rows)}
    return [(path, row) for (path, _), row in reversed(shapes.items())]


def _linear(step: StepModel, kind: str, row: LinearRow) -> Body:
    """Describe a kind of linear on one GPU: its shape, and the seconds of a microbatch in each format."""
    shape, passes = step.layout.shapes[row.name], step.layout.passes(row)
    formats = dict.fromkeys((Format.BF16, *step.model.formats))
    seconds = {fmt: step.linear(row, (fmt,) * 3) / step.layout.microbatches for fmt in formats}
    return {
        "kind": kind,
        "tokens": shape.tokens,
        "n": shape.n,
        "k": shape.k,
        "gemms": passes,
        "flops": 3.0 * shape.flops * passes,
        "seconds": {fmt.value: value for fmt, value in seconds.items()},
        "speedup": {fmt.value: seconds[Format.BF16] / seconds[fmt] for fmt in formats if fmt is not Format.BF16},
        "extrapolated": step.model.extrapolated(shape),
    }


def _stage(
    step: StepModel, stage: int, variants: Mapping[str, FormatsOf], steps: Mapping[str, StepTime], config: SnipConfig
) -> Body:
    layout = step.layout
    layers = layout.stages[stage]
    rows = [(row, layout.shapes[row.name]) for layer in layers for row in layer]
    work = {name: time.stages[stage] for name, time in steps.items()}
    return {
        "stage": stage,
        "chunks": _runs([layer[0].id.layer for layer in layers if layer[0].id.stack == "decoder"]),
        "blocks": len(layers),
        "parameters": layout.stage_parameters(stage),
        "flops": math.fsum(row.runs(None) * shape.flops * shape.microbatches for row, shape in rows),
        "bytes": {name: stage_memory(layout, stage, formats_of, config) for name, formats_of in variants.items()},
        "seconds": work,
        "busy": {name: seconds["total"] / steps[name].slowest for name, seconds in work.items()},
    }


def _runs(layers: Sequence[int]) -> list[list[int]]:
    """Return the first and the last layer of each run of consecutive ones: of each chunk of a stage."""
    groups = groupby(enumerate(layers), key=lambda place: place[1] - place[0])
    runs = [[layer for _, layer in group] for _, group in groups]
    return [[run[0], run[-1]] for run in runs]


def _step(layout: Layout, time: StepTime, bf16: StepTime) -> Body:
    tokens = layout.seq_length * layout.global_batch_size
    return {
        "seconds": time.total,
        "tokens_per_second_per_gpu": tokens / time.total / layout.ranks,
        "linear_flops_per_second_per_gpu": tokens * layout.model.flops / time.total / layout.ranks,
        "speedup": bf16.total / time.total,
        "linears_speedup": bf16.linears / time.linears,
        "balance": time.balance,
        "bubble": time.bubble - 1.0,
        "data_parallel": time.data_parallel,
        "optimizer": time.optimizer,
    }


def _budget(step: StepModel, config: SnipConfig, solution: Solution, steps: Mapping[str, StepTime]) -> Body:
    """Describe the budget, its solution, and the arguments of a training that solves it."""
    precision_map, rows = solution.to_precision_map(), step.layout.model.rows
    share = fp4_fraction(precision_map, {row.name: row.flops for row in rows})
    arguments = f"--snip-budget {config.budget} --snip-formats {','.join(config.formats)}"
    if config.granularity != SnipConfig.granularity:
        arguments += f" --snip-granularity {config.granularity}"
    if config.budget.kind == "fp4" and config.stage_tolerance != SnipConfig.stage_tolerance:
        arguments += f" --snip-stage-tolerance {config.stage_tolerance}"
    planned = {"speedup": steps["bf16"].linears / steps["map"].linears, "loss": solution.loss, "fp4": share}
    return {
        "asked": str(config.budget),
        "planned": planned[config.budget.kind],
        "dominated": dominated(config.budget, config.formats, backend_of(step.model)),
        "formats": list(config.formats),
        "granularity": config.granularity,
        "status": solution.status,
        "loss": solution.loss,
        "bound": solution.bound,
        "solve_seconds": solution.solve_seconds,
        "items": len(solution.choices),
        "gemms": dict(Counter(fmt.value for row in rows for fmt in precision_map.formats_of(row.name))),
        "fp4_share": share,
        "snip_arguments": arguments,
    }


def _assumptions(step: StepModel, config: SnipConfig) -> list[str]:
    outside = [kind for kind, row in _kinds(step.layout) if step.model.extrapolated(step.layout.shapes[row.name])]
    lines = [*step.model.assumptions, *step.assumptions()]
    if outside:
        lines.insert(1, f"extrapolated, shapes outside of the measured ones: {', '.join(outside)}")
    return [*lines, *memory.ASSUMPTIONS, _UPDATES, *([] if config.phases is None else [_PHASES])]
