"""Maps are measured before one is adopted, through the real entry on gloo ranks."""

import shlex
from pathlib import Path

import pytest
from launch import tiny_llama_args
from layouts import events
from timings import write_timings
from warm_ranks import WarmRanks

from snip_megatron.runtime.run_data import load_run, read_metrics
from snip_megatron.sensitivity.table import StatisticsTable

ADOPTED = 6
SNIP = shlex.split(
    "--snip --snip-estimator noise --snip-budget fp4=0.6 --snip-first-update 4 --snip-update-interval 100 --snip-lag 2"
    " --snip-wait 240 --snip-settings probe_tokens=64"
)
EXPERTS = shlex.split(
    "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96"
    " --moe-layer-freq [0,1,1,0] --moe-token-dispatcher-type alltoall --micro-batch-size 1"
)


def test_the_rise_is_the_difference_of_two_trainings_at_the_adoption(warm: WarmRanks, tmp_path: Path) -> None:
    """At that step both have the same weights and tokens. Then one trains under the map, the other in bf16."""

    def losses(run: Path, *snip: str) -> dict[int, float]:
        more = ("--snip-probe-microbatches", "2", "--snip-dir", str(run))
        args = tiny_llama_args(*SNIP, *more, *EXPERTS, *snip, iters=ADOPTED + 2)
        warm.succeed(2, args, tmp=run.with_suffix(".tmp"))
        return {each["step"]: each["loss"] for each in read_metrics(run)}

    run = tmp_path / "map"
    in_bf16, under_map = losses(tmp_path / "bf16", "--snip-policy", "bf16"), losses(run)
    assert {step: under_map[step] for step in range(ADOPTED)} == {step: in_bf16[step] for step in range(ADOPTED)}
    (measured,), (adopted,) = events(run, "rise"), events(run, "adopt")
    assert (measured["step"], adopted["step"]) == (ADOPTED, ADOPTED)
    assert measured["measured_rise"] == pytest.approx(under_map[ADOPTED] - in_bf16[ADOPTED], abs=3e-6)
    assert measured["measured_tokens"] == 4 * 64
    assert measured["measured_error"] > 1e-5
    first, second = measured["candidates"]
    assert (first["policy"], second["policy"]) == ("snip", "backward-first")
    totals = [each["measured_rise"] + each["predicted_backward"] for each in (first, second)]
    assert measured["policy"] == (first, second)[totals.index(min(totals))]["policy"]
    shown = {name: measured[name] for name in ("policy", "predicted_rise", "measured_rise", "measured_error")}
    assert {name: adopted[name] for name in shown} == shown


def test_a_map_whose_rise_was_predicted_too_low_is_solved_again(warm: WarmRanks, tmp_path: Path) -> None:
    """The better one of both solutions is adopted, and the next update is predicted with what was measured."""
    run, adopted_at = tmp_path / "run", 14
    timings = ("--snip-timings", str(write_timings(tmp_path / "timings.json")), "--snip-first-update", "12")
    expected = ("--snip-formats", "bf16,fp4", "--snip-budget", "loss=0.002", "--snip-estimator", "fisher")
    # So many tokens, and so far from a minimum, that the rise is many times its error.
    tokens = ("--lr", "1e-2", "--micro-batch-size", "16", "--global-batch-size", "64", "--snip-probe-microbatches", "4")
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    # Training ends while the next update is undecided.
    more = ("--snip-dir", str(run), *tokens, "--snip-update-interval", "6", "--exit-interval", str(adopted_at + 5))
    args = tiny_llama_args(*SNIP, *expected, *timings, *layout.split(), *more, iters=adopted_at + 7)
    process = warm.succeed(4, args, module="altered_pretrain", env={"LOW": "1e-3"}, tmp=tmp_path)
    first, second = events(run, "rise")
    assert first["measured_rise"] - 2 * first["measured_error"] > first["bound"] > first["predicted_rise"]
    factor = first["measured_rise"] / first["predicted_rise"]
    (rejected,) = events(run, "rejected")
    assert (rejected["step"], rejected["again"]) == (adopted_at, 2)
    assert rejected["correction"] == pytest.approx(factor, rel=1e-3)
    assert f"solving again with predictions x {rejected['correction']:g}" in process.stdout
    again, before = second["candidates"]
    assert (second["step"], before["predicted_rise"]) == (adopted_at + 2, first["predicted_rise"])
    assert again["predicted_rise"] <= second["bound"] * (1 + 1e-6)
    (adopted,) = events(run, "adopt")
    assert adopted["measured_rise"] == min(again["measured_rise"], before["measured_rise"])
    assert StatisticsTable.load(run / "stats" / "step_12.npz").meta["correction"] == rejected["correction"]
    assert StatisticsTable.load(run / "stats" / "step_18.npz").meta["correction"] > 100.0
    update = load_run(run).updates[0]
    assert (update.version, update.adopted_step) == (1, adopted["step"])
