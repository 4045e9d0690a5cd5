"""Times of a run's GEMMs: predicted from Megatron's arguments, or measured once by rank 0; the end of a run, and the
learning rate of every step.
"""

import argparse
import random
from argparse import Namespace
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_arguments import FIELDS, linears, run_arguments
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from refusal import refusal
from torch import Tensor

from snip_megatron.layers.spans import Spans
from snip_megatron.megatron.compat import learning_rate
from snip_megatron.megatron.run_record import open_run_directory
from snip_megatron.megatron.times import (
    MeasuredTimes,
    check_measurable,
    layout_of,
    option_times,
    relative_rates,
    timeline_of,
)
from snip_megatron.numerics.products.backend import REFERENCE, GemmBackend
from snip_megatron.planner.step_time import StepModel
from snip_megatron.precision import ALL_BF16, Format, Gemm, LinearRow, PrecisionMap, Side, option_id
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.run_data import TIMINGS
from snip_megatron.runtime.run_directory import RunDirectory
from snip_megatron.sensitivity import SolveRequest
from snip_megatron.timing.cost_model import LinearShape, load_cost_model
from snip_megatron.timing.measure import Call
from snip_megatron.timing.table import STOCK, TimingTable

QKV, FC1, FC2 = "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2"


def shapes(**changes: Any) -> dict[str, LinearShape]:
    args = run_arguments(**changes)
    layout = layout_of(args, linears(args).covered, SnipConfig())
    return {kind: layout.shapes[row.name] for kind, row in layout.kinds.items()}


def shapes_of(rows: list[LinearRow]) -> list[LinearShape]:
    return list(layout_of(run_arguments(), rows, SnipConfig()).shapes.values())


