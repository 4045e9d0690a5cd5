"""What a plan is asked for, and its Problem: that of a training, whose losses may be synthetic."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from snip_megatron.planner.layout import Layout
from snip_megatron.planner.step_time import StepModel
from snip_megatron.precision import Format, Gemm, LinearRow, PrecisionMap, Role
from snip_megatron.precision.errors import SnipError, cut, plain_arguments
from snip_megatron.runtime.config import SnipConfig, resolve
from snip_megatron.runtime.defaults import backend_of
from snip_megatron.sensitivity.divergence import FloatArray
from snip_megatron.sensitivity.problem import build_problem as score_problem
from snip_megatron.sensitivity.problem import list_options, make_problem, per_option, rounded
from snip_megatron.sensitivity.request import PhasedRequest
from snip_megatron.sensitivity.table import StatisticsTable
from snip_megatron.solver.problem import Problem
from snip_megatron.timing.cost_model import CostModel

SYNTHETIC = (
    "losses are synthetic (log-normal over four decades, larger for fprop, for linears that end a branch, and in the"
    " first and the last layers): they show what a budget costs in time and memory, not which options are good;"
    " --statistics uses a run's own",
)

FORMAT_LOSS: Mapping[Format, float] = {
    Format.BF16: 0.0,
    Format.FP8: 0.02,
    Format.MXFP8: 0.03,
    Format.FP8_TENSOR: 0.05,
    Format.NVFP4: 0.5,
    Format.MXFP4: 0.8,
    Format.FP4: 1.0,
}
"""The loss of a format relative to fp4. A variant loses what its base does."""

_DRAWN = tuple(FORMAT_LOSS)

_UNIT = 1e-5  # loss of a median fp4 option, roughly in nats
_WRITES, _MLP = 2.0, 1.8  # of linears that end a branch, and of those outside of attention
_GEMM = (10.0, 3.0, 1.0)  # fprop, dgrad, wgrad
_SPREAD, _FORMAT_SPREAD = 1.5, 0.3


@dataclass(frozen=True)
class PlanRequest:
    """The configuration of a training, and what only a plan asks for.

    ``statistics`` is a run's ``stats/step_<N>.npz``; None for synthetic losses, drawn by ``seed``. ``train_iters`` are
    the training steps of a run with phases; None for one map.
    """

    config: SnipConfig
    statistics: Path | None = None
    seed: int = 1
    train_iters: int | None = None

    def training_arguments(self) -> str:
        """Return the arguments with which a training solves this request."""
        config = self.config
        arguments = f"--snip-budget {config.budget} --snip-formats {','.join(self.config.formats)}"
        if config.granularity != SnipConfig.granularity:
            arguments += f" --snip-granularity {config.granularity}"
        if config.budget.kind == "fp4" and config.stage_tolerance != SnipConfig.stage_tolerance:
            arguments += f" --snip-stage-tolerance {config.stage_tolerance}"
        return arguments


def parse_request(
    given: Mapping[str, Any],
    model: CostModel,
    *,
    statistics: Path | None = None,
    seed: int = 1,
    train_iters: int | None = None,
    recipe: tuple[str, ...] = (),
) -> PlanRequest:
    """Return the request of ``snip plan``, which has the defaults of a training on the device of the cost model.

    ``given`` are the fields of the configuration that were given, ``train_iters`` the steps of the run, if known, and
    ``recipe`` the formats of Megatron's own FP8 or FP4. Raises SnipError if a training would refuse the fields, or if
    the cost model lacks a format.
    """
    with plain_arguments():
        config = resolve(given, backend_of(model), ends=train_iters is not None, recipe=recipe)
    missing = [fmt for fmt in config.formats if not {Format(fmt), Format(fmt).base} & set(model.formats)]
    if missing:
        raise SnipError(
            f"--formats {cut(','.join(config.formats))}: the timings have no {missing[0]} (they have"
            f" {', '.join(model.formats)}); give --timings flops, or a file of snip calibrate that has it"
        )
    if config.phases is not None and train_iters is None:
        raise SnipError(f"--schedule {cut(config.schedule)}: needs the length of the run: give --train-iters")
    return PlanRequest(config, statistics, seed, None if config.phases is None else train_iters)


def build_problem(request: PlanRequest, step: StepModel, phases: PhasedRequest | None = None) -> Problem:
    """Build the Problem of one map, or of ``phases``.

    Raises SnipError if the statistics are of another model or lack a format, or a phase's glob matches nothing.
    """
    config, layout = request.config, step.layout
    formats = {Format(fmt) for fmt in (*config.formats, *(fmt for _, fmt in config.pins))}
    asked = config.request(times=step.option_times(formats) if config.budget.timed else None, phases=phases)
    with plain_arguments():
        if request.statistics is not None:
            return score_problem(_restaged(request, layout, request.statistics), asked)[0]
        rows = layout.model.rows
        options = list_options(rows, asked, layout.seq_length * layout.global_batch_size)
        losses = rounded(per_option(synthetic_losses(rows, tuple(map(Format, config.formats)), request.seed), asked))
        fprop_share = np.array([[float(option.gemm is Gemm.FPROP)] * len(config.formats) for option in options])
        return make_problem(options, asked, losses, fprop_share)


def gemm_counts(rows: Sequence[LinearRow], precision_map: PrecisionMap) -> dict[str, int]:
    return dict(Counter(fmt.value for row in rows for fmt in precision_map.formats_of(row.name)))


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


# -- losses of a model without statistics: seeded, and heavy-tailed as measured losses are ---------------------------
def synthetic_losses(rows: Sequence[LinearRow], formats: Sequence[Format], seed: int) -> FloatArray:
    """Return losses, float64 [linears, 3, formats]. Equal seeds give equal losses."""
    rng = np.random.default_rng(seed)
    block = np.array([row.sub_block // 2 for row in rows])
    depth = 1 + 0.8 * np.exp(-block / 4) + 0.5 * np.exp((block - max(block)) / 4)
    kind = [
        (_WRITES if row.role is Role.WRITES else 1.0) * (1.0 if "attention" in row.id.path else _MLP) for row in rows
    ]
    loss = _UNIT * (depth * kind)[:, None] * np.array(_GEMM) * np.exp(rng.normal(0, _SPREAD, (len(rows), len(Gemm))))
    spread = np.exp(rng.normal(0, _FORMAT_SPREAD, (*loss.shape, len(_DRAWN))))
    spread = spread[..., [_DRAWN.index(fmt.base) for fmt in formats]]
    relative = np.array([FORMAT_LOSS[fmt.base] for fmt in formats])
    losses: FloatArray = loss[..., None] * (relative * spread)
    return losses
