"""Step times: the rules that the output states, on times that follow a formula. The sum: megatron/test_times.py."""

import pytest

from snip_megatron.planner.step_time import ELEMENTWISE, Links, StepModel
from snip_megatron.precision import ALL_BF16, Format
from snip_megatron.timing.cost_model import FLOPS_RATE, FlopsModel, load_cost_model

from .formula import SMALL, layout, step_model, with_blocks

FP4 = (Format.FP4,) * 3


def test_linears_are_the_models_flops() -> None:
    chosen = layout("8b")
    step = step_model(chosen).step(lambda row: ALL_BF16)
    flops = 6 * chosen.model.weights * chosen.tokens * chosen.microbatches
    assert step.stages[0]["linears"] == pytest.approx(flops / FLOPS_RATE)
    quarter = step_model(chosen).step(lambda row: FP4)
    assert quarter.stages[0]["linears"] == pytest.approx(flops / FLOPS_RATE / 4)
    rests = [each.stages[0]["total"] - each.stages[0]["linears"] for each in (step, quarter)]
    assert rests[1] == pytest.approx(rests[0])


def test_the_bubble_and_the_slowest_stage() -> None:
    for vpp, ramp in ((1, 3), (2, 3 / 2)):
        chosen = layout(with_blocks(SMALL, 16), pp=4, vpp=vpp, global_batch_size=12)
        step = step_model(chosen).step(lambda row: ALL_BF16)
        work = max(stage["total"] for stage in step.stages)
        assert step.total == pytest.approx(work * (1 + ramp / 12) + step.optimizer)
        seconds = [stage["ends"] for stage in step.stages]
        assert seconds[-1] > seconds[0] > seconds[1] == 0
        assert step.balance == pytest.approx(sum(stage["total"] for stage in step.stages) / 4 / work)


def test_fused_swiglu_spares_a_read_on_hopper() -> None:
    model = load_cost_model("h200")
    fused, apart = (StepModel(layout("8b", fused_swiglu=each), model) for each in (True, False))
    hidden = 8192 * 32 * 8 * (14336 + 2 * 14336)  # of X of fc2 and of G of fc1, in blocks and microbatches
    for fmt, width in ((Format.BF16, 0), (Format.FP8, 2), (Format.FP8_TENSOR, 2)):
        seconds = [step.step(lambda row, fmt=fmt: (fmt,) * 3).stages[0] for step in (apart, fused)]
        spared = width * hidden / (model.table.copy_rate * ELEMENTWISE)
        assert seconds[0]["elementwise"] - seconds[1]["elementwise"] == pytest.approx(spared)
        assert seconds[0]["linears"] == seconds[1]["linears"]


LINKS = Links(node_size=8, within=1e11, between=1e10)


def test_tensor_parallel_communication() -> None:
    """Two gathers of X, two sums of Y and two gathers of G, each of 3/4 of 8,192 tokens' hidden features."""
    exchange = 3 / 4 * 8192 * 4096 / 1e11
    chosen = layout("8b", tp=4, sequence_parallel=True)
    step = StepModel(chosen, FlopsModel(), LINKS).step(lambda row: FP4)
    passes = chosen.microbatches * len(chosen.stages[0])
    assert step.stages[0]["tensor_parallel"] == pytest.approx(passes * 12 * exchange)