def test_shapes_are_those_of_one_rank() -> None:
    assert shapes() == {
        QKV: LinearShape(4096, (16 + 2 * 4) * 64 // 2, 1024, microbatches=4, gathered=True),
        "self_attention.linear_proj": LinearShape(4096, 1024, 512, microbatches=4),
        FC1: LinearShape(4096, 4096, 1024, microbatches=4, gathered=True),
        FC2: LinearShape(4096, 1024, 2048, microbatches=4),
    }
    assert not any(shape.gathered for shape in shapes(sequence_parallel=False).values())
    assert {shape.tokens for shape in shapes(context_parallel_size=2).values()} == {2048}
    assert not any(shape.fused_accumulation for shape in shapes(gradient_accumulation_fusion=False).values())


def test_a_row_says_what_ranks_share_of_it() -> None:
    """Latent attention and mixers, on 2 ranks: a projection that each has whole runs on its own share of the tokens."""
    places = {
        "0.self_attention.linear_q_down_proj": (384, 1024, Side.NEITHER),
        "0.self_attention.linear_q_up_proj": (2048, 384, Side.OUTPUT),
        "1.mixer.in_proj": (4160, 1024, Side.OUTPUT),
        "1.mixer.out_proj": (1024, 2048, Side.INPUT),
    }
    rows = [
        LinearRow(f"decoder.layers.{name}", 0, n, k, sub_block=int(name[0]), sharded=side)
        for name, (n, k, side) in places.items()
    ]
    assert shapes_of(rows) == [
        LinearShape(2048, 384, 1024, microbatches=4),
        LinearShape(4096, 1024, 384, microbatches=4, gathered=True),
        LinearShape(4096, 2080, 1024, microbatches=4, gathered=True),
        LinearShape(4096, 1024, 1024, microbatches=4),
    ]
    with pytest.raises(SnipError, match=r"mixer.in_proj \[4161, 1024\]: 4161 features cannot be split over 2 ranks"):
        shapes_of([replace(rows[2], n=4161)])


def test_experts_share_a_rank_s_tokens() -> None:
    """8 experts on 2 expert parallel ranks, 2 of them a token: 4 GEMMs of a quarter of the two ranks' tokens each."""
    experts = {"num_experts": 8, "moe_layer_freq": 1, "moe_router_topk": 2, "moe_ffn_hidden_size": 512,
               "moe_shared_expert_intermediate_size": None, "moe_grouped_gemm": False,
               "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}  # fmt: skip
    tokens = 2048 * 2 // 2 * 2 * 2 // 8  # of a sequence parallel rank, twice, from two ranks, over 8 experts
    assert shapes(**experts)["mlp.experts.linear_fc1"] == LinearShape(
        tokens, 1024, 1024, microbatches=4 * 4, matrices=4
    )
    args = run_arguments(**experts)
    times = option_times(SnipConfig(**FIELDS, timings="h200"), args, linears(args).covered)
    expert, model = shapes(**experts)["mlp.experts.linear_fc1"], load_cost_model("h200")
    for fmt in ("bf16", "fp8"):
        predicted = times.of("decoder.layers.3.mlp.experts.linear_fc1", Gemm.FPROP, fmt)
        assert predicted == pytest.approx(model.seconds(expert, Gemm.FPROP, Format(fmt)))
    assert set(times.rest) == {0, 1}
    both = shapes(**experts | {"expert_tensor_parallel_size": 2})["mlp.experts.linear_fc1"]
    assert both == LinearShape(2 * tokens, 512, 1024, microbatches=4 * 4, matrices=4)
    grouped = shapes(**experts | {"moe_grouped_gemm": True})["mlp.experts.linear_fc1"]
    assert grouped == replace(expert, grouped=True, fused="gradient")
    assert grouped.group == (4, 4 * tokens, 1024, 1024)
    assert not shapes(**experts | {"moe_grouped_gemm": True, "transformer_impl": "local"})[QKV].grouped


def test_recomputation_runs_forwards_twice() -> None:
    full = shapes(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert {shape.forwards for shape in full.values()} == {2}
    mlp = shapes(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"])
    assert [mlp[kind].forwards for kind in (QKV, FC1, FC2)] == [1, 2, 2]
    attention = shapes(recompute_granularity="selective", recompute_modules=["core_attn"])
    assert {shape.forwards for shape in attention.values()} == {1}
    # The first layer of each stage's four.
    block = shapes(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)
    assert [block[f"decoder.layers.{i}.{FC1}"].forwards for i in range(8)] == [2, 1, 1, 1, 2, 1, 1, 1]


def test_times_of_a_table_and_of_flops() -> None:
    args = run_arguments()
    rows = linears(args).covered
    assert option_times(SnipConfig(**FIELDS), args, rows) is None  # a run that names no table measures its times
    by_table = option_times(SnipConfig(**FIELDS, timings="h200", pin=("*.0.*=fp4",)), args, rows)
    assert by_table.model == "NVIDIA H200"
    for fmt in ("bf16", "fp8", "fp8_tensor", "fp4"):
        expected = load_cost_model("h200").seconds(shapes()[FC1], Gemm.DGRAD, Format(fmt))
        assert by_table.of(f"decoder.layers.5.{FC1}", Gemm.DGRAD, fmt) == expected
    by_flops = option_times(SnipConfig(**FIELDS, timings="flops"), args, rows)
    bf16_seconds = by_flops.of(f"decoder.layers.0.{FC2}", Gemm.WGRAD, "bf16")
    assert by_flops.of(f"decoder.layers.0.{FC2}", Gemm.WGRAD, "fp8") == bf16_seconds / 2
    assert by_flops.of(f"decoder.layers.0.{FC2}", None, "bf16") == pytest.approx(3 * bf16_seconds)


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("timings", ["h200", "flops"])
def test_planned_steps_are_the_options_seconds_and_the_rest(timings: str, recompute: str | None) -> None:
    """TP 2 with sequence parallelism, two stages, any map."""
    arguments = {} if recompute is None else {"recompute_granularity": "full", "recompute_method": "uniform"}
    args, formats = run_arguments(**arguments), ("bf16", "fp8", "fp8_tensor", "fp4")
    config, rows = SnipConfig(**FIELDS | {"formats": formats}, timings=timings), linears(args).covered
    times = option_times(config, args, rows)
    layout = replace(layout_of(args, rows, config), fused_swiglu=False)  # a run takes it for fixed
    step = StepModel(layout, load_cost_model(timings))
    assert times.rest == step.fixed_seconds()
    stages, bf16 = {row.name: row.stage for row in rows}, step.step(lambda row: ALL_BF16).total
    draws = random.Random(17)
    for _ in range(10):
        options = [option_id(name, gemm) for name in stages for gemm in Gemm]
        chosen = PrecisionMap(choices={option: Format(draws.choice(formats)) for option in options})
        predicted = step.step(lambda row, chosen=chosen: chosen.formats_of(row.name)).total
        seconds = times.by_stage(chosen, stages)
        summed = step.layout.bubble * max(times.rest[stage] + result for stage, (_, result) in seconds.items())
        assert summed == pytest.approx(predicted, rel=1e-9)
        assert times.step_speedup(chosen, stages) == pytest.approx(bf16 / predicted, rel=1e-9)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"timings": "absent.json"}, "--snip-timings absent.json with --snip-budget speedup=1.2: absent.json"),
        ({"timings": "h200", "pin": ("*=nvfp4",)}, "--snip-timings h200 with --snip-budget speedup=1.2: the timings"),
    ],
)
def test_times_that_are_not_known_are_named(fields: dict[str, Any], words: str) -> None:
    args = run_arguments()
    assert words in refusal(option_times, SnipConfig(**FIELDS, **fields), args, linears(args).covered)


