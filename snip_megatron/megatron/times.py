"""The times of a run's GEMMs, predicted by a table or measured by the run itself, and the timeline of the run.

The times, for budgets of time and of loss, are seconds per training step on one rank of every pipeline stage, for the
GEMMs of the decoder linears and the quantisation of their operands. Attention, norms, communication and the optimizer
are left out: a ``speedup=`` budget is that of the linears on the slowest stage. The planner predicts them from the
model's linears, and the rest of the step for the report.
"""

import argparse
import datetime
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from snip_megatron.layers.context import LinearState
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.layers.spans import Spans
from snip_megatron.megatron import compat
from snip_megatron.megatron.model_linears import ModelLinears
from snip_megatron.megatron.startup import say
from snip_megatron.numerics.products import EMULATIONS
from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.planner.layout import Layout
from snip_megatron.planner.models import Model
from snip_megatron.planner.step_time import StepModel
from snip_megatron.precision import Format, LinearRow
from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.phases import PrecisionPlan
from snip_megatron.runtime.account import LATEST
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.run_data import TIMINGS
from snip_megatron.runtime.state import Timeline
from snip_megatron.runtime.storage import write_atomically
from snip_megatron.sensitivity.policies import late_plan
from snip_megatron.sensitivity.request import STANDING_WEIGHTS, SolveRequest, carried_weights
from snip_megatron.sensitivity.times import OptionTimes
from snip_megatron.timing.calibration import calibrate, device_name, run_once, shapes_workload
from snip_megatron.timing.cost_model import CostModel, load_cost_model
from snip_megatron.timing.measure import Clock, Measurer, clock_for
from snip_megatron.timing.table import STOCK, TimingTable

# fmt: off
_SAME_NAME = (
    "seq_length", "micro_batch_size", "global_batch_size", "sequence_parallel", "overlap_grad_reduce",
    "overlap_param_gather", "gradient_accumulation_fusion",
)
# fmt: on
"""Megatron's arguments whose names are those of fields of a layout."""


def option_times(
    config: SnipConfig,
    args: argparse.Namespace,
    linears: Sequence[LinearRow],
    table: TimingTable | None = None,
    formats: Iterable[Format] | None = None,
) -> OptionTimes | None:
    """Predict the times of every linear by ``table``, or by the cost model that the configuration names.

    They are those in ``formats``, by default the candidate and pinned formats of the configuration. Returns None if
    there is neither, and the run then measures its GEMMs (:class:`MeasuredTimes`). Raises SnipError if the named table
    cannot be read, or if the table lacks one of the formats.
    """
    model: CostModel
    try:
        if table is not None:
            model = CostModel(table)
        elif config.timings is not None:
            model = load_cost_model(config.timings, torch.cuda.get_device_name() if torch.cuda.is_available() else None)
        else:
            return None
        formats = formats or [Format(f) for f in (*config.formats, *(f for _, f in config.pins))]
        step = StepModel(layout_of(args, linears, config), model)
        times = step.option_times(formats)
    except SnipError as error:
        source = "measured times" if table is not None else f"--snip-timings {config.timings}"
        raise type(error)(f"{source} with --snip-budget {config.budget}: {error}") from None
    scans = any(row.id.path.endswith("in_proj") for row in linears)  # of Mamba or gated DeltaNet
    if not step.layout.model.vocabulary or scans:
        return times
    return replace(times, rest=step.fixed_seconds(), bubble=step.layout.bubble)


def check_measurable(config: SnipConfig, backend: str | None) -> None:
    """Raise SnipError if the budget needs times and GEMMs are emulated, so that measuring them is meaningless.

    ``backend`` is None on a CPU before a backend is selected.
    """
    if not (config.budget.timed and config.updates) or config.timings is not None:
        return
    if backend in (None, *EMULATIONS):
        emulation = "a CPU emulates them" if backend is None else f"--snip-gemm {backend} emulates them here"
        raise SnipError(
            f"--snip-budget {config.budget} weighs measured times of GEMMs, and {emulation}, which saves none: give"
            " --snip-timings h200 for the times of that card, or a budget of fp4="
        )


