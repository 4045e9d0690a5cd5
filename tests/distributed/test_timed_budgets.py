"""Runs whose budget is a predicted speedup or a loss: maps keep it on every stage, and the record says so."""

import shlex
from pathlib import Path

import pytest
from launch import tiny_llama_args
from test_entry_data import write_documents
from timings import write_timings
from warm_ranks import WarmRanks

from snip_megatron.precision import Format, Gemm
from snip_megatron.runtime.run_data import TIMINGS, read_config, read_events, read_maps, read_metrics
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.sensitivity.table import StatisticsTable
from snip_megatron.sensitivity.times import OptionTimes
from snip_megatron.solver import Problem
from snip_megatron.timing.table import TimingTable
from snip_megatron.tools.cli import main

FORMATS = "bf16,fp8,fp8_tensor"
# Due decisions wait for the solver, so that every run adopts two maps: before step 6 and before step 12.
SNIP = shlex.split(
    "--snip --snip-first-update 2 --snip-update-interval 6 --snip-lag 4 --snip-wait 120 --snip-settings probe_tokens=64"
)


def arguments(tmp: Path, budget: str, *extra: str) -> list[str]:
    timings = ("--snip-timings", str(write_timings(tmp / "timings.json")))
    expected = ("--snip-formats", FORMATS, "--snip-budget", budget)
    return tiny_llama_args(*SNIP, "--snip-dir", str(tmp / "run"), *expected, *timings, *extra, iters=14)


def test_a_speedup_on_two_pipeline_stages(warm: WarmRanks, tmp_path: Path) -> None:
    pin = ("--snip-pin", "decoder.layers.3.*=bf16")
    warm.succeed(
        2, arguments(tmp_path, "speedup=1.25", "--pipeline-model-parallel-size", "2", *pin), tmp=tmp_path, timeout=300
    )
    run = tmp_path / "run"
    table = StatisticsTable.load(run / "stats" / "step_2.npz")
    assert table.formats == ("fp8", "fp8_tensor")  # bf16 is not measured
    request = SolveRequest.from_dict(read_config(run)["facts"]["request"], "config.json")
    assert request.times is not None
    assert (str(request.budget), request.pins) == ("speedup=1.25", (("decoder.layers.3.*", "bf16"),))
    maps = read_maps(run)
    assert sorted(maps) == [6, 12]
    for step, precision_map in maps.items():
        assert precision_map.status == "optimal"
        assert (precision_map.budget, precision_map.target) == ("speedup", 1.25)
        result = request.times.by_stage(precision_map, {row.name: row.stage for row in table.linears})
        predicted = max(bf16 for bf16, _ in result.values()) / max(seconds for _, seconds in result.values())
        assert precision_map.speedup == pytest.approx(predicted, rel=1e-9)
        assert predicted >= 1.25 * (1 - 1e-8)
        assert precision_map.fp4_share == 0.0
        assert 1.0 < precision_map.step_speedup < predicted  # attention and the rest stay as they are
        assert precision_map.loss is not None
        assert precision_map.loss == pytest.approx(precision_map.objective)
        adopted = next(e for e in read_events(run) if e["event"] == "adopt" and e["step"] == step)
        assert adopted["budget"] == "speedup=1.25"
        assert (adopted["speedup"], adopted["loss"]) == (precision_map.speedup, precision_map.loss)
    solved = [e for e in read_events(run) if e["event"] == "solved"]
    assert [e["speedup"] for e in solved] == [m.speedup for m in maps.values()]
    problem = Problem.from_json((run / "problems" / "step_2.json").read_text())
    assert problem.budget.value == 1.25
    # Layer 3 stays in bf16: its stage needs faster formats elsewhere, the other stage does not.
    chosen = [maps[6].format_of(f"decoder.layers.{layer}.mlp.linear_fc1", Gemm.FPROP) for layer in (2, 3)]
    assert chosen == [Format.FP8_TENSOR, Format.BF16]
    metrics = {m["step"]: m for m in read_metrics(run)}
    assert {m["fp4_fraction"] for m in metrics.values()} == {0.0}