SMALL = {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4, "kv_channels": 32,
         "seq_length": 64, "micro_batch_size": 1, "global_batch_size": 4}  # fmt: skip
CONFIG = SnipConfig(**FIELDS, pin=("*.0.*=nvfp4_46",))
CPU = torch.device("cpu")


class FakeClock:
    """Returns another time at each measurement, which shows whether a time was measured again."""

    device = CPU

    def __init__(self, first: float = 1e-3, lacking: str = "") -> None:
        self.next, self.lacking, self.calls = first, lacking, 0

    def seconds[Key: Hashable](self, calls: Mapping[Key, Call]) -> dict[Key, float]:
        self.calls += 1
        if self.lacking in map(str, calls):
            raise torch.OutOfMemoryError("CUDA out of memory")
        result = {}
        for key in calls:
            self.next *= 1.001
            result[key] = float(f"{self.next:.5g}")
        return result


def measured_times(
    run: Path | None,
    clock: FakeClock | None = None,
    config: SnipConfig = CONFIG,
    backend: GemmBackend = REFERENCE,
    **changes: Any,
) -> MeasuredTimes:
    args = run_arguments(**{**SMALL, **changes})
    return MeasuredTimes(config, args, linears(args).covered, backend, run, CPU, clock)


def test_the_first_start_measures_and_later_ones_find_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert measured_times(run).stored() is None
    measured = measured_times(run, FakeClock()).measure()
    said = capsys.readouterr().out
    assert "snip: timed the GEMMs of this model (4 shapes, bf16, fp8, fp8_tensor, nvfp4) on cpu in" in said
    assert measured_times(run).stored() == measured
    assert measured.rest  # of attention and copies, which are timed too
    assert measured.of("decoder.layers.1.mlp.linear_fc1", Gemm.WGRAD, "nvfp4_46") > 0  # a variant: its base is timed
    assert measured_times(None, FakeClock()).measure() == measured  # a run without a directory measures


def test_other_gemms_and_those_of_another_card_or_backend_are_measured_anew(tmp_path: Path) -> None:
    """The GEMMs have another format, another shard, or another number of tokens."""
    measured_times(tmp_path, FakeClock()).measure()
    for arguments in (
        {"config": SnipConfig(**FIELDS, pin=("*=mxfp8",))},
        {"tensor_model_parallel_size": 1},
        {"micro_batch_size": 2},
    ):
        assert measured_times(tmp_path, **arguments).stored() is None  # type: ignore[arg-type]
    table = TimingTable.load(tmp_path / TIMINGS)
    for other in (replace(table, device="NVIDIA H200"), replace(table, backend="hopper")):
        (tmp_path / TIMINGS).write_text(other.to_json())
        assert measured_times(tmp_path).stored() is None


def test_megatron_s_own_experts_take_what_they_took_in_the_training(tmp_path: Path) -> None:
    """It is the median of the layers. A later start takes its own measurement if it has steps of them."""
    experts = {"num_experts": 8, "moe_layer_freq": 1, "moe_router_topk": 2, "moe_ffn_hidden_size": 128,
               "moe_shared_expert_intermediate_size": None, "moe_grouped_gemm": True, "expert_model_parallel_size": 1,
               "transformer_impl": "transformer_engine", "num_layers": 3}  # fmt: skip

    def start(*layers: float, linears: Sequence[str] = ("fc1", "fc2")) -> MeasuredTimes:
        times = measured_times(tmp_path, FakeClock(), **experts)
        for linear in linears:
            for layer, seconds in enumerate(layers):
                name = f"decoder.layers.{layer}.mlp.experts.linear_{linear}"
                times.spans[name] = span = Spans()
                span.seconds = lambda seconds=seconds: seconds  # type: ignore[method-assign, misc]
        return times

    assert start(7.0, 3.0, 5.0, linears=["fc1"]).measure().stock == {}  # a table has them of all sizes or none
    first = start(7.0, 3.0, 5.0).measure()
    (again := start(6.0)).stored()
    (resumed := start()).stored()
    again, resumed = again.renew(), resumed.renew()
    rows = TimingTable.load(tmp_path / TIMINGS).grouped
    assert [row[STOCK][Format.BF16] for row in rows.values() if STOCK in row] == [5.0, 5.0]
    assert again == replace(first, stock=again.stock)  # those of an earlier start are none of these steps
    assert [again.stock[kind] - longer for kind, longer in first.stock.items()] == pytest.approx([2, 2])  # microbatches
    assert resumed == first  # under a map from its first step on


def test_a_damaged_file_is_named_and_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    measured_times(run, FakeClock()).measure()
    (run / TIMINGS).write_text('{"schema"')
    assert measured_times(run).stored() is None
    assert f"snip: {run / TIMINGS}: not JSON" in capsys.readouterr().out


