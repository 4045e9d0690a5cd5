"""``snip plan``: its request, the Problem that it solves, and the plan as JSON types (``snip.plan/1``)."""

import dataclasses
import math
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from snip_megatron.planner import memory, step_time
from snip_megatron.planner.layout import Layout
from snip_megatron.planner.memory import FormatsOf, probe_microbatches, stage_memory
from snip_megatron.planner.models import Model
from snip_megatron.planner.step_time import Links, StepModel, StepTime
from snip_megatron.precision import ALL_BF16, Format, Gemm, LinearRow, PrecisionMap, Role, fp4_fraction
from snip_megatron.precision.errors import SnipError, cut, plain_arguments
from snip_megatron.runtime.config import SnipConfig, resolve
from snip_megatron.runtime.defaults import backend_of, dominated
from snip_megatron.runtime.update_traffic import Collectives, RankShapes, table_bytes, update_collectives
from snip_megatron.sensitivity.divergence import FloatArray
from snip_megatron.sensitivity.policies import UNSOLVED, needs_forward_noise
from snip_megatron.sensitivity.probe_memory import LinearRows
from snip_megatron.sensitivity.problem import build_problem as problem_of_statistics
from snip_megatron.sensitivity.problem import list_options, make_problem, per_option, rounded
from snip_megatron.sensitivity.request import STANDING_SHARE, STANDING_WEIGHTS, PhasedRequest, carried_weights
from snip_megatron.sensitivity.table import SinkRow, StatisticsTable
from snip_megatron.solver import Solution, solve
from snip_megatron.solver.problem import Problem
from snip_megatron.timing.cost_model import CostModel

PLAN_SCHEMA = "snip.plan/1"
Body = dict[str, Any]