def layout_of(args: argparse.Namespace, linears: Sequence[LinearRow], config: SnipConfig) -> Layout:
    """Return the planner's description of a run. Raises SnipError if ranks cannot split the features of a linear."""
    latent = getattr(args, "multi_latent_attention", False)
    groups = args.num_query_groups if args.group_query_attention and not latent else args.num_attention_heads
    keys = args.qk_head_dim + args.qk_pos_emb_head_dim if latent else args.kv_channels
    model = Model(
        name="run",
        rows=tuple(linears),
        hidden=args.hidden_size,
        heads=args.num_attention_heads,
        groups=groups,
        head_size=(keys + args.v_head_dim) // 2 if latent else keys,
        vocabulary=getattr(args, "padded_vocab_size", None) or 0,  # set after Megatron has built its tokenizer
        context=args.seq_length,
        tied=not args.untie_embeddings_and_output_weights,
    )
    return Layout(
        model=model,
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        vpp=args.virtual_pipeline_model_parallel_size or 1,
        dp=args.data_parallel_size,
        cp=args.context_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size,
        **{name: getattr(args, name) for name in _SAME_NAME},
        recompute=args.recompute_granularity or "none",
        recompute_layers=args.recompute_num_layers if args.recompute_method == "block" else None,
        recompute_modules=tuple(args.recompute_modules or ("core_attn",)),
        distributed_optimizer=args.use_distributed_optimizer,
        gradient_bytes=4 if args.accumulate_allreduce_grads_in_fp32 else 2,
        fused_swiglu=config.fusions == "auto" and args.swiglu,
        grouped_experts=bool(args.moe_grouped_gemm) and args.transformer_impl == "transformer_engine",
    )


_LONGEST_ATTENTION = 8192  # tokens. Longer sequences have the rate of this length.
_MOST_SPANS = 64  # microbatches of a linear, each of which has four CUDA events


@dataclass(eq=False)
class MeasuredTimes:
    """Finds or measures the times of a run's GEMMs, on rank 0 alone.

    Attributes:
        run: The run directory, in which the times are stored. None if the run has no record.
        store: Writes the file of the times.
        clock: Times calls. None stands for the clock of ``device``, which takes memory once it is used.
    """

    config: SnipConfig
    args: argparse.Namespace
    linears: Sequence[LinearRow]
    backend: GemmBackend
    run: Path | None
    device: torch.device
    clock: Clock | None = None
    store: Callable[[Path, bytes], None] = write_atomically
    spans: dict[str, Spans] = field(default_factory=dict, init=False)
    _watched: list[LinearState] = field(default_factory=list, init=False)
    _stored: TimingTable | None = field(default=None, init=False)  # read at the start

    def __post_init__(self) -> None:
        config, args = self.config, self.args
        used = {Format(name).base for name in (*config.formats, *(fmt for _, fmt in config.pins))} - {Format.BF16}
        heads = args.num_attention_heads // args.tensor_model_parallel_size
        layout = layout_of(args, self.linears, config)
        self._shapes, self._most_spans = layout.shapes, min(LATEST * layout.microbatches, _MOST_SPANS)
        attention = min(args.seq_length, _LONGEST_ATTENTION), heads, args.kv_channels
        self._formats = tuple(sorted(used, key=lambda fmt: fmt.code))
        self._workload = shapes_workload(self._shapes.values(), [attention])

    def stored(self) -> OptionTimes | None:
        """Return the times that an earlier start of the run stored. None if there are none."""
        if self.run is None or not (path := self.run / TIMINGS).exists():
            return None
        try:
            table = TimingTable.load(path)
        except SnipError as error:
            say(f"{error}; it is measured again")
            return None
        if not self._covers(table):
            return None
        say(f"times of this model's GEMMs: {path}")
        self._stored = table
        return self._predicted(table)

    def _covers(self, table: TimingTable) -> bool:
        """Return whether a table is of this card and backend, and has all formats and sizes of linears."""
        return (
            (table.device, table.backend) == (device_name(self.device), self.backend.name)
            and set(self._formats) <= set(table.formats)
            and set(self._workload.gemms) <= set(table.gemms)
            and set(self._workload.activations) <= set(table.activations)
            and set(self._workload.weights) <= set(table.weights)
            and set(self._workload.grouped) <= set(table.grouped)
        )

    def watch(self, registry: LinearRegistry) -> None:
        """Time Megatron's own code of the grouped linears of experts until the first update."""
        for handle in registry:
            if handle.expert is not None and handle.parameter != "weight":
                handle.state.spans = self.spans.setdefault(handle.name, Spans(self._most_spans))
                self._watched.append(handle.state)

    def rehearse(self) -> None:
        """Run once the calls that :meth:`measure` times, so that their kernels can be listed."""
        run_once(self.backend, self._formats, self._workload, self.device)

    def measure(self) -> OptionTimes:
        """Measure the times, and store them with the run. Raises SnipError if memory is too small for a size."""
        started = time.perf_counter()
        clock = clock_for(self.device) if self.clock is None else self.clock
        measurer = Measurer(self.backend, clock, self._formats)
        about = {"date": datetime.date.today().isoformat(), "command": "a training's first update"}
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.enable_grad(), torch.random.fork_rng(devices):  # Transformer Engine rounds gradients with its draws
            table = self._with_stock(calibrate(measurer, self._workload, about))
        if not self._covers(table):
            raise SnipError(f"the GEMMs of this model cannot be timed: {'; '.join(table.about['notes'])}")
        if self.run is not None:
            self.store(self.run / TIMINGS, table.to_json().encode())
        say(
            f"timed the GEMMs of this model ({len(table.gemms)} shapes, {', '.join(table.formats)}) on"
            f" {table.device} in {time.perf_counter() - started:.1f} s"
        )
        return self._final(table)

    def renew(self) -> OptionTimes:
        """Return the stored times, with the times of Megatron's own experts in the latest steps of this start."""
        return self.measure() if self._stored is None else self._final(self._with_stock(self._stored))

    def _final(self, table: TimingTable) -> OptionTimes:
        for state in self._watched:
            state.spans = None
        return self._predicted(table)

    def _with_stock(self, table: TimingTable) -> TimingTable:
        """Add the seconds of Megatron's own code of experts.

        They include waits of the GPU for its host, which launches the GEMMs of each expert.
        """
        by_size: dict[tuple[int, ...], list[float]] = {}
        for name, spans in self.spans.items():
            seconds = spans.seconds()
            if seconds is not None and (size := self._shapes[name].group) in table.grouped:
                by_size.setdefault(size, []).append(seconds)
        stock = {size: {STOCK: {Format.BF16: statistics.median(each)}} for size, each in by_size.items()}
        return replace(table, grouped={size: {**row, **stock.get(size, {})} for size, row in table.grouped.items()})

    def _predicted(self, table: TimingTable) -> OptionTimes:
        times = option_times(self.config, self.args, self.linears, table)
        assert times is not None
        return times