@pytest.mark.parametrize("backend", [None, "reference", "emulated"])
def test_emulation_is_not_timed(backend: str | None) -> None:
    with pytest.raises(SnipError, match=r"--snip-budget speedup=1.2 weighs .*, which saves none: give --snip-timings"):
        check_measurable(SnipConfig(**FIELDS), backend)
    check_measurable(SnipConfig(**FIELDS, timings="h200"), backend)
    check_measurable(SnipConfig(enabled=True), backend)
    check_measurable(SnipConfig(**FIELDS), "hopper")


BATCH, STEPS = 8, 50
LINEARS = (LinearRow("decoder.layers.0.mlp.linear_fc1", 0, 4, 4),)


def scheduler(style: str = "cosine") -> OptimizerParamScheduler:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    return OptimizerParamScheduler(
        optimizer, 0.0, 1e-3, 1e-5, 5 * BATCH, STEPS * BATCH, style, 0.1, 0.1, STEPS * BATCH, "constant",
        wsd_decay_steps=20 * BATCH, lr_wsd_decay_style="linear",
    )  # fmt: skip


def arguments(**fields: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"train_iters": STEPS, "global_batch_size": BATCH, "train_samples": None} | fields)


def config(**fields: Any) -> SnipConfig:
    return SnipConfig(enabled=True, **fields)


@pytest.mark.parametrize("style", ["cosine", "linear", "WSD", "constant"])
@pytest.mark.parametrize("step", [0, 1, 7, 30])
def test_the_rate_of_every_step_is_what_megatron_s_scheduler_gives_there(style: str, step: int) -> None:
    megatron = scheduler(style)
    expected = []
    for _ in range(STEPS):
        expected.append(megatron.optimizer.param_groups[0]["lr"])
        megatron.step(BATCH)
    started = scheduler(style)
    started.step(step * BATCH)
    rate = learning_rate(started, arguments(), step)
    assert [rate(at) for at in range(STEPS)] == expected
    assert started.num_steps == step * BATCH  # as it was
    started.step(3 * BATCH)
    assert rate(step) == expected[step]  # whenever it is asked


def test_rates_are_relative_to_the_largest_and_cover_the_run_evenly() -> None:
    rate = learning_rate(scheduler("linear"), arguments(), 0)
    rates = relative_rates(rate, 5, STEPS)
    assert len(rates) == STEPS - 5 + 1
    assert rates[0] == max(rates) == 1.0
    assert rates[-2:] == pytest.approx((rate(STEPS - 1) / rate(5), rate(STEPS) / rate(5)))
    assert len(relative_rates(lambda _: 1.0, 0, 10**6)) == 1001
    assert relative_rates(lambda _: 0.0, 0, 4) == (1.0,) * 5


def test_without_a_known_end_the_map_is_static_and_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert timeline_of(config(schedule="auto"), arguments(train_iters=None), SolveRequest(), LINEARS, None, 0) is None
    line = capsys.readouterr().out
    assert line.startswith(
        "snip: --snip-schedule auto: the end of training is unknown without --train-iters: every update"
    )
    assert line.endswith("give --train-iters for phases\n")
    assert timeline_of(config(), arguments(train_iters=None), SolveRequest(), LINEARS, None, 0) is None
    assert capsys.readouterr().out == ""
    with pytest.raises(SnipError, match="--snip-policy late-all needs an end of training: give --train-iters"):
        timeline_of(config(policy="late-all"), arguments(train_iters=None), SolveRequest(), LINEARS, None, 0)


# -- where a run writes its record -------------------------------------------------------------------------------
def test_a_replay_is_not_written_over_what_it_replays(tmp_path: Path) -> None:
    """With --snip-overwrite, the record would be removed before it is read."""
    with RunDirectory(tmp_path / "snip", {}, overwrite=False, resume_step=None) as run:
        run.event(4, "adopt", version=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    config = SnipConfig(enabled=True, replay=str(tmp_path / "snip"), overwrite=True)
    with pytest.raises(SnipError, match="would write its record over the one it replays; choose another --snip-dir"):
        open_run_directory(config, Namespace(save=str(tmp_path)), 0, SolveRequest(), (), "reference", ())
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


# -- what is noted of a module's forward and backward in a training ----------------------------------------------
def forward(x: Tensor, factor: float) -> tuple[Tensor, str]:
    return (x * factor).square(), "bias"


def test_a_forward_with_its_backward_is_noted() -> None:
    spans, x = Spans(), torch.ones(4, requires_grad=True)
    y, bias = spans.run(forward, 1.0 * x, 3.0)
    assert bias == "bias"
    assert spans.seconds() is None  # the backward is still to come
    y.sum().backward()
    assert x.grad is not None
    assert (y == 9).all()
    assert (x.grad == 18).all()
    result = spans.seconds()
    assert result > 0
