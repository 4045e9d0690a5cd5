"""The host's part of a step, on tables whose launches follow a formula."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from timing.timing_tables import formula_table

from snip_megatron.errors import SnipError
from snip_megatron.planner.host import STATED_RECAPTURE, Host
from snip_megatron.planner.host_limit import host_limit
from snip_megatron.planner.overhead import overhead
from snip_megatron.planner.plan import make_plan
from snip_megatron.planner.probes import Probes
from snip_megatron.planner.question import parse_question
from snip_megatron.planner.render import render
from snip_megatron.planner.step_time import StepModel
from snip_megatron.precision import LINEAR_KINDS, Format, LinearId, PrecisionMap
from snip_megatron.sensitivity.times import HostSeconds, OptionTimes
from snip_megatron.timing.models import load_model
from snip_megatron.timing.shapes import ALL_BF16
from snip_megatron.timing.table import Launching
from snip_megatron.timing.table_model import TimingModel

from .formula import layout, with_blocks

FP8 = (Format.FP8,) * 3
BF16, MIXED = ALL_BF16, (Format.FP8, Format.BF16, Format.FP4)
LARGE = with_blocks(load_model("8b"), 2)
LAYER = {Format.BF16: 1.0, Format.FP8: 2.2, Format.FP8_TENSOR: 2.5, Format.FP4: 3.4}  # of the unit of a table
JOB = Path(__file__).parents[3] / "benchmarks/results/jobs/job_1b-fp4_h200_2026-11-23.json"


def model(unit: float = 1e-3, **more: Any) -> TimingModel:
    """``unit``: host seconds of a layer in bf16."""
    launching = Launching("local", {fmt: unit * f for fmt, f in LAYER.items()}, microbatch=unit / 2, step=unit / 4)
    return TimingModel(replace(formula_table(), launching=launching, **more))


def step_model(unit: float = 1e-3, **sizes: Any) -> StepModel:
    return StepModel(layout(**sizes), model(unit))


def plan_of(step: StepModel, budget: str) -> dict[str, Any]:
    asked = parse_question(
        budget, None, step.model.formats, granularity="gemm", tolerance=0.02, statistics=None, seed=1
    )
    return make_plan(step, asked, Probes())


@pytest.mark.parametrize(
    ("formats", "layer"), [(BF16, 1.0), (FP8, 2.2), (MIXED, (2.2 + 1.0 + 3.4) / 3)], ids=["bf16", "fp8", "mixed"]
)
def test_a_stage_takes_the_longer_of_its_work_and_its_launching(formats: Any, layer: float) -> None:
    bound, free = (step_model(unit, pp=2, global_batch_size=6).step(lambda b, k: formats) for unit in (1.0, 1e-9))
    expected = 6 * (4 * layer + 0.5)  # microbatches, each through a stage's four layers
    for stage in bound.stages:
        assert stage.host_known
        assert stage.host == pytest.approx(expected)
        assert stage.total == stage.host > stage.work
        assert stage.host_bound
    assert bound.optimizer == 0.25
    assert bound.total == pytest.approx(expected * (1 + 1 / 6) + 0.25)
    assert not any(stage.host_bound for stage in free.stages)
    assert [stage.total for stage in free.stages] == [stage.work for stage in bound.stages]


def test_tensor_parallel_ranks_have_host_seconds_of_their_own() -> None:
    of_two = Launching("local", {fmt: 10.0 * f for fmt, f in LAYER.items()}, microbatch=1.0, step=1.0)
    alone = model(1.0)
    both = TimingModel(replace(alone.table, launching_over_ranks={2: of_two}))
    sizes = layout(global_batch_size=6), layout(global_batch_size=6, tp=2, sequence_parallel=True)
    for measured, expected in ((alone, (0.5, 0.5)), (both, (0.5, 1.0))):
        for chosen, microbatch in zip(sizes, expected, strict=True):
            layer = LAYER[Format.FP8] * (10.0 if microbatch == 1.0 else 1.0)
            step = StepModel(chosen, measured).step(lambda b, k: FP8)
            assert step.stages[0].host == pytest.approx(6 * (8 * layer + microbatch))
    said = [Host(chosen, measured).assumptions()[0] for measured in (alone, both) for chosen in sizes]
    assert ["too low" in line for line in said] == [False, True, False, False]
    assert "over 2 tensor parallel ranks" in said[3]


def test_tensor_parallel_steps_whose_host_has_little_reserve_are_likely_to_wait() -> None:
    """Each rank waits for the slowest in every collective, so that the mean of a host says too little."""
    sizes = layout(tp=2, sequence_parallel=True)
    work = StepModel(sizes, TimingModel(formula_table())).step(lambda b, k: FP8).stages[0].work
    for share, ranks, bound in ((0.6, 2, False), (0.7, 2, True), (0.7, 1, False)):
        a_layer = share * work / (8 * 8)  # microbatches, layers
        launching = Launching("local", dict.fromkeys(LAYER, a_layer), microbatch=1e-12, step=1e-12)
        given = {"launching_over_ranks": {2: launching}} if ranks == 2 else {"launching": launching}
        step = StepModel(sizes if ranks == 2 else layout(), TimingModel(replace(formula_table(), **given)))
        stage = step.step(lambda b, k: FP8).stages[0]
        if ranks == 2:
            assert stage.work == pytest.approx(work)
        assert (stage.host_bound, stage.waits, stage.total) == (bound, False, stage.work)
        if bound:
            assert "likely host-bound: launches" in render(plan_of(step, "fp4=0.5"))


@pytest.mark.parametrize(("graphs", "ends"), [("local", 0.5), ("transformer_engine", 0.5), ("full_iteration", 0.0)])
def test_layers_in_cuda_graphs_are_launched_in_no_time(graphs: str, ends: float) -> None:
    step = step_model(1.0, global_batch_size=6, cuda_graph_impl=graphs).step(lambda b, k: FP8)
    assert step.stages[0].host == pytest.approx(6 * ends)
    old = StepModel(layout(cuda_graph_impl=graphs), TimingModel(formula_table())).step(lambda b, k: FP8)
    assert (old.stages[0].host, old.stages[0].host_known) == (0.0, True)


def test_a_table_without_the_figures_works_as_before_and_says_so() -> None:
    step = StepModel(layout(), TimingModel(formula_table()))
    stage = step.step(lambda b, k: FP8).stages[0]
    assert (stage.host_known, stage.total) == (False, stage.work)
    assert step.host_seconds() is None
    plan = plan_of(step, "fp4=0.5")
    (said,) = [line for line in plan["assumptions"] if line.startswith("host:")]
    assert said.startswith("host: not modelled (the table has no host seconds, which snip calibrate --add-to measures)")
    assert "host-bound" not in render(plan) or "likely host-bound" in render(plan)


def test_the_plan_names_what_waits_for_the_host_and_the_remedy() -> None:
    plan = plan_of(step_model(1.0), "fp4=0.5")
    text = render(plan)
    host = plan["steps"]["fp8"]["host"]
    assert host == pytest.approx(8 * (8 * 2.2 + 0.5))
    assert f"host-bound: launches {host:.3f} s" in text
    assert "capture CUDA graphs (--cuda-graph-impl), use larger microbatches" in text
    assert "host-bound" not in render(plan_of(step_model(1e-9), "fp4=0.5"))


def test_a_step_budget_that_the_host_does_not_allow_is_refused() -> None:
    """Without the host the budget is met; with it, the map's own launches make the step longer than bf16's."""
    free = step_model(1e-9, model=LARGE)
    plan = plan_of(free, "step=1.05")
    assert plan["steps"]["map"]["speedup"] >= 1.05 * (1 - 5e-3)
    held_up = free.step(lambda b, k: BF16).stages[0].work / (2 * 8)  # a layer is launched as long as it is worked on
    with pytest.raises(
        SnipError, match=r"--budget step=1.05: launching a step of its map takes the host .* capture"
    ) as e:
        plan_of(step_model(held_up, model=LARGE), "step=1.05")
    assert e.value.exit_code == 3
    plan_of(step_model(held_up, model=LARGE, cuda_graph_impl="full_iteration"), "step=1.05")


# -- a run's predictions -----------------------------------------------------------------------------------------
def run_times(step: StepModel, formats: tuple[Format, ...]) -> tuple[OptionTimes, dict[str, int]]:
    times = replace(OptionTimes.predict(step.model, step.shapes, formats), rest=step.fixed_seconds())
    host = step.host_seconds()
    stages = step.layout.stage_of()
    named = {str(LinearId(b, kind)): stages[b] for b in range(step.layout.model.blocks) for kind in LINEAR_KINDS}
    return replace(times, host=None if host is None else HostSeconds(*host)), named


@pytest.mark.parametrize("unit", [1e-9, 4e-5, 1.0], ids=["free", "between", "bound"])
def test_a_run_predicts_the_speedup_that_the_planner_predicts(unit: float) -> None:
    step = step_model(unit, pp=2, global_batch_size=6)
    times, stages = run_times(step, (Format.FP8,))
    fp8 = PrecisionMap.uniform(list(stages), Format.FP8)
    linears = times.linears(stages)
    saved = {
        k: 1 - sum(times.of(name, None, "fp8") for name, s in stages.items() if s == k) / seconds
        for k, seconds in linears.items()
    }
    planned = step.step(lambda b, k: BF16).total / step.step(lambda b, k: FP8).total
    assert times.step_speedup(stages, saved, fp8) == pytest.approx(planned, rel=1e-3)
    assert OptionTimes.from_dict(json.loads(json.dumps(times.as_dict())), "x") == times
    if unit == 1.0:
        assert planned < times.step_speedup(stages, saved) == 1  # without the formats: what is launched stays


def test_a_run_s_host_seconds_hold_those_of_variants() -> None:
    """A variant is launched like its base, although the table has no row of it."""
    table = model().table
    assert table.launching is not None
    launching = replace(table.launching, layer={**LAYER, Format.NVFP4: 3.0})
    step = StepModel(layout(), TimingModel(replace(table, launching=launching)))
    found = step.host_seconds()
    assert found is not None
    assert found[1] == {fmt.value: step.host.gemm(fmt) for fmt in Format}
    assert found[1]["nvfp4_46"] == found[1]["nvfp4"] > 0


def test_a_speedup_that_the_host_does_not_allow_is_said_before_training() -> None:
    free, stages = run_times(step_model(1e-9), (Format.FP8,))
    assert host_limit(free, stages, 1.2, ("bf16", "fp8")) is None
    held_up = step_model(1e-9).step(lambda b, k: BF16).stages[0].work / (8 * 8)
    bound, _ = run_times(step_model(held_up), (Format.FP8,))
    said = host_limit(bound, stages, 1.2, ("bf16", "fp8"))
    assert said is not None
    assert said.startswith("--snip-budget speedup=1.2 promises steps 1.")
    assert "the host allows at most" in said
    assert "capture CUDA graphs (--cuda-graph-impl)" in said
    assert "\n" not in said
    graphs, _ = run_times(StepModel(layout(cuda_graph_impl="local"), model(held_up)), (Format.FP8,))
    assert host_limit(graphs, stages, 1.2, ("bf16", "fp8")) is None
    assert host_limit(replace(bound, host=None), stages, 1.2, ("bf16", "fp8")) is None


def test_the_limit_is_one_that_a_map_can_reach() -> None:
    """The whole map in fp8 meets the budget; what it is predicted to reach is not above the limit."""
    held_up = step_model(1e-9).step(lambda b, k: BF16).stages[0].work / (8 * 8)
    step = step_model(held_up)
    times, stages = run_times(step, (Format.FP8,))
    said = host_limit(times, stages, 1.2, ("bf16", "fp8"))
    assert said is not None
    possible = float(said.partition("at most ")[2].partition(" ×")[0])
    assert step.step(lambda b, k: BF16).total / step.step(lambda b, k: FP8).total <= possible + 0.005


# -- recapture ---------------------------------------------------------------------------------------------------
def host(recapture: float | None = None, **sizes: Any) -> Host:
    """Of eight layers and six microbatches; ``recapture``: the table's rate."""
    return Host(layout(global_batch_size=6, **sizes), model(recapture=recapture))


