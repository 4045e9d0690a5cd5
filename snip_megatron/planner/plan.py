"""The plan as JSON types (``snip.plan/1``), which ``snip plan`` prints and writes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from snip_megatron.planner import memory, phases, step_time, updates
from snip_megatron.planner.layout import Layout
from snip_megatron.planner.memory import FormatsOf, stage_memory
from snip_megatron.planner.models import Model
from snip_megatron.planner.phases import plan_phases
from snip_megatron.planner.request import SYNTHETIC, PlanRequest, build_problem, gemm_counts
from snip_megatron.planner.step_time import StepModel, StepTime
from snip_megatron.precision import ALL_BF16, Format, LinearRow, fp4_fraction
from snip_megatron.precision.errors import cut
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.defaults import backend_of, dominated
from snip_megatron.solver import Solution, solve

PLAN_SCHEMA = "snip.plan/1"
_SOLVE_SECONDS = 30.0

Body = dict[str, Any]


def make_plan(step: StepModel, request: PlanRequest, *, gpu_memory: float | None = None) -> Body:
    """Plan one layout under one budget. ``gpu_memory``: bytes of a GPU; None for those of the table of times.

    Raises SnipError if the statistics are of another model, or if the budget cannot be met (exit code 3; the message
    names what can be reached).
    """
    layout = step.layout
    problem = build_problem(request, step)
    wanted = request.config.budget
    unit = " (times in seconds a step)" if wanted.kind == "speedup" else ""
    solution = solve(problem, time_limit_s=_SOLVE_SECONDS).met(f"--budget {cut(str(wanted))}", unit)
    variants: dict[str, FormatsOf] = {"bf16": lambda row: ALL_BF16}
    if Format.FP8 in step.model.formats:
        variants["fp8"] = lambda row: (Format.FP8,) * 3
    chosen = solution.to_precision_map()
    variants["map"] = lambda row: chosen.formats_of(row.name)
    steps = {name: step.step(formats_of) for name, formats_of in variants.items()}
    work, seconds = steps["bf16"].slowest, {name: time.total for name, time in steps.items()}
    cost = updates.update_cost(
        layout, request.config, step.links, work=work, bf16=seconds["bf16"], running=seconds["map"]
    )
    stages = [_stage(step, stage, variants, steps, request.config) for stage in range(layout.pp)]
    # The most that a GPU needs, in training under the map or during its updates, and what it has.
    peak, gpu = max(stage["bytes"]["map"]["peak"] for stage in stages), gpu_memory or step.rates.gpu_memory
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
        "budget": _budget(step, request, solution, steps),
        "phases": plan_phases(step, request, solution),
        "overhead": cost | {name: getattr(request.config, name) for name in ("policy", "estimator", "update_interval")},
        "assumptions": _assumptions(step, request),
    }


# -- parts of the body ---------------------------------------------------------------------------------------------
def _fields(of: Model | Layout, but: str) -> Body:
    return {f.name: getattr(of, f.name) for f in dataclasses.fields(of) if f.name != but}


def _kinds(layout: Layout) -> list[tuple[str, LinearRow]]:
    """Return (path in the layer, a row) for each different linear."""
    shapes = {(row.id.path, layout.shapes[row.name]): row for row in reversed(layout.model.rows)}
    return [(path, row) for (path, _), row in reversed(shapes.items())]


def _linear(step: StepModel, kind: str, row: LinearRow) -> Body:
    """Describe a kind of linear on one GPU: its shape, and the seconds of a microbatch in each format."""
    shape = step.layout.shapes[row.name]
    bf16 = step.linear(row, ALL_BF16)
    formats = [fmt for fmt in step.model.formats if fmt is not Format.BF16]
    runs = step.layout.microbatches
    return {
        "kind": kind,
        "tokens": shape.tokens,
        "n": shape.n,
        "k": shape.k,
        "gemms": step.layout.passes(row),
        "flops": 3.0 * shape.flops * step.layout.passes(row),
        "seconds": {fmt.value: step.linear(row, (fmt,) * 3) / runs for fmt in (Format.BF16, *formats)},
        "speedup": {fmt.value: bf16 / step.linear(row, (fmt,) * 3) for fmt in formats},
        "extrapolated": step.model.extrapolated(shape),
    }


def _stage(
    step: StepModel, stage: int, variants: Mapping[str, FormatsOf], steps: Mapping[str, StepTime], config: SnipConfig
) -> Body:
    layout = step.layout
    layers = layout.stages[stage]
    rows = [(row, layout.shapes[row.name]) for layer in layers for row in layer]
    work = {name: time.stages[stage] for name, time in steps.items()}
    bytes_by_variant = {
        name: stage_memory(layout, stage, formats_of, config).as_dict() for name, formats_of in variants.items()
    }
    return {
        "stage": stage,
        "chunks": _runs([layer[0].id.layer for layer in layers if layer[0].id.stack == "decoder"]),
        "blocks": len(layers),
        "parameters": layout.stage_parameters(stage),
        "flops": math.fsum(row.runs(None) * shape.flops * shape.microbatches for row, shape in rows),
        "bytes": bytes_by_variant,
        "seconds": {name: own.seconds | {"total": own.total} for name, own in work.items()},
        "busy": {name: own.total / steps[name].slowest for name, own in work.items()},
    }


def _runs(layers: Sequence[int]) -> list[list[int]]:
    """Return the first and the last layer of each run of consecutive ones: of each chunk of a stage."""
    groups = groupby(enumerate(layers), key=lambda place: place[1] - place[0])
    runs = [[layer for _, layer in group] for _, group in groups]
    return [[run[0], run[-1]] for run in runs]


def _step(layout: Layout, time: StepTime, bf16: StepTime) -> Body:
    tokens = layout.seq_length * layout.global_batch_size
    linears = tokens * layout.model.flops
    return {
        "seconds": time.total,
        "tokens_per_second_per_gpu": tokens / time.total / layout.ranks,
        "linear_flops_per_second_per_gpu": linears / time.total / layout.ranks,
        "speedup": bf16.total / time.total,
        "linears_speedup": bf16.linears / time.linears,
        "balance": time.balance,
        "bubble": time.bubble - 1.0,
        "data_parallel": time.data_parallel,
        "optimizer": time.optimizer,
    }


def _budget(step: StepModel, request: PlanRequest, solution: Solution, steps: Mapping[str, StepTime]) -> Body:
    """Describe the budget, its solution, and the ``--snip-budget`` of a training."""
    rows, chosen = step.layout.model.rows, solution.to_precision_map()
    share = fp4_fraction(chosen, {row.name: row.flops for row in rows})
    planned = {"speedup": steps["bf16"].linears / steps["map"].linears, "loss": solution.loss, "fp4": share}
    return {
        "asked": str(request.config.budget),
        "planned": planned[request.config.budget.kind],
        "dominated": dominated(request.config.budget, request.config.formats, backend_of(step.model)),
        "formats": list(request.config.formats),
        "granularity": request.config.granularity,
        "losses": "synthetic" if request.statistics is None else str(request.statistics),
        "status": solution.status,
        "loss": solution.loss,
        "bound": solution.bound,
        "solve_seconds": solution.solve_seconds,
        "items": len(solution.choices),
        "gemms": gemm_counts(rows, chosen),
        "fp4_share": share,
        "snip_arguments": request.training_arguments(),
    }


def _assumptions(step: StepModel, request: PlanRequest) -> list[str]:
    outside = [kind for kind, row in _kinds(step.layout) if step.model.extrapolated(step.layout.shapes[row.name])]
    found = [*step.model.assumptions, *step.rates.assumptions(step.links), *step_time.ASSUMPTIONS]
    if outside:
        found.insert(1, f"extrapolated, shapes outside of the measured ones: {', '.join(outside)}")
    found += [*memory.ASSUMPTIONS, *updates.ASSUMPTIONS, *(() if request.train_iters is None else phases.ASSUMPTIONS)]
    return found if request.statistics is not None else [*found, *SYNTHETIC]
