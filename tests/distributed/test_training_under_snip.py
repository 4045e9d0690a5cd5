"""Whole runs under SNIP through the real entry: maps are solved, agreed on and adopted on every layout, and repeat.

The guard takes one back, and memory that is short on one rank drops or shrinks a probe on all.
"""

import shlex
from pathlib import Path

import pytest
from launch import losses, tiny_llama_args
from layouts import events
from warm_ranks import WarmRanks

from snip_megatron.precision import Format, Gemm
from snip_megatron.runtime.run_data import read_events, read_maps, read_metrics
from snip_megatron.sensitivity.blame import Blame
from snip_megatron.sensitivity.table import StatisticsTable

STEPS, SAVED = 13, 9
STAGE_TOLERANCE = 0.02
# Due decisions wait for the solver: on a busy machine these small steps are over before its process has started.
SNIP = shlex.split("--snip --snip-first-update 2 --snip-update-interval 5 --snip-lag 4 --snip-wait 120")


def arguments(run: Path, *extra: str, steps: int = STEPS) -> list[str]:
    return tiny_llama_args(*SNIP, "--snip-dir", str(run), *extra, iters=steps)


def train(
    warm: WarmRanks, tmp: Path, nproc: int, *extra: str, name: str = "run", steps: int = STEPS
) -> tuple[Path, dict[int, float]]:
    """The run directory and its losses by step (from 0); Megatron prints some as means of two."""
    run = tmp / name
    process = warm.succeed(nproc, arguments(run, *extra, steps=steps), tmp=tmp, timeout=300)
    (tmp / f"{name}.out").write_text(process.stdout)
    return run, {figure["step"]: figure["loss"] for figure in read_metrics(run)}


def assert_maps_hold(run: Path, stages: int) -> None:
    """Assert at least two optimal maps, whose formats meet the budget overall and on every stage."""
    adopted = events(run, "adopt")
    assert len(adopted) >= 2
    table = StatisticsTable.load(sorted((run / "stats").glob("*.npz"))[0])
    flops = {row.name: float(row.n * row.k) for row in table.linears}
    stage_of = {row.name: row.stage for row in table.linears}
    assert set(stage_of.values()) == set(range(stages))
    for step, precision_map in read_maps(run).items():
        assert step in {event["step"] for event in adopted}
        assert precision_map.status == "optimal"
        assert precision_map.achieved is not None
        assert precision_map.achieved >= 0.75
        for stage in range(stages):
            names = [name for name in flops if stage_of[name] == stage]
            low = sum(flops[n] for n in names for g in Gemm if precision_map.format_of(n, g) is Format.FP4)
            share = low / (3 * sum(flops[n] for n in names))
            assert share >= 0.75 - STAGE_TOLERANCE - 1e-9
            assert precision_map.achieved_per_stage[str(stage)] == pytest.approx(share)


def test_optimal_maps_are_adopted_on_tensor_and_pipeline_parallel_ranks(warm: WarmRanks, tmp_path: Path) -> None:
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
    run, curve = train(warm, tmp_path, 4, *layout.split())
    assert_maps_hold(run, 2)
    assert (tmp_path / "run.out").read_text().count("snip: not multiples of 128 on a rank: ") == 1
    assert list(curve) == list(range(STEPS))
    assert None not in curve.values()  # rank 0 knows the last stage's loss
    assert curve[STEPS - 1] < curve[0] - 0.5
    assert (run / "report.html").stat().st_size > 100_000


def test_recorded_schedule_replays_bitwise_and_a_checkpoint_resumes_it(warm: WarmRanks, tmp_path: Path) -> None:
    """The checkpoint lies between submitting an update and adopting it. It is a file for each rank."""
    saves = ("--save", str(tmp_path / "ckpt"), "--save-interval", str(SAVED), "--ckpt-format", "torch")
    run, curve = train(warm, tmp_path, 1, *saves)
    assert len(events(run, "adopt")) >= 2

    _, replayed = train(warm, tmp_path, 1, "--snip-replay", str(run), name="replayed")
    assert replayed == curve

    resume = ("--load", str(tmp_path / "ckpt"), "--ckpt-step", str(SAVED), "--ckpt-format", "torch")
    _, resumed = train(warm, tmp_path, 1, *resume, "--snip-replay", str(run), name="resumed")
    assert resumed == {step: loss for step, loss in curve.items() if step in resumed}
    assert list(resumed) == list(range(SAVED, STEPS))