# -- the timeline ----------------------------------------------------------------------------------------------
_SAMPLES = 1000  # of the learning rate over a run


def timeline_of(
    config: SnipConfig,
    args: argparse.Namespace,
    request: SolveRequest,
    linears: ModelLinears,
    scheduler: Any,
    step: int,
) -> Timeline | None:
    """Return the timeline. Returns None if Megatron does not know where training ends.

    ``scheduler`` is that of the learning rate, and ``step`` the next training step, counted from 0. Raises SnipError if
    the end is unknown and the policy has a fixed plan.
    """
    last = int(args.train_iters or 0)
    schedule = config.phases
    if last <= 0:
        if config.late:
            raise SnipError(f"--snip-policy {config.policy} needs an end of training: give --train-iters")
        if schedule is not None:
            say(
                f"--snip-schedule {config.schedule}: the end of training is unknown without --train-iters: every update"
                " gives one map, and the budget holds for each; give --train-iters for phases"
            )
        return None

    learning_rate = compat.learning_rate(scheduler, args, step)

    def carried(origin: int, begins: Sequence[int], until: int) -> Sequence[float]:
        rates = relative_rates(learning_rate, origin, until)
        return carried_weights(origin, begins, until, rates)

    def fixed(origin: int, last: int, step: int, spent: float) -> PrecisionPlan:
        unquantised = sum(linears.uncovered_flops.values())
        return late_plan(request, linears.flops, origin, last, unquantised, step=step, spent=spent)

    standing, timed = STANDING_WEIGHTS[config.deployed], config.budget.kind == "speedup"
    return Timeline(last, schedule, fixed if config.late else None, carried, standing=standing, timed=timed)


def relative_rates(learning_rate: Callable[[int], float], origin: int, last: int) -> tuple[float, ...]:
    """Return learning rates sampled evenly from ``origin`` to ``last``, relative to the largest. Ones if all are 0."""
    count = max(1, min(_SAMPLES, last - origin))
    rates = [learning_rate(origin + (last - origin) * i // count) for i in range(count + 1)]
    most = max(rates)
    return tuple(rate / most for rate in rates) if most > 0 else (1.0,) * len(rates)
