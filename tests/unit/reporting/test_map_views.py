"""Tables about the maps of a run: pipeline stages with shares and times, and the phases of plans."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic_run

from snip_megatron.precision import Format, Gemm, PrecisionMap, option_id
from snip_megatron.precision.phases import PlanPhase, PrecisionPlan
from snip_megatron.reporting import map_views as views
from snip_megatron.reporting.map_views import phase_view, phases_of
from snip_megatron.reporting.report import render
from snip_megatron.reporting.summary import headline, summarise
from snip_megatron.runtime.run_data import RunData, load_run
from snip_megatron.sensitivity.times import OptionTimes


# -- pipeline stages -----------------------------------------------------------------------------------------------
@pytest.fixture
def stored_run(tmp_path):
    return synthetic_run.write_run(tmp_path / "run")


def stage_view(run, unreadable):
    return views.stage_view(run, views.recorded_linears(run, unreadable), unreadable)


def with_facts(path, **facts):
    body = json.loads((path / "config.json").read_text())
    body["facts"] |= facts
    (path / "config.json").write_text(json.dumps(body))
    return load_run(path)


def test_linears_that_no_map_covers_are_in_the_denominator(stored_run):
    """On stage 1 as many FLOPs again: half the share; a figure that is none is left out."""
    view = stage_view(load_run(stored_run), unreadable := [])
    assert (view["linears"], view["shares"]) == ({"0": 12, "1": 12}, {"0": 0.75, "1": 0.75})
    assert (view["times"], unreadable) == ({}, [])
    flops = 12 * 3 * 2.0 * 128 * 128
    view = stage_view(with_facts(stored_run, unquantised_flops={"1": flops, "0": "many"}), [])
    assert view["shares"] == {"0": 0.75, "1": 0.375}


def test_times_are_those_that_the_run_solved_with(stored_run):
    names = [f.value for f in Format]
    seconds = {n: {g.value: dict.fromkeys(names, 2.0) | {"fp4": 1.0} for g in Gemm} for n in synthetic_run.LINEARS}
    view = stage_view(with_facts(stored_run, request={"times": {"model": "card", "seconds": seconds}}), [])
    assert view["model"] == "card"
    assert view["times"]["1"][1] / view["times"]["1"][0] == pytest.approx(0.625)


@pytest.mark.parametrize(("measured", "of_bf16"), [(None, 18 / 24), (60.0, 54 / 60)])
def test_a_map_and_fp8_everywhere_are_compared_on_one_step_in_bf16(measured, of_bf16):
    """Six seconds are saved, of a step of 24 s in the model. A map has a speedup of its own, over a measured step."""
    names = synthetic_run.LINEARS[:2]
    times = {g.value: {"bf16": 2.0, "fp8": 1.0} for g in Gemm}
    times = OptionTimes("card", dict.fromkeys(names, times), rest={0: 12.0})
    prediction = views.Prediction(times, dict.fromkeys(names, 0))
    for fmt, expected in ((Format.FP8, 1.0), (Format.BF16, of_bf16)):
        chosen = replace(PrecisionMap.uniform(names, fmt), step_speedup=1.1)
        assert prediction.over_fp8(chosen, measured) == (Format.FP8, pytest.approx(expected))


def test_broken_times_are_said(stored_run):
    broken = with_facts(stored_run, request={"times": {"model": "card", "seconds": "fast"}})
    assert stage_view(broken, unreadable := [])["times"] == {}
    assert "predicted times" in unreadable[0]
    assert "predicted times" in render(broken)
    for file in (stored_run / "stats").iterdir():
        file.unlink()
    assert stage_view(load_run(stored_run), []) is None


# -- phases --------------------------------------------------------------------------------------------------------
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
    assert phases_of(run) == []
    assert 'id="phases-title"' not in render(run, live=True)


def test_phases_their_changes_and_the_average(path: Path) -> None:
    synthetic_run.add_plan(path, plan_of((15, EARLY), (50, LATE), (90, EARLY)), (0.75, 0.5, 1.0))
    run = load_run(path)
    view = phase_view(run)
    assert [(phase.begin, phase.steps, when) for phase, when, _ in view["rows"]] == [
        (15, 35, "over"), (50, 40, "in force"), (90, 30, "to come"),
    ]  # fmt: skip
    assert [phase.share for phase, _, _ in view["rows"]] == [0.75, 0.5, 1.0]
    assert [dict(changes) for _, _, changes in view["rows"]] == [
        {"fprop": "24 bf16 → fp4", "dgrad": "24 bf16 → fp4", "wgrad": "24 bf16 → fp4"},
        {"fprop": "24 fp4 → fp8"},
        {"fprop": "24 fp8 → fp4"},
    ]
    assert (view["timed"], view["budget"], view["target"], view["expected"]) == (False, "fp4=0.75", 0.75, "76.00%")
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
    view = phase_view(run)
    assert view["expected"] is None


def test_phases_move_with_the_end_of_the_run(path: Path) -> None:
    synthetic_run.add_plan(path, plan_of((15, EARLY), (60, LATE)), (1.0, 0.5))
    synthetic_run.add_event(path, 40, "plan_moved", last_before=120, last=240)
    moved = [{"from_step": 30, "steps": 90, "fp4_fraction": 1.0}, {"from_step": 120, "steps": 120, "fp4_fraction": 0.5}]
    synthetic_run.add_event(path, 40, "plan", version=1, phases=moved)
    run = load_run(path)
    assert spans(run) == [(15, 120, 1), (120, 240, 1)]
    assert [phase.share for phase in phases_of(run)] == [1.0, 0.5]
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


def test_the_saving_over_the_run_takes_the_map_in_force_for_the_last_one(timed_run: Path) -> None:
    synthetic_run.add_plan(timed_run, plan_of((35, FAST), (500, SLOW), last=1000))
    worth = summarise(adopted(timed_run, FAST))
    assert worth.saved_run_s == pytest.approx(worth.saved_s + 880 * 0.5)
    assert "over the run if this map stays, although the plan changes it" in headline(worth)
    synthetic_run.add_plan(timed_run, plan_of((35, FAST), (500, FAST), last=1000, version=2))
    assert summarise(adopted(timed_run, FAST)).assumes == "this map stays"
