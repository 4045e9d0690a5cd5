"""Exchanges in the costs of a run's options: a run promises what ``snip plan`` predicts."""

import random
from typing import Any

import pytest
from llama_arguments import WANTED, linears, run_arguments

from snip_megatron.config import SnipConfig
from snip_megatron.megatron.step_costs import option_times
from snip_megatron.planner.layout import Layout
from snip_megatron.planner.models import Llama
from snip_megatron.planner.rates import Links
from snip_megatron.planner.request import formats_of_map
from snip_megatron.planner.step_time import StepModel
from snip_megatron.precision import DENSE_LAYER, Format, Gemm, LinearId, PrecisionMap, option_id
from snip_megatron.sensitivity.times import OptionTimes
from snip_megatron.timing.loading import load_cost_model
from snip_megatron.timing.shapes import ALL_BF16

MODES = ("bf16", "gather", "all")
FORMATS = (Format.BF16, Format.FP8, Format.FP8_TENSOR, Format.FP4)
LLAMA = Llama("x", 8, 1024, 4096, 16, 4, 64, 32000, 2048)


def planned(communication: str, model: str, **sizes: Any) -> StepModel:
    """What ``snip plan`` predicts the run of ``run_arguments()`` with. A run takes SwiGLU for fixed."""
    layout = Layout(LLAMA.model(2), tp=2, pp=2, vpp=1, dp=2, seq_length=2048, micro_batch_size=2, global_batch_size=16,
                    sequence_parallel=True, communication=communication, fused_swiglu=False, **sizes)  # fmt: skip
    return StepModel(layout, load_cost_model(model))


def of_run(communication: str, model: str, **given: Any) -> OptionTimes:
    args = run_arguments(**given)
    cost = {"cost": "flops"} if model == "flops" else {"timings": model}
    formats = tuple(fmt.value for fmt in FORMATS)
    return option_times(
        SnipConfig(**WANTED | {"formats": formats}, communication=communication, **cost), args, linears(args).covered
    )


def random_map(rng: random.Random) -> PrecisionMap:
    linears = [str(LinearId("decoder", block, kind)) for block in range(8) for kind in DENSE_LAYER]
    return PrecisionMap(version=1, choices={option_id(name, g): rng.choice(FORMATS) for name in linears for g in Gemm})


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("model", ["h200", "flops"])
@pytest.mark.parametrize("communication", MODES)
def test_planned_steps_are_the_options_seconds_and_the_rest(
    communication: str, model: str, recompute: str | None
) -> None:
    """TP 2 with sequence parallelism, two stages. The h200 table has the collectives of two ranks."""
    given = {} if recompute is None else {"recompute_granularity": "full", "recompute_method": "uniform"}
    times = of_run(communication, model, **given)
    step = planned(communication, model, recompute=recompute or "none")
    stages = {str(LinearId("decoder", block, kind)): block // 4 for block in range(8) for kind in DENSE_LAYER}
    bf16 = step.step(lambda row: ALL_BF16).total
    rng = random.Random(17)
    for _ in range(10):
        chosen = random_map(rng)
        predicted = step.step(formats_of_map(chosen)).total
        seconds = times.by_stage(chosen, stages)
        summed = step.layout.bubble * max(times.rest[stage] + found for stage, (_, found) in seconds.items())
        assert summed == pytest.approx(predicted, rel=1e-9)
        assert times.step_speedup(chosen, stages) == pytest.approx(bf16 / predicted, rel=1e-9)


def test_the_reference_of_a_step_s_speedup_contains_every_exposed_exchange() -> None:
    """In bf16 they are all in the rest; with ``all`` they are in the linears, whose bf16 formats take as long."""
    stages = {str(LinearId("decoder", block, kind)): block // 4 for block in range(8) for kind in DENSE_LAYER}
    exposed = planned("bf16", "h200").step(lambda row: ALL_BF16).stages[1].seconds["tensor_parallel"]
    found = {mode: of_run(mode, "h200") for mode in MODES}
    linears = {mode: times.by_stage(PrecisionMap(choices={}), stages)[1][0] for mode, times in found.items()}
    assert exposed > 0
    assert linears["all"] - linears["bf16"] == pytest.approx(exposed)
    assert found["bf16"].rest[1] - found["all"].rest[1] == pytest.approx(exposed)
    assert linears["bf16"] < linears["gather"] < linears["all"]
    whole = {mode: times.rest[1] + linears[mode] for mode, times in found.items()}
    assert whole["gather"] == pytest.approx(whole["bf16"])
    assert found["bf16"].exchanges == {}


def test_exchanges_of_single_gemms() -> None:
    """By hand, from the bandwidth that is stated: 4,096 tokens of 1,024 features, a half of which a rank sends."""
    times = of_run("all", "flops")
    one = 4 * 4096 * 1024 / 2 / Links().within  # seconds in which a byte of every element is sent, of four microbatches
    qkv, proj = (times.exchanges[kind] for kind in DENSE_LAYER[:2])
    assert qkv["fprop"]["bf16"] == pytest.approx(2 * one)
    assert qkv["fprop"]["fp8"] == pytest.approx(1.03125 * one)
    assert qkv["fprop"]["fp4"] == pytest.approx(0.53125 * one)
    assert qkv["dgrad"]["bf16"] == 0.0 < qkv["dgrad"]["fp4"] == qkv["dgrad"]["fp8"]
    assert set(qkv["wgrad"].values()) == {0.0}
    assert proj["fprop"]["fp4"] == proj["fprop"]["fp8"] == pytest.approx(1.03125 * one + qkv["dgrad"]["fp8"])
    for gemm in ("dgrad", "wgrad"):  # two operands in fp8 have more bytes than one in bf16
        assert proj[gemm]["fp8"] == proj[gemm]["bf16"] == pytest.approx(one)
        assert proj[gemm]["fp4"] == pytest.approx(0.53125 / 2 * one)
