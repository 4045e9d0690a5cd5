"""Schedules and plans: where phases begin, which map is in force, what moves with the run's end, and their JSON."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from refusal import refusal

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.phases import AUTO, PlanPhase, PrecisionPlan, Schedule, SchedulePhase

LINEAR = "decoder.layers.0.mlp.linear_fc1"
FP4, FP8 = (PrecisionMap.uniform([LINEAR], fmt) for fmt in (Format.FP4, Format.FP8))

BEGINS = st.lists(st.floats(0.001, 0.999), max_size=6, unique=True).map(lambda f: [0.0, *sorted(f)])
SCHEDULES = BEGINS.map(lambda begins: Schedule(tuple(SchedulePhase(b) for b in begins)))
SPANS = st.tuples(st.integers(0, 10**6), st.integers(1, 10**6)).map(lambda pair: (pair[0], sum(pair)))


def schedule(*phases: dict[str, Any], schema: str = "snip.schedule/1") -> str:
    return json.dumps({"schema": schema, "phases": phases})


def plan(*begins: int, last: int, **fields: Any) -> PrecisionPlan:
    maps = [PrecisionMap.uniform([LINEAR], fmt) for fmt in Format]
    return PrecisionPlan(tuple(PlanPhase(b, m) for b, m in zip(begins, maps, strict=False)), last, **fields)


def test_auto_has_four_phases_of_a_half_a_quarter_and_less() -> None:
    assert AUTO.first_steps(0, 1000) == (0, 500, 750, 900)
    assert AUTO.first_steps(200, 300) == (200, 250, 275, 290)


def test_the_contract_of_a_schedule_file() -> None:
    read = Schedule.from_json(schedule({"from": 0.0}, {"from": 0.9, "budget": "fp4=0.7", "change": ["*:fprop"]}))
    assert read.phases == (SchedulePhase(0.0), SchedulePhase(0.9, Budget("fp4", 0.7), ("*:fprop",)))
    assert [phase.budget for phase in read.phases] == [None, Budget("fp4", 0.7)]
    assert Schedule.from_json(read.to_json()) == read


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (schedule({"from": 0.0}, schema="snip.map/1"), 'schema: must be "snip.schedule/1"'),
        (schedule({"from": 0.1}), "phases: the first one must begin at 0"),
        (schedule(*({"from": i / 65} for i in range(65))), "phases: at most 64 are supported, got 65"),
        (schedule({"from": 0}, {"from": 1.0}), "phases[1].from: must be a fraction of the run"),
        (schedule({"from": 0}, {"from": 0.5}, {"from": 0.5}), "phases[2].from: 0.5 must be above 0.5"),
        (schedule({"from": 0, "budget": "loss=0.9"}), "phases[0].budget: loss=0.9: expected fp4=SHARE or"),
        (schedule({"from": 0, "change": "*:fprop"}), "phases[0].change: must be a list of globs"),
    ],
)
def test_a_bad_schedule_is_refused_in_one_line(text: str, message: str) -> None:
    assert refusal(Schedule.from_json, text, where="late.json").startswith(f"late.json: {message}")


@given(SCHEDULES, SPANS, st.integers(0, 2 * 10**6))
def test_what_remains_of_a_schedule_covers_the_rest_of_the_run_once(
    over: Schedule, span: tuple[int, int], step: int
) -> None:
    origin, last = span
    step = max(origin, step)
    spans = over.remaining(origin, last, step)
    assert sum(steps for _, _, steps in spans) == max(0, last - step)
    assert [first for _, first, _ in spans] == [step + sum(n for _, _, n in spans[:k]) for k in range(len(spans))]
    begins = over.first_steps(origin, last)
    assert all(first >= begins[index] for index, first, _ in spans)
    assert [index for index, _, _ in spans] == sorted({index for index, _, _ in spans})


def test_the_map_in_force_is_that_of_the_phase() -> None:
    over = PrecisionPlan((PlanPhase(10, FP4), PlanPhase(90, FP8)), last=100)
    assert over.steps == (80, 10)
    assert [over.at(step) for step in (0, 10, 89, 90, 99, 500)] == [FP4, FP4, FP4, FP8, FP8, FP8]
    assert [step for step in range(100) if over.phases[over.index_at(step)].begin == step] == [10, 90]


def test_phases_move_with_the_end_of_the_run() -> None:
    over = plan(0, 50, 90, last=100, version=3)
    longer = over.moved(0, 1000, 60)
    assert [phase.begin for phase in longer.phases] == [0, 500, 900]
    assert (longer.last, longer.version) == (1000, 3)
    assert longer.at(60) == over.at(0)  # step 60 lies in the first half of the longer run
    shorter = over.moved(0, 80, 60)
    assert [phase.begin for phase in shorter.phases] == [40, 72]  # the first phase would be over
    assert over.moved(0, 100, 0) == over


@given(SCHEDULES, SPANS, st.integers(1, 10**6), st.integers(0, 10**6))
def test_moving_a_plan_gives_the_phases_that_the_schedule_has_there(
    over: Schedule, span: tuple[int, int], length: int, since: int
) -> None:
    origin, last = span
    spans = over.remaining(origin, last, origin)
    assume(len(spans) == len(over.phases) and since < length)
    new, step = origin + length, origin + since
    before = PrecisionPlan(tuple(PlanPhase(first, FP4) for _, first, _ in spans), last)
    moved = before.moved(origin, new, step)
    assert moved.last == new
    expected = over.first_steps(origin, new)
    # A first step is rounded twice: to a step of the old run, which lasts length / (last - origin) new ones.
    off = 1 + length / (last - origin)
    assert all(min(abs(phase.begin - w) for w in expected) <= off for phase in moved.phases)


def test_a_plan_survives_json_with_every_field() -> None:
    over = PrecisionPlan(
        (PlanPhase(0, replace(FP4, version=2, achieved=1.0)), PlanPhase(9, FP8)), 10, 2, "optimal", 0.5, 0.25, 0.9, 0.9
    )
    assert PrecisionPlan.from_json(over.to_json()) == over
    body = json.loads(over.to_json())
    assert body["schema"] == "snip.phases/1"
    assert [(p["from_step"], p["steps"], p["map"]["schema"]) for p in body["phases"]] == [
        (0, 9, "snip.map/1"),
        (9, 1, "snip.map/1"),
    ]
