"""Maps that change with time in whole runs through the real entry: phases, their average, a resume, a replay."""

import math
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoints import differences, read_checkpoint
from launch import tiny_llama_args
from layouts import SHARDED, events
from warm_ranks import WarmRanks

from snip_megatron.runtime.run_data import read_maps, read_metrics, read_plans

STEPS, SAVED = 20, 14
BUDGET = 0.7
RANKS = 2
# Updates begin before steps 1 and 11, with plans from 3 and 13 on; phases begin at 10, 15 and 18. Due decisions wait.
SNIP = shlex.split(
    f"--snip --snip-budget fp4={BUDGET} --snip-schedule auto --snip-first-update 1 --snip-update-interval 10"
    f" --snip-lag 2 --snip-wait 240 --snip-settings probe_tokens=32 --num-layers 2 {SHARDED}"
)


def train(warm: WarmRanks, tmp: Path, name: str, *extra: str, steps: int = STEPS, ranks: int = RANKS) -> Path:
    run = tmp / name
    process = warm.succeed(ranks, tiny_llama_args("--snip-dir", str(run), *extra, iters=steps), tmp=tmp, timeout=300)
    (tmp / f"{name}.out").write_text(process.stdout)
    return run


def losses(run: Path) -> dict[int, float]:
    return {figure["step"]: figure["loss"] for figure in read_metrics(run)}


@dataclass(frozen=True)
class Whole:
    """The uninterrupted run, and the folder of its checkpoints."""

    run: Path
    saved: Path


@pytest.fixture(scope="module")
def whole(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    tmp = tmp_path_factory.mktemp("phases")
    run = train(warm, tmp, "whole", *SNIP, "--save", str(tmp / "saved"), "--save-interval", str(SAVED))
    return Whole(run, tmp / "saved")


def test_phases_begin_where_the_schedule_says_and_the_average_reaches_the_budget(whole: Whole) -> None:
    adopted = [event["step"] for event in events(whole.run, "adopt")]
    assert adopted == [3, 10, 13, 15, 18]
    assert [event["step"] for event in events(whole.run, "plan")] == [3, 13]
    assert [event["step"] for event in events(whole.run, "phase")] == [10, 15, 18]
    assert list(read_plans(whole.run)) == [3, 13]
    assert sorted(read_maps(whole.run)) == adopted
    first, second = read_plans(whole.run).values()
    assert [phase.begin for phase in first.phases] == [3, 10, 15, 18]
    assert [phase.begin for phase in second.phases] == [13, 15, 18]
    assert first.status == second.status == "optimal"
    shares = [figure["fp4_fraction"] for figure in read_metrics(whole.run)]
    assert len(shares) == STEPS
    assert shares[:3] == [0.0] * 3  # before the first plan; what was not spent there is spent later
    average = math.fsum(shares) / STEPS
    assert average >= BUDGET - 1e-9
    assert not events(whole.run, "out_of_reach", "solve_failed")
    said = events(whole.run, "plan")[-1]
    assert said["average"] == pytest.approx(average)
    assert said["average"] == pytest.approx(second.achieved, abs=0.02)  # stages may stay behind by a tolerance


def test_a_resume_in_the_middle_of_a_phase_is_bitwise_equal(warm: WarmRanks, whole: Whole, tmp_path: Path) -> None:
    """The checkpoint lies one step into the second plan, one before its next phase."""
    load = ("--load", str(whole.saved), "--ckpt-step", str(SAVED), "--save", str(tmp_path / "saved"))
    run = train(warm, tmp_path, "resumed", *SNIP, *load, "--save-interval", "100")
    assert losses(run) == {step: loss for step, loss in losses(whole.run).items() if step >= SAVED}
    assert [event["step"] for event in events(run, "phase")] == [15, 18]
    assert {s: m for s, m in read_maps(run).items() if s > SAVED} == {
        s: m for s, m in read_maps(whole.run).items() if s > SAVED
    }
    states = [read_checkpoint(folder, STEPS) for folder in (whole.saved, tmp_path / "saved")]
    assert differences(*states) == []


def test_a_resume_on_another_layout_goes_on_with_the_same_plan(warm: WarmRanks, whole: Whole, tmp_path: Path) -> None:
    """The plan and what was spent are the checkpoint's: the same phases begin at the same steps, with equal maps."""
    load = ("--load", str(whole.saved), "--ckpt-step", str(SAVED), "--pipeline-model-parallel-size", "2")
    run = train(warm, tmp_path, "resumed", *SNIP, *load)
    assert [event["step"] for event in events(run, "phase")] == [15, 18]
    assert not events(run, "plan_moved", "out_of_reach")
    fields = ("version", "status", "target", "phases")
    plans = [
        {name: event[name] for name in fields} for folder in (whole.run, run) for event in events(folder, "phase")[-1:]
    ]
    assert plans[0] == plans[1]
    later, before = ({s: m for s, m in read_maps(folder).items() if s > SAVED} for folder in (run, whole.run))
    assert later == before
    shares = [
        {figure["step"]: figure["fp4_fraction"] for figure in read_metrics(folder)} for folder in (whole.run, run)
    ]
    assert shares[1] == {step: share for step, share in shares[0].items() if step >= SAVED}


def test_another_end_moves_the_phases_in_one_line(warm: WarmRanks, whole: Whole, tmp_path: Path) -> None:
    """Megatron lets a resumed run have other --train-iters with a scheduler of its own (--override...)."""
    load = ("--load", str(whole.saved), "--ckpt-step", str(SAVED), "--override-opt_param-scheduler")
    run = train(warm, tmp_path, "longer", *SNIP, *load, "--exit-interval", "22", steps=40)
    (moved,) = events(run, "plan_moved")
    assert (moved["step"], moved["last_before"], moved["last"]) == (SAVED, STEPS, 40)
    assert [phase["from_step"] for phase in events(run, "plan")[0]["phases"]] == [26, 30, 36]  # 13, 15, 18
    assert (tmp_path / "longer.out").read_text().count("snip: training now ends at step 40 instead of 20") == 1
    assert 20 not in [event["step"] for event in events(run, "phase")]  # the second plan holds no phase before 13