@pytest.mark.parametrize(
    ("sizes", "least", "most"),
    [
        ({"cuda_graph_impl": "none"}, 0, 0),
        ({"cuda_graph_impl": "local"}, 8 * 6, 8 * 6),
        ({"cuda_graph_impl": "full_iteration"}, 8 * 6, 8 * 6),
        ({"cuda_graph_impl": "transformer_engine"}, 1, 8),
        ({"cuda_graph_impl": "transformer_engine", "pp": 2}, 4 * 6, 4 * 6),
    ],
    ids=["none", "local", "full iteration", "transformer engine", "pipeline"],
)
def test_a_recapture_is_of_what_the_implementation_captures(sizes: dict[str, Any], least: int, most: int) -> None:
    """Transformer Engine without a pipeline: one microbatch, and only the layers that change."""
    assert host(**sizes).recapture == pytest.approx((STATED_RECAPTURE * least, STATED_RECAPTURE * most))
    assert host(**sizes, recapture=0.01).recapture == pytest.approx((0.01 * least, 0.01 * most))


def test_a_plan_has_the_range_of_a_recapture() -> None:
    """What a later map changes is not known; the share of training is that of all layers."""
    step = step_model(global_batch_size=6, cuda_graph_impl="transformer_engine")
    plan = plan_of(step, "fp4=0.5")
    found = plan["overhead"]
    assert (found["least_recapture_seconds"], found["recapture_seconds"]) == pytest.approx((0.03, 0.24))
    text = render(plan)
    assert "all layers, 0.24 s; a later one those that it changes, 0.03 s (one) to 0.24 s (all)" in text
    assert "in advance, and the share of training counts all of them" in text
    local = render(plan_of(step_model(global_batch_size=6, cuda_graph_impl="local"), "fp4=0.5"))
    assert "CUDA graphs: every map captures all layers, 1.44 s" in local
    assert "CUDA graphs:" not in render(plan_of(step_model(), "fp4=0.5"))


def test_the_share_of_training_counts_the_longest_recapture() -> None:
    step = step_model(cuda_graph_impl="transformer_engine")
    bf16 = step.step(lambda b, k: BF16)
    without, added = (overhead(step.layout, Probes(), ("fp8",), bf16, bf16, recapture=r) for r in ((0, 0), (1, 5)))
    assert added.seconds == without.seconds
    lost = added.seconds + 5.0
    assert added.share == pytest.approx(lost / (lost + 1000 * bf16.total))
    nothing = overhead(step.layout, Probes(policy="bf16"), ("fp8",), bf16, bf16, recapture=(1, 5))
    assert nothing.recapture_seconds == nothing.least_recapture_seconds == 0.0  # a fixed map is captured once


def test_the_stated_rate_is_that_of_a_measured_job() -> None:
    """The adoptions of a training of 22 layers, the first of them from bf16, which changes every layer."""
    (updates,) = json.loads(JOB.read_text())["updates"].values()
    seconds = [update["events"]["recapture"] for update in updates]
    assert len(seconds) == 2
    assert seconds == pytest.approx([STATED_RECAPTURE * 22] * 2, rel=0.25)
