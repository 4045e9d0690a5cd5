"""Predicted times of a run, and the phases of its latest plan."""

from dataclasses import replace
from pathlib import Path

import pytest
import synthetic_run

from snip_megatron.precision import Format, Gemm, PrecisionMap, option_id
from snip_megatron.precision.phases import PlanPhase, PrecisionPlan
from snip_megatron.reporting.figures import phase_view
from snip_megatron.reporting.report import render
from snip_megatron.reporting.summary import Prediction
from snip_megatron.runtime.run_data import RunData, load_run
from snip_megatron.sensitivity.times import OptionTimes


@pytest.mark.parametrize(("measured", "of_bf16"), [(None, 18 / 24), (60.0, 54 / 60)])
def test_a_map_and_fp8_everywhere_are_compared_on_one_step_in_bf16(measured, of_bf16):
    """Six seconds are saved, of a step of 24 s in the model. A map has a speedup of its own, over a measured step."""
    names = synthetic_run.LINEARS[:2]
    times = {g.value: {"bf16": 2.0, "fp8": 1.0} for g in Gemm}
    times = OptionTimes("card", dict.fromkeys(names, times), rest={0: 12.0})
    prediction = Prediction(times, dict.fromkeys(names, 0))
    for fmt, expected in ((Format.FP8, 1.0), (Format.BF16, of_bf16)):
        chosen = replace(PrecisionMap.uniform(names, fmt), step_speedup=1.1)
        assert prediction.over_fp8(chosen, measured) == (Format.FP8, pytest.approx(expected))


FP4 = PrecisionMap.uniform(synthetic_run.LINEARS, Format.FP4)
PRECISE = {option_id(name, Gemm.FPROP): Format.FP8 for name in synthetic_run.LINEARS}
EARLY = replace(FP4, loss=0.5)
LATE = PrecisionMap(choices={**FP4.choices, **PRECISE}, loss=0.125)


def plan_of(
    *phases: tuple[int, PrecisionMap], last: int = 120, version: int = 1, achieved: float = 0.76
) -> PrecisionPlan:
    parts = tuple(PlanPhase(*phase) for phase in phases)
    return PrecisionPlan(parts, last, version, "optimal", target=0.75, achieved=achieved)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """60 of 120 steps: bf16 before step 15, then a map with a share of 0.75 on record."""
    return synthetic_run.write_run(tmp_path / "run", updates=1, steps=60, faults=False)


def spans(run: RunData) -> list[tuple[int, int, str]]:
    return [(row["begin"], row["steps"], row["when"]) for row in phase_view(run)["rows"]]


def test_phases_their_changes_and_the_average(path: Path) -> None:
    synthetic_run.add_plan(path, plan_of((15, EARLY), (50, LATE), (90, EARLY)), (0.75, 0.5, 1.0))
    run = load_run(path)
    assert spans(run) == [(15, 35, "over"), (50, 40, "in force"), (90, 30, "to come")]
    view = phase_view(run)
    assert [row["share"] for row in view["rows"]] == [0.75, 0.5, 1.0]
    assert [row["changes"] for row in view["rows"]] == [
        {"fprop": "24 bf16 → fp4", "dgrad": "24 bf16 → fp4", "wgrad": "24 bf16 → fp4"},
        {"fprop": "24 fp4 → fp8"},
        {"fprop": "24 fp8 → fp4"},
    ]
    assert (view["timed"], view["version"], view["budget"], view["expected"]) == (False, 1, "fp4=0.75", "76.00%")
    page = render(run, live=True)
    assert "Plan v1, for the budget fp4=0.75 over the whole run: 76.00% on average." in page
    assert "fprop: 24 fp4 → fp8</td>" in page
    assert "<td>0.125</td>" in page


def test_the_latest_plan_is_shown_and_dropped_by_the_guard(path: Path) -> None:
    synthetic_run.add_plan(path, plan_of((15, EARLY), (30, LATE), (90, EARLY)))
    synthetic_run.add_plan(path, plan_of((35, LATE), (50, EARLY), version=2))
    assert spans(load_run(path)) == [(35, 15, "over"), (50, 70, "in force")]
    synthetic_run.add_event(path, 55, "guard", action="refused", version=3, reason="loss spike")
    assert spans(load_run(path))[-1] == (50, 70, "in force")
    synthetic_run.add_event(path, 55, "guard", action="taken_back", version=2, reason="loss spike")
    run = load_run(path)
    assert spans(run)[-1] == (50, 70, "dropped")
    assert phase_view(run)["expected"] == ""