def test_snip_alone_takes_the_fastest_map_within_a_small_loss_on_the_named_card(
    warm: WarmRanks, tmp_path: Path
) -> None:
    """The maps are those of a plan with phases. The record has what the arguments left open."""
    named = ("--snip-timings", str(write_timings(tmp_path / "timings.json")), "--snip-dir", str(tmp_path / "run"))
    write_documents(tmp_path / "train", 40, seed=1)  # mock data have no loss to protect
    data = ("--train-data-path", str(tmp_path / "train"), "--tokenizer-type", "NullTokenizer", "--vocab-size", "255")
    process = warm.succeed(
        1, tiny_llama_args(*SNIP, *named, *data, iters=14, mock_data=False), tmp=tmp_path, timeout=300
    )
    said = "snip: --snip-budget loss=0.002 over bf16,fp8,fp8_tensor, schedule auto: formats are emulated"
    assert process.stdout.count(said) == 1
    config = read_config(tmp_path / "run")["config"]
    assert (config["budget"], config["formats"]) == ("loss=0.002", ["bf16", "fp8", "fp8_tensor"])
    maps = read_maps(tmp_path / "run")
    assert maps
    assert all(precision_map.budget == "loss" for precision_map in maps.values())
    assert max(precision_map.speedup or 0.0 for precision_map in maps.values()) > 1.2


def test_snip_alone_on_blackwell(warm: WarmRanks, tmp_path: Path) -> None:
    """The card and Transformer Engine are emulated: its linears run the map, and the run times and records them."""
    run = tmp_path / "run"
    args = tiny_llama_args(*SNIP, "--snip-dir", str(run), iters=14)
    process = warm.succeed(1, args, module="altered_pretrain", tmp=tmp_path, timeout=300, env={"ALTER": "blackwell"})
    assert "snip: --mock-data has no loss to protect: the fastest map over bf16,mxfp8,nvfp4;" in process.stdout
    assert str(read_config(run)["config"]["budget"]).startswith("loss=1e")  # no bound
    assert "GEMMs by transformer_engine (by Transformer Engine's linears on Some Blackwell, sm_100" in process.stdout
    assert "timed the GEMMs of this model (4 shapes, bf16, nvfp4, mxfp8) on cpu" in process.stdout
    record = read_config(run)
    config, backend = record["config"], record["facts"]["gemm_backend"]
    assert (config["gemm"], backend) == ("transformer_engine", "transformer_engine")
    assert TimingTable.load(run / TIMINGS).backend == "transformer_engine"
    assert [event["event"] for event in read_events(run)].count("adopt") == len(maps := read_maps(run)) > 1
    assert {fmt for each in maps.values() for fmt in each.choices.values()} <= {Format.MXFP8, Format.NVFP4, Format.BF16}
    assert all((each.speedup or 0) > 1.3 and each.budget == "loss" for each in maps.values())


def test_a_run_without_a_table_times_its_gemms_once(warm: WarmRanks, tmp_path: Path) -> None:
    """A resume has the times of the first start."""
    run = tmp_path / "run"

    def train(folder: Path, until: int, *extra: str) -> str:
        expected = ("--snip-formats", FORMATS, "--snip-budget", "speedup=1.25", "--pipeline-model-parallel-size", "2")
        saved = ("--save", str(tmp_path / "saved"), "--save-interval", "100", "--exit-interval", str(until))
        args = tiny_llama_args(*SNIP, "--snip-dir", str(folder), *expected, *saved, *extra, iters=14)
        process = warm.succeed(2, args, module="altered_pretrain", tmp=tmp_path, timeout=300, env={"ALTER": "rates"})
        return process.stdout

    def times(folder: Path) -> OptionTimes:
        request = SolveRequest.from_dict(read_config(folder)["facts"]["request"], "config.json")
        assert request.times is not None
        return request.times

    assert train(run, 8).count("snip: timed the GEMMs of this model (4 shapes, bf16, fp8, fp8_tensor) on cpu in") == 1
    first = times(run)
    assert [e["step"] for e in read_events(run) if e["event"] == "times"] == [2]
    assert read_maps(run)[6].speedup > 1.25
    assert TimingTable.load(run / TIMINGS).backend == "reference"
    assert f"snip: times of this model's GEMMs: {run / TIMINGS}" in train(run, 14, "--load", str(tmp_path / "saved"))
    assert times(run) == first
    assert [e["step"] for e in read_events(run) if e["event"] == "times"] == [2]
    assert 12 in read_maps(run)
    assert main(["solve", str(run), "--budget", "speedup=1.2", "--out", str(tmp_path / "again.json")]) == 0