_SYNTHETIC = (
    "losses are synthetic (log-normal over four decades, larger for fprop, for linears that end a branch, and in the"
    " first and the last layers): they show what a budget costs in time and memory, not which options are good;"
    " --statistics uses a run's own"
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
_PHASES = (
    "phases: one plan for the whole run from losses of one moment; the learning rate falls as half a cosine to 0, and"
    f" {STANDING_SHARE:g} of an fprop's loss is gone as soon as the fprop is precise"
)
_MAP_SOLVE_SECONDS, _PHASES_SOLVE_SECONDS = 30.0, 10.0
_RATES = 1000  # samples of the learning rate
_FILES = 4  # that rank 0 writes for an update: statistics, problem, scores, map; with phases a plan too
_MOST_RANKS = 16_384  # for which an update is planned, unless the layout has more


# -- the request and its Problem -------------------------------------------------------------------------------
@dataclass(frozen=True)
class PlanRequest:
    """The configuration of a training, and what only a plan needs.

    Attributes:
        statistics: ``stats/step_<N>.npz`` of a run. Losses are synthetic if it is None.
        train_iters: training steps of a run with phases. None if the run has one map.
    """

    config: SnipConfig
    statistics: Path | None = None
    train_iters: int | None = None

    @property
    def takes_fastest(self) -> bool:
        """Whether losses decide the map and are not known, so that the plan has the fastest uniform map."""
        return self.config.budget.kind == "loss" and self.statistics is None

    def training_arguments(self) -> str:
        """Return the arguments with which a training solves this request."""
        config = self.config
        arguments = f"--snip-budget {config.budget} --snip-formats {','.join(config.formats)}"
        if config.granularity != SnipConfig.granularity:
            arguments += f" --snip-granularity {config.granularity}"
        if config.budget.kind == "fp4" and config.stage_tolerance != SnipConfig.stage_tolerance:
            arguments += f" --snip-stage-tolerance {config.stage_tolerance}"
        return arguments


def parse_request(
    fields: Mapping[str, Any],
    model: CostModel,
    *,
    statistics: Path | None = None,
    train_iters: int | None = None,
    recipe: tuple[str, ...] = (),
) -> PlanRequest:
    """Return the request of ``snip plan``, which has the defaults of a training on the device of the cost model.

    ``fields`` are the fields of the configuration that the user set, ``train_iters`` the steps of the run if they are
    known, and ``recipe`` the formats of Megatron's own FP8 or FP4. Raises SnipError if a training would refuse the
    fields, or if the cost model lacks a format.
    """
    with plain_arguments():
        config = resolve(fields, backend_of(model), ends=train_iters is not None, recipe=recipe)
    missing = [fmt for fmt in config.formats if not {Format(fmt), Format(fmt).base} & set(model.formats)]
    if missing:
        raise SnipError(
            f"--formats {cut(','.join(config.formats))}: the timings have no {missing[0]} (they have"
            f" {', '.join(model.formats)}); give --timings flops, or a file of snip calibrate that has it"
        )
    if config.phases is not None and train_iters is None:
        raise SnipError(f"--schedule {cut(config.schedule)}: needs the length of the run: give --train-iters")
    return PlanRequest(config, statistics, None if config.phases is None else train_iters)


def build_problem(request: PlanRequest, step: StepModel, phases: PhasedRequest | None = None) -> Problem:
    """Return the Problem of one map, or of ``phases``.

    Raises SnipError if the statistics are of another model or lack a format, or if a phase's glob matches nothing.
    """
    config, layout = request.config, step.layout
    formats = {Format(fmt) for fmt in (*config.formats, *(fmt for _, fmt in config.pins))}
    times = step.option_times(formats) if config.budget.timed else None
    solve_request = config.request(times=times, phases=phases)
    with plain_arguments():
        if request.statistics is not None:
            return problem_of_statistics(_restaged(request, layout, request.statistics), solve_request)[0]
        rows = layout.model.rows
        options = list_options(rows, solve_request, layout.seq_length * layout.global_batch_size)
        losses = synthetic_losses(rows, tuple(map(Format, config.formats)))
        fprop_share = np.array([[float(option.gemm is Gemm.FPROP)] * len(config.formats) for option in options])
        return make_problem(options, solve_request, rounded(per_option(losses, solve_request)), fprop_share)


def _restaged(request: PlanRequest, layout: Layout, path: Path) -> StatisticsTable:
    """Return the statistics with the stages of this layout. Raises SnipError if they are of another model."""
    table = StatisticsTable.load(path)
    missing = [fmt for fmt in request.config.measured_formats if fmt not in table.formats]
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
_WRITES, _MLP = 2.0, 1.8  # factors of linears that end a branch, and of those outside of attention
_GEMM = (10.0, 3.0, 1.0)  # factors of fprop, dgrad, wgrad
_SPREAD, _FORMAT_SPREAD = 1.5, 0.3


def synthetic_losses(rows: Sequence[LinearRow], formats: Sequence[Format]) -> FloatArray:
    """Return losses, float64 [linears, 3, formats]."""
    rng = np.random.default_rng(1)
    block = np.array([row.sub_block // 2 for row in rows])
    depth = 1 + 0.8 * np.exp(-block / 4) + 0.5 * np.exp((block - max(block)) / 4)
    writes = np.array([_WRITES if row.role is Role.WRITES else 1.0 for row in rows])
    kind = writes * np.array([1.0 if "attention" in row.id.path else _MLP for row in rows])
    draws = np.exp(rng.normal(0, _SPREAD, (len(rows), len(Gemm))))
    loss = _MEDIAN_LOSS * (depth * kind)[:, None] * np.array(_GEMM) * draws
    spread = np.exp(rng.normal(0, _FORMAT_SPREAD, (*loss.shape, len(_FORMAT_LOSS))))
    drawn = list(_FORMAT_LOSS)
    relative = np.array([_FORMAT_LOSS[fmt.base] for fmt in formats])
    losses: FloatArray = loss[..., None] * (relative * spread[..., [drawn.index(fmt.base) for fmt in formats]])
    return losses


# -- the plan --------------------------------------------------------------------------------------------------
def make_plan(step: StepModel, request: PlanRequest, *, gpu_memory: float | None = None) -> Body:
    """Plan one layout under one budget. ``gpu_memory`` are the bytes of a GPU, by default those of the timing table.

    Raises SnipError if the statistics are of another model, or if the budget cannot be met (exit code 3; the message
    names what can be reached).
    """
    layout, config = step.layout, request.config
    unit = " (times in seconds a step)" if config.budget.kind == "speedup" else ""
    problem = build_problem(request, step)
    if request.takes_fastest:
        solution = _fastest_uniform(problem, step, config)
    else:
        solution = solve(problem, time_limit_s=_MAP_SOLVE_SECONDS)
        solution = solution.met(f"--budget {cut(str(config.budget))}", unit)
    precision_map = solution.to_precision_map()
    variants: dict[str, FormatsOf] = {"bf16": lambda row: ALL_BF16}
    if Format.FP8 in step.model.formats:
        variants["fp8"] = lambda row: (Format.FP8,) * 3
    variants["map"] = lambda row: precision_map.formats_of(row.name)
    steps = {name: step.step(formats_of) for name, formats_of in variants.items()}
    stages = [_stage(step, stage, variants, steps, config) for stage in range(layout.pp)]
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
        "phases": _plan_phases(step, request, solution),
        "overhead": _update_cost(layout, config, step.links, steps)
        | {name: getattr(config, name) for name in ("policy", "estimator", "update_interval")}
        | update_scale(layout, config, precision_map),
        "assumptions": _assumptions(step, request),
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
    seconds = {
        fmt: step.linear(row, (fmt,) * 3) / step.layout.microbatches
        for fmt in (Format.BF16, *(fmt for fmt in step.model.formats if fmt is not Format.BF16))
    }
    bf16 = step.linear(row, ALL_BF16)
    return {
        "kind": kind,
        "tokens": shape.tokens,
        "n": shape.n,
        "k": shape.k,
        "gemms": passes,
        "flops": 3.0 * shape.flops * passes,
        "seconds": {fmt.value: value for fmt, value in seconds.items()},
        "speedup": {fmt.value: bf16 / step.linear(row, (fmt,) * 3) for fmt in seconds if fmt is not Format.BF16},
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


def _budget(step: StepModel, request: PlanRequest, solution: Solution, steps: Mapping[str, StepTime]) -> Body:
    """Describe the budget, its solution, and the ``--snip-budget`` of a training."""
    config, precision_map = request.config, solution.to_precision_map()
    share = _fp4_share(step, precision_map)
    planned = {"speedup": steps["bf16"].linears / steps["map"].linears, "loss": solution.loss, "fp4": share}
    return {
        "asked": str(config.budget),
        "planned": planned[config.budget.kind],
        "dominated": dominated(config.budget, config.formats, backend_of(step.model)),
        "formats": list(config.formats),
        "granularity": config.granularity,
        "losses": str(request.statistics) if request.statistics else None if request.takes_fastest else "synthetic",
        "status": solution.status,
        "loss": solution.loss,
        "bound": solution.bound,
        "solve_seconds": solution.solve_seconds,
        "items": len(solution.choices),
        "gemms": _gemm_counts(step, precision_map),
        "fp4_share": share,
        "snip_arguments": request.training_arguments(),
    }


def _gemm_counts(step: StepModel, precision_map: PrecisionMap) -> dict[str, int]:
    return dict(Counter(fmt.value for row in step.layout.model.rows for fmt in precision_map.formats_of(row.name)))


def _fp4_share(step: StepModel, precision_map: PrecisionMap) -> float:
    return fp4_fraction(precision_map, {row.name: row.flops for row in step.layout.model.rows})


def _assumptions(step: StepModel, request: PlanRequest) -> list[str]:
    outside = [kind for kind, row in _kinds(step.layout) if step.model.extrapolated(step.layout.shapes[row.name])]
    lines = [*step.model.assumptions, *step.rates.assumptions(step.links), *step_time.ASSUMPTIONS]
    if outside:
        lines.insert(1, f"extrapolated, shapes outside of the measured ones: {', '.join(outside)}")
    lines += [*memory.ASSUMPTIONS, _UPDATES]
    lines += [] if request.train_iters is None or request.takes_fastest else [_PHASES]
    return lines if request.statistics is not None else [*lines, _UNIFORM if request.takes_fastest else _SYNTHETIC]


# -- updates ---------------------------------------------------------------------------------------------------
def probe_passes(layout: Layout, config: SnipConfig) -> dict[str, int]:
    """Return kind of ``probe`` event → microbatches that a rank runs for it, each in one call of the schedule."""
    if not config.updates:
        return {}
    kinds = ["statistics", *(["forward_noise"] if needs_forward_noise(config.request()) else [])]
    return dict.fromkeys(kinds, probe_microbatches(layout, config))


def _update_cost(layout: Layout, config: SnipConfig, links: Links, steps: Mapping[str, StepTime]) -> Body:
    """Predict the cost of an update.

    ``passes`` are the calls of the pipeline schedule, ``microbatches`` those that a rank runs in them, ``by_kind`` of
    ``probe`` event. The duration is given in bf16 ``steps`` and in ``seconds``, of which the reduction of the probe's
    gradients over data parallel ranks takes ``reducing_seconds``. ``share`` is the share of training time. ``fixed``
    says why there are no updates.
    """
    by_kind, ends = probe_passes(layout, config), (layout.pp - 1) / layout.vpp
    passing = sum(count + ends for count in by_kind.values()) / layout.microbatches * steps["bf16"].slowest
    parameters = max(layout.probed_parameters(stage) for stage in range(layout.pp))
    reduced = 4 * parameters if layout.dp > 1 and "forward_noise" in by_kind else 0  # bytes, in FP32
    reducing = 2.0 * (layout.dp - 1) / layout.dp * reduced / links.of(layout.tp * layout.dp)
    seconds = passing + reducing
    return {
        "passes": len(by_kind),
        "microbatches": sum(by_kind.values()),
        "by_kind": by_kind,
        "steps": seconds / steps["bf16"].total,
        "seconds": seconds,
        "reducing_seconds": reducing,
        "share": seconds / (seconds + config.update_interval * steps["map"].total) if by_kind else 0.0,
        "fixed": _fixed_map(config),
    }


def update_scale(layout: Layout, config: SnipConfig, precision_map: PrecisionMap) -> Body:
    """Return what an update exchanges, of the rank that exchanges most, and what rank 0 keeps.

    ``collectives`` are those of this layout, in its order. ``ranks`` has the number of collectives and bytes in each
    group for this number of ranks, and twice, four times, … as many data parallel ones, up to 16,384. ``table_bytes``
    are those of the statistics table, and ``decision_bytes`` those of the pickled maps, such as ``precision_map``, of
    which one is adopted. ``forwards`` is the largest number of forwards that measure them. ``files`` is the number of
    whole files that rank 0 writes for an update, where it also appends to two.
    """
    if not config.updates:
        return {"collectives": [], "ranks": []}
    table = table_bytes(layout.model.rows, config.measured_formats, sinks_of(layout.model))
    weighs_updates = needs_forward_noise(config.request())
    candidates = 2 if weighs_updates and config.q == "split" and config.phases is None else 1
    decision = candidates * len(pickle.dumps(precision_map))
    sizes = {"table_bytes": table, "decision_bytes": decision, "files": _FILES + (config.phases is not None)}
    sizes["forwards"] = 1 + candidates

    def collectives(dp: int) -> list[Collectives]:
        shared = 2 if layout.model.tied and layout.pp > 1 else 1
        etp = layout.etp or layout.tp
        ranks = {
            "world": layout.tp * layout.cp * layout.pp * dp,
            "tensor": layout.tp,
            "data": layout.cp * dp,
            "expert tensor": etp,
            "expert data": layout.tp * layout.cp * dp // (etp * layout.ep),
            "embedding": shared,
        }
        of_stages = (
            update_collectives(
                rank_shapes(layout, stage),
                ranks,
                formats=len(config.measured_formats),
                table=table,
                decision=decision,
                microbatches=probe_microbatches(layout, config),
                weighs_updates=weighs_updates,
                candidates=candidates,
            )
            for stage in range(layout.pp)
        )
        return max(of_stages, key=lambda calls: sum(call.bytes for call in calls))

    rows: list[Body] = []
    dp = layout.dp
    while not rows or layout.ranks // layout.dp * dp <= _MOST_RANKS:
        groups: dict[str, list[int]] = {}
        for call in collectives(dp):
            count, size = groups.get(call.group, (0, 0))
            groups[call.group] = [count + call.count, size + call.bytes]
        rows.append({"ranks": layout.ranks // layout.dp * dp, "dp": dp, "groups": groups})
        dp *= 2
    return sizes | {"collectives": list(map(dataclasses.asdict, collectives(layout.dp))), "ranks": rows}


def sinks_of(model: Model) -> list[SinkRow]:
    """Return the word embedding and the norms of a model, as a training names them."""
    norms = {row.sub_block for row in model.rows if row.role is Role.READS}
    return [SinkRow("", 0, model.hidden)] * (len(norms) + 2)


def rank_shapes(layout: Layout, stage: int) -> RankShapes:
    rows = [row for layer in layout.stages[stage] for row in layer]
    linears: dict[bool, list[LinearRows]] = {False: [], True: []}
    for row in rows:
        shape = layout.shapes[row.name]
        linears[row.experts > 1] += [LinearRows(shape.tokens, shape.n, shape.k)] * layout.matrices(row)
    norms = len({row.sub_block for row in rows if row.role is Role.READS}) + (stage == layout.pp - 1)
    embedding = layout.vocabulary * layout.model.hidden // layout.tp
    return RankShapes(
        linears[False],
        linears[True],
        sinks=[layout.model.hidden] * norms + [embedding] * (stage == 0),
        token_shards=[layout.model.hidden] * norms * layout.sequence_parallel,
        shared_embedding=embedding * (layout.model.tied and stage in (0, layout.pp - 1)),
    )


def _fixed_map(config: SnipConfig) -> str:
    """Return the map of a training that solves for none; an empty text if it solves."""
    if config.updates:
        return ""
    sources = {"map": config.map, "replay": config.replay}
    sources["policy"] = config.policy if config.policy in UNSOLVED else None
    source = next((f"{name} {cut(value)}" for name, value in sources.items() if value is not None), None)
    return "no updates: SNIP quantises no linear" if source is None else f"{source}: its map is fixed"


# -- phases of a run -------------------------------------------------------------------------------------------
def _plan_phases(step: StepModel, request: PlanRequest, one_map: Solution) -> Body | None:
    """Plan the phases of a run, over which the budget is the average: the plan of an update before the first step.

    ``one_map`` is the solution of one map under the same budget, for comparison. Returns None if the run has no
    phases, or losses decide them and are not known.
    Raises SnipError (exit code 3) if nothing meets the budget.
    """
    config, steps = request.config, request.train_iters
    if config.phases is None or steps is None or request.takes_fastest:
        return None
    rates = [1.0 + math.cos(math.pi * i / _RATES) for i in range(_RATES + 1)]
    standing = STANDING_WEIGHTS[config.deployed]
    carried = partial(carried_weights, 0, end=steps, rates=rates)
    phases = PhasedRequest.of_schedule(config.phases, (0, steps), 0, carried=carried, standing=standing)
    problem = build_problem(request, step, phases)
    solution = solve(problem, time_limit_s=_PHASES_SOLVE_SECONDS).met(
        f"--budget {cut(str(config.budget))} over --schedule {cut(config.schedule)}",
        "; lower the budget, or those of the phases",
    )
    bf16 = step.step(lambda row: ALL_BF16)
    rows = [_phase(step, bf16, *each) for each in zip(phases.begins, phases.steps, solution.phases, strict=True)]

    def mean(name: str) -> float:
        return float(math.fsum(row["steps"] * row[name] for row in rows) / sum(row["steps"] for row in rows))

    return {
        "schedule": config.schedule,
        "train_iters": steps,
        "deployed": config.deployed,
        "asked": str(config.budget),
        "status": solution.status,
        "solve_seconds": solution.solve_seconds,
        "loss": solution.loss,
        "bound": solution.bound,
        "static_loss": math.fsum(c.loss for i in problem.items for c in i.choices if c.format is one_map.choices[i.id]),
        "phases": rows,
        "average_fp4_share": mean("fp4_share"),
        "average_seconds": mean("seconds"),
        "bf16_seconds": bf16.total,
        "average_speedup": bf16.total / mean("seconds"),
        "average_linears_speedup": bf16.linears / mean("linears_seconds"),
        "achieved": solution.achieved,
        "saved_seconds": math.fsum(row["saved_seconds"] for row in rows),
    }


def _phase(step: StepModel, bf16: StepTime, begin: int, steps: int, solution: Solution) -> Body:
    precision_map = solution.to_precision_map()
    time = step.step(lambda row: precision_map.formats_of(row.name))
    return {
        "from_step": begin,
        "steps": steps,
        "gemms": _gemm_counts(step, precision_map),
        "fp4_share": _fp4_share(step, precision_map),
        "seconds": time.total,
        "speedup": bf16.total / time.total,
        "linears_seconds": time.linears,
        "saved_seconds": steps * (bf16.total - time.total),
        "loss": solution.loss,
    }