def test_the_map_is_taken_back_and_the_next_must_promise_more(warm: WarmRanks, tmp_path: Path) -> None:
    """An injected loss spike takes the map back, on all ranks at one step, after it was found that the map did no harm.

    Resumed runs take it back at the same step: tests/unit/runtime/test_guard.py. A replay has no guard: it
    adopts what was recorded.
    """
    run, when = tmp_path / "run", "--snip-first-update 10 --snip-update-interval 9 --snip-guard-steps 6"
    args = arguments(
        run, *when.split(), "--snip-guard-blame", "--pipeline-model-parallel-size", "2", "--num-layers", "2", steps=24
    )
    spikes = {"SPIKES": "16,19"}  # the map is adopted at 14; figures of 18 arrive after 19
    process = warm.succeed(2, args, module="altered_pretrain", env=spikes, tmp=tmp_path / "ranks", timeout=200)
    (blamed,) = events(run, "blame")
    assert (blamed["step"], blamed["alarm_step"], blamed["verdict"]) == (20, 18, "not_precision")
    verdict = Blame.load(run / "blame_19.json")  # of the microbatches of the alarm, with the current weights
    assert (verdict.verdict, verdict.microbatches, blamed["of_step"]) == ("not_precision", 1, 18)
    assert verdict.weights is not None
    assert (verdict.weights.step, verdict.weights.digest) == (20, blamed["weights"])
    assert f" --snip-map {run / 'maps' / 'step_14.json'} --snip-blame 19\n" in process.stdout
    guards = events(run, "guard")
    assert [(event["step"], event["action"]) for event in guards] == [(20, "taken_back"), (23, "refused")]
    assert guards[0]["alarm_step"] == 18
    assert guards[0]["loss"] > guards[0]["limit"]
    assert [event["step"] for event in events(run, "adopt")] == [14, 20]
    shares = [metric["fp4_fraction"] for metric in read_metrics(run)]
    assert shares[13:21] == [0.0, *[pytest.approx(0.75, abs=0.05)] * 6, 0.0]
    assert set(read_maps(run)) == {14, 20}


def test_all_ranks_probe_what_fits_on_the_smallest(warm: WarmRanks, tmp_path: Path) -> None:
    """Rank 1 has too little memory for a sequence at step 2, plenty at step 3, and enough for a few at step 5."""
    run, data_parallel = tmp_path / "run", 2
    options = shlex.split("--micro-batch-size 8 --global-batch-size 16 --use-distributed-optimizer")
    args = arguments(run, *options, "--snip-update-interval", "3", "--snip-lag", "1", steps=12)
    free = (2**10, 2**40, 14 * 2**20, *[2**40] * 9)
    environment = {"TIGHT": ",".join(map(str, (1, *free)))}
    tight = warm.succeed(2, args, module="altered_pretrain", env=environment, tmp=tmp_path / "tight")
    (dropped,) = events(run, "dropped")
    assert (dropped["step"], dropped["rank"], dropped["free_bytes"]) == (2, 1, 1024.0)
    assert dropped["needed_bytes"] > 2.0**20
    assert "the update of step 2 is dropped: not enough memory: rank 1 has 0.00 GiB free" in tight.stdout
    taken = {event["step"]: event["tokens"] / (data_parallel * 64) for event in events(run, "probe")}
    assert taken[3] == 8
    assert taken[5] in (1, 2, 4)
    assert taken[8] == taken[5]  # also where memory is free again
    plain = warm.run(2, tiny_llama_args(*options, iters=12), tmp=tmp_path / "plain")
    (adopted, *_) = [event for event in events(run, "adopt") if event["changed"]]
    before = {step: loss for step, loss in losses(plain).items() if step <= adopted["step"]}
    assert len(before) == adopted["step"] == 4
    assert {step: loss for step, loss in losses(tight).items() if step in before} == before
    assert len(losses(tight)) == 12


def test_a_run_that_ends_before_its_first_map_says_so_and_pays_for_no_update(warm: WarmRanks, tmp_path: Path) -> None:
    """By default the first update is at step 5, and its map would be adopted ten steps later."""
    process = warm.succeed(1, tiny_llama_args("--snip", "--snip-dir", "run", iters=12), tmp=tmp_path)
    assert "snip: this run trains in bf16 to its end, without an update: it has 12 steps" in process.stdout
    assert "use --train-iters 16 or more, or a smaller --snip-lag" in process.stdout
    assert (
        "snip: step 5: no update, because training ends before its map would be adopted, at step 15" in process.stdout
    )
    assert {event["event"] for event in read_events(tmp_path / "run")} == {"skipped"}
    assert "Every step so far was in bf16: an update was left out (training ends before step 15" in process.stdout
    assert process.stdout.rstrip().endswith("snip: report: run/report.html")
