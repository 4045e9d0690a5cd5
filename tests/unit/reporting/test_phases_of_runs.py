"""The phases of a run with plans: which ran, which are to come, what they change, and the average over the run."""

from dataclasses import replace
from pathlib import Path

import pytest
import synthetic_run

from snip_megatron.precision import Format, Gemm, PrecisionMap, option_id
from snip_megatron.precision.phases import PlanPhase, PrecisionPlan
from snip_megatron.reporting.phases import phase_view, phases_of, remaining_phases
from snip_megatron.reporting.report import render
from snip_megatron.reporting.summary import summarise
from snip_megatron.reporting.summary_text import headline
from snip_megatron.runtime.run_data import RunData, load_run

FP4 = PrecisionMap.uniform(synthetic_run.LINEARS, Format.FP4)
PRECISE = {option_id(name, Gemm.FPROP): Format.FP8 for name in synthetic_run.LINEARS}
EARLY = replace(FP4, loss=0.5)
LATE = PrecisionMap(choices={**FP4.choices, **PRECISE}, loss=0.125)
TIMED = {"budget": "speedup", "target": 1.4}
FAST = replace(EARLY, speedup=2.0, step_speedup=1.5, **TIMED)
SLOW = replace(LATE, speedup=1.25, step_speedup=1.2, **TIMED)


def plan_of(
    *phases: tuple[int, PrecisionMap], last: int = 120, version: int = 1, achieved: float = 0.76
) -> PrecisionPlan:
    made = tuple(PlanPhase(*phase) for phase in phases)
    return PrecisionPlan(made, last, version, "optimal", target=0.75, achieved=achieved)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """60 of 120 steps: bf16 before step 15, then a map with a share of 0.75 on record."""
    return synthetic_run.write_run(tmp_path / "run", updates=1, steps=60, faults=False)


def spans(run: RunData) -> list[tuple[int, int, int]]:
    return [(phase.begin, phase.end, phase.version) for phase in phases_of(run)]


def test_a_run_without_plans_shows_nothing(path: Path) -> None:
    run = load_run(path)
    assert phase_view(run) is None
    assert phases_of(run) == remaining_phases(run) == []
    assert 'id="phases-title"' not in render(run, live=True)


def test_phases_their_changes_and_the_average(path: Path) -> None:
    synthetic_run.add_plan(path, plan_of((15, EARLY), (50, LATE), (90, EARLY)), (0.75, 0.5, 1.0))
    run = load_run(path)
    view = phase_view(run)
    assert [(phase.begin, phase.steps, when) for phase, when, _ in view.rows] == [
        (15, 35, "over"), (50, 40, "in force"), (90, 30, "to come"),
    ]  # fmt: skip
    assert [phase.share for phase, _, _ in view.rows] == [0.75, 0.5, 1.0]
    assert [dict(changes) for _, _, changes in view.rows] == [
        {"fprop": "24 bf16 → fp4", "dgrad": "24 bf16 → fp4", "wgrad": "24 bf16 → fp4"},
        {"fprop": "24 fp4 → fp8"},
        {"fprop": "24 fp8 → fp4"},
    ]
    assert (view.timed, view.budget, view.target, view.expected) == (False, "fp4=0.75", 0.75, "76.00%")
    page = render(run, live=True)
    assert "is an average over the run: 76.00% if the latest plan is followed." in page
    assert "fprop: 24 fp4 → fp8</td>" in page
    assert "<td>0.125</td>" in page


def test_a_plan_holds_until_the_next_one_or_until_the_guard_drops_it(path: Path) -> None:
    synthetic_run.add_plan(path, plan_of((15, EARLY), (30, LATE), (90, EARLY)))
    synthetic_run.add_plan(path, plan_of((35, LATE), (50, EARLY), version=2))
    assert spans(load_run(path)) == [(15, 30, 1), (30, 35, 1), (35, 50, 2), (50, 120, 2)]
    synthetic_run.add_event(path, 55, "guard", action="refused", version=3, reason="loss spike")
    assert spans(load_run(path))[-1] == (50, 120, 2)
    synthetic_run.add_event(path, 55, "guard", action="taken_back", version=2, reason="loss spike")
    run = load_run(path)
    assert spans(run)[-1] == (50, 55, 2)
    assert remaining_phases(run) == []
    view = phase_view(run)
    assert view.expected is None


def test_phases_move_with_the_end_of_the_run(path: Path) -> None:
    synthetic_run.add_plan(path, plan_of((15, EARLY), (60, LATE)), (1.0, 0.5))
    synthetic_run.add_event(path, 40, "plan_moved", last_before=120, last=240)
    moved = [{"from_step": 30, "steps": 90, "fp4_fraction": 1.0}, {"from_step": 120, "steps": 120, "fp4_fraction": 0.5}]
    synthetic_run.add_event(path, 40, "plan", version=1, phases=moved)
    run = load_run(path)
    assert spans(run) == [(15, 120, 1), (120, 240, 1)]
    assert [phase.share for phase in phases_of(run)] == [1.0, 0.5]
    assert [(phase.begin, phase.steps) for phase in remaining_phases(run)] == [(60, 60), (120, 120)]
    page = render(run, live=True)
    assert '<td class="word">plan_moved</td><td class="text">last_before 120, last 240' in page


# -- was it worth it -----------------------------------------------------------------------------------------------
HOPPER = {"gemm_backend": "hopper", "device": "NVIDIA H200", "train_iters": 1000}


@pytest.fixture
def timed_run(tmp_path: Path) -> Path:
    """2 s a step in bf16, 1.5 s from step 35 on; 120 steps of 1000."""
    options = {"updates": 1, "first": 30, "faults": False, "seconds": (2.0, 1.5), "config": {"update_interval": 0}}
    return synthetic_run.write_run(tmp_path / "timed", facts=HOPPER, **options)


def adopted(path: Path, precision_map: PrecisionMap) -> RunData:
    (path / "maps" / "step_35.json").write_text(replace(precision_map, version=1).to_json())
    return load_run(path)


def test_what_a_plan_saves_over_the_run_is_scaled_by_its_predictions(timed_run: Path) -> None:
    synthetic_run.add_plan(timed_run, plan_of((35, FAST), (500, SLOW), last=1000))
    worth = summarise(adopted(timed_run, FAST))
    assert worth.assumes == "the plan is followed"
    # 0.5 s were measured where a third of the step was predicted; SLOW is predicted to save half as much
    assert worth.saved_run_s == pytest.approx(worth.saved_s + 380 * 0.5 + 500 * 0.25)
    assert "over the run if the plan is followed" in headline(worth)
