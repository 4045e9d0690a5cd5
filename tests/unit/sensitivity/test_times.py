"""Problems in predicted seconds: costs, savings, what is reachable, and requests that survive JSON."""

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from refusal import refusal

from snip_megatron.precision import DENSE_LAYER, Format, Gemm, LinearId, PrecisionMap, split_option_id
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError
from snip_megatron.sensitivity import SolveRequest, build_problem
from snip_megatron.sensitivity.problem import check_reachable
from snip_megatron.sensitivity.times import SHARING, OptionTimes
from snip_megatron.timing.cost_model import LinearShape, load_cost_model

from .synthetic import linear_rows, make_table
from .test_problem import PHASES

FORMATS = ("bf16", "fp8", "fp8_tensor")
SIZES = ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584))
LLAMA = {kind: LinearShape(8192, *size, microbatches=4) for kind, size in zip(DENSE_LAYER, SIZES, strict=True)}


@functools.cache
def times(model: str = "h200", formats: tuple[str, ...] = FORMATS) -> OptionTimes:
    """The linears of a 70B model on 8 ranks, 4 microbatches of 8,192 tokens; by kind."""
    return OptionTimes.predict(load_cost_model(model), LLAMA, [Format(f) for f in formats])


def request(**fields: object) -> SolveRequest:
    return SolveRequest(**{"formats": FORMATS, "budget": Budget("speedup", 1.3), "times": times(), **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("granularity", ["gemm", "layer"])
def test_costs_and_savings_are_those_of_the_cost_model(granularity: str) -> None:
    table = make_table(layers=3, formats=("fp8", "fp8_tensor"))
    problem, scores = build_problem(table, request(granularity=granularity, estimator="noise"))
    assert problem.budget == Budget("speedup", 1.3)
    model = load_cost_model("h200")
    for item in problem.items:
        linear, gemm = split_option_id(item.id)
        seconds = [
            sum(model.seconds(LLAMA[linear.path], g, fmt) for g in (Gemm if gemm is None else (gemm,)))
            - (sum(model.joint(LLAMA[linear.path], g, fmt) for g in Gemm) if gemm is None else 0.0)
            for fmt in map(Format, FORMATS)
        ]
        assert item.cost == pytest.approx(seconds[0])
        assert [item.cost - c.saving for c in item.choices] == pytest.approx(seconds)
        assert [c.format.value for c in item.choices] == list(FORMATS)
        assert item.choices[0].saving == item.choices[0].loss == 0.0
        assert [c.loss for c in item.choices] == [scores[item.id][f]["q"] for f in FORMATS]
        assert item.choices[1].loss > 0


def test_pins_and_times_of_single_linears() -> None:
    """Times of a name win over those of its kind. A pinned format has its own time, and no loss if it has no score."""
    slow = LinearId("decoder", 0, "mlp.linear_fc1")
    table = make_table(layers=2, formats=("fp8", "fp8_tensor"))
    seconds = dict(times(formats=(*FORMATS, "fp4")).seconds)
    seconds[str(slow)] = {g: {f: 2 * s for f, s in row.items()} for g, row in seconds[slow.path].items()}
    pins = (("decoder.layers.1.mlp.linear_fc1:wgrad", "fp4"),)
    problem, _ = build_problem(table, request(times=OptionTimes("x", seconds), pins=pins))
    cost = {item.id: item.cost for item in problem.items}
    assert cost[f"{slow}:fprop"] == 2 * cost["decoder.layers.1.mlp.linear_fc1:fprop"]
    (pinned,) = (item for item in problem.items if item.id == "decoder.layers.1.mlp.linear_fc1:wgrad")
    assert [c.format for c in pinned.choices] == [Format.FP4]
    fp4 = seconds["mlp.linear_fc1"]["wgrad"]["fp4"]
    assert pinned.choices[0].saving == pinned.cost - fp4


def test_a_step_of_bf16_alone_is_that_of_megatron_s_own_code() -> None:
    kind = "self_attention.linear_qkv"
    stages = {f"decoder.layers.{layer}.{kind}": 0 for layer in range(2)}
    table = replace(times(), rest={0: 1.0}, stock={kind: 0.5})
    chosen, bf16 = PrecisionMap.uniform(stages, Format.FP8), PrecisionMap(choices={})
    before, after = table.by_stage(chosen, stages)[0]
    assert table.step_seconds(chosen, stages) == (pytest.approx(1.0 + 2 * 0.5 + before), pytest.approx(1.0 + after))
    assert table.step_speedup(bf16, stages) == 1.0
    longer = replace(table, bubble=1.5)
    assert longer.step_speedup(chosen, stages) == pytest.approx(table.step_speedup(chosen, stages))
    without_stock = replace(longer, stock={})
    assert without_stock.step_seconds(chosen, stages, bf16_s=9.0) == (9.0, pytest.approx(9.0 - 1.5 * (before - after)))
    fewer = PrecisionMap.uniform(stages, Format.FP8_TENSOR)
    differ = after - table.by_stage(fewer, stages)[0][1]
    assert table.step_seconds(fewer, stages, 9.0, ran=(chosen, 4.0)) == (9.0, pytest.approx(4.0 - differ))
    assert table.step_seconds(bf16, stages, 9.0, ran=(chosen, 4.0)) == (9.0, 9.0)


def test_waits_of_megatron_s_own_experts_for_their_host_end_with_bf16() -> None:
    """Time of measured steps above the prediction is such a wait. Time below it is an error of the rest of the step."""
    kind = "mlp.experts.linear_fc1"
    stages = {f"decoder.layers.{layer}.{kind}": 0 for layer in range(2)}
    seconds = {kind: {gemm.value: {"bf16": 0.2, "fp8": 0.1} for gemm in Gemm}}
    table = OptionTimes("card", seconds, rest={0: 1.0}, stock={kind: 0.5})  # 3.2 in bf16, 1.6 under the map
    chosen = PrecisionMap.uniform(stages, Format.FP8)
    for measured, expected in ((9.0, 1.6), (3.2, 1.6), (3.0, 1.4)):
        assert table.step_seconds(chosen, stages, bf16_s=measured) == (measured, pytest.approx(expected))


def test_what_is_reachable_is_named_and_is_reachable() -> None:
    rows = linear_rows(4, stages=2)
    pins = (("decoder.layers.0.*", "bf16"),)
    message = refusal(check_reachable, rows, request(budget=Budget("speedup", 3.0), pins=pins))
    assert message.startswith("--snip-budget speedup=3 is unreachable with --snip-formats bf16,fp8,fp8_tensor")
    assert "stage 0 costs at least" in message  # the pinned layer's
    reached = float(message.split("the highest reachable speedup is ")[1].split()[0])
    check_reachable(rows, request(budget=Budget("speedup", reached), pins=pins))
    with pytest.raises(SnipError):
        check_reachable(rows, request(budget=Budget("speedup", reached * 1.0001), pins=pins))
    # Half of stage 0 stays in bf16.
    bf16 = math.fsum(times().of(row.name, None, "bf16") for row in rows[4:8])
    best = math.fsum(min(seconds(row.name, formats) for formats in product(FORMATS, repeat=3)) for row in rows[4:8])
    assert reached == pytest.approx(2 * bf16 / (bf16 + best), rel=1e-6)


def seconds(linear: str, formats: Sequence[str]) -> float:
    """By definition each GEMM quantises for itself, except where one call serves two of the same format."""
    each = dict(zip(Gemm, formats, strict=True))
    alone = [times().of(linear, gemm, fmt) for gemm, fmt in each.items()]
    return sum(alone) - sum(times().saved(linear, g, each[g]) for g in SHARING if each[g] == each[Gemm.WGRAD])


def test_formats_without_figures_are_refused() -> None:
    with pytest.raises(SnipError, match="nvfp4"):
        times(formats=("nvfp4",))
    bare = request(formats=("fp8", "mxfp8"))
    with pytest.raises(SnipError, match="hold none in mxfp8"):
        check_reachable(linear_rows(2), bare)
    with pytest.raises(SnipError, match="need predicted times"):
        check_reachable(linear_rows(2), request(times=None))
    check_reachable(linear_rows(2), request(budget=Budget("loss", 1e-9)))  # what loss is reachable depends on scores


@pytest.mark.parametrize(
    "original",
    [
        SolveRequest(),
        SolveRequest(pins=(("*.0.*", "bf16"),), unquantised_stage_flops={0: 1.0, 1: 2.0}),
        SolveRequest(phases=PHASES, standing_share=0.7),
        request(granularity="layer"),
        request(budget=Budget("loss", 0.002), times=replace(times(), rest={0: 0.25, 1: 0.5})),
    ],
)
def test_a_request_survives_json(original: SolveRequest) -> None:
    assert SolveRequest.from_dict(json.loads(json.dumps(original.as_dict())), "config.json") == original
