"""Data from outside, damaged: every parser answers with a value or a SnipError in one line."""

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import LONG, answers, damage_bytes, few_rows, hostile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sensitivity.synthetic import make_table

from benchmarks.quality.experiment import load_experiment
from snip_megatron.megatron.prepare_data import read_manifest
from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.phases import PlanPhase, PrecisionPlan, Schedule, SchedulePhase
from snip_megatron.runtime.exchange import StepFigures
from snip_megatron.runtime.guard import Alarm, GuardState
from snip_megatron.runtime.run_data import (
    load_run,
    read_config,
    read_events,
    read_maps,
    read_metrics,
    read_scores,
    replayed_maps,
)
from snip_megatron.runtime.run_directory import RunDirectory
from snip_megatron.runtime.state import BudgetSpent, ControllerState, Pending
from snip_megatron.runtime.stored_problems import find_stored
from snip_megatron.sensitivity.problem import build_problem
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.sensitivity.table import StatisticsTable
from snip_megatron.solver.problem import Problem
from snip_megatron.timing.cost_model import load_cost_model

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])


# -- what is parsed ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Parser:
    """``parse`` takes bytes, or the path of a file that holds them where ``file`` names it."""

    valid: Callable[[], bytes]
    parse: Callable[[Any], object]
    file: str | None = None


TABLE = make_table(layers=1)
REQUEST = SolveRequest(policy="snip", version=1, budget=Budget("fp4", 0.75), stage_tolerance=0.02)
MAP = PrecisionMap.uniform([row.name for row in TABLE.linears], Format.FP4, version=2, status="optimal")


SCHEDULE = Schedule((SchedulePhase(0.0), SchedulePhase(0.9, Budget("fp4", 0.7), ("*:fprop",))))
PLAN = PrecisionPlan((PlanPhase(0, MAP), PlanPhase(9, MAP)), 10, 2, "optimal", 0.5, 0.25, 0.9, 0.9)


def state() -> bytes:
    return ControllerState(
        precision_map=MAP, version=2, pending=Pending(7, 9, 2, TABLE), grad_norm=0.5, plan=PLAN,
        sequences=2, postponed=9, guard=GuardState((3.0,), bar=1.0, good=MAP), alarm=Alarm(7, "spike", 9.0, 4.0),
        in_flight=StepFigures(6, 3.0, 0.5),
        spent=BudgetSpent(0, steps=7, shares=3.5, times=6.0, last=20),
    ).to_bytes()  # fmt: skip


PARSERS = {
    "problem": Parser(lambda: build_problem(TABLE, REQUEST)[0].to_json().encode(), Problem.from_json),
    "map": Parser(lambda: MAP.to_json().encode(), lambda b: PrecisionMap.from_json(b.decode("utf-8", "replace"))),
    "schedule": Parser(lambda: SCHEDULE.to_json().encode(), Schedule.from_json),
    "plan": Parser(lambda: PLAN.to_json().encode(), PrecisionPlan.from_json),
    "state": Parser(state, ControllerState.from_bytes),
    "statistics": Parser(TABLE.to_bytes, lambda b: StatisticsTable.from_bytes(b, where="statistics")),
    "request": Parser(
        lambda: json.dumps(REQUEST.as_dict()).encode(), lambda b: SolveRequest.from_dict(json_of(b), "request")
    ),
    "timings": Parser(
        lambda: (REPOSITORY / "snip_megatron/timing/tables/h200.json").read_bytes(),
        lambda path: load_cost_model(path),
        file="timings.json",
    ),
    "experiment": Parser(
        lambda: (REPOSITORY / "benchmarks/quality/experiments/nano.json").read_bytes(),
        load_experiment,
        file="experiment.json",
    ),
    "data manifest": Parser(
        lambda: b'{"schema": "snip.data/1", "request": {}, "files": {}}',
        lambda path: read_manifest(path.parent),
        file="manifest.json",
    ),
}


def json_of(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


@pytest.mark.parametrize("name", PARSERS)
@EXAMPLES
@given(data=st.data())
def test_damaged_data_is_an_error_in_one_line(name: str, tmp_path: Path, data: st.DataObject) -> None:
    parser = PARSERS[name]
    source: Any = damage_bytes(data, parser.valid())
    if parser.file is not None:
        (tmp_path / parser.file).write_bytes(source)
        source = tmp_path / parser.file
    with answers():
        parser.parse(source)


# -- every place of a file in turn ---------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [name for name in PARSERS if name != "statistics"])
def test_at_every_place_a_hostile_value_is_read_or_refused_in_a_short_line(name: str, tmp_path: Path) -> None:
    parser = PARSERS[name]
    whole = json.loads(parser.valid())
    for body in (whole, *hostile(few_rows(whole))):
        source: Any = json.dumps(body).encode()
        if parser.file is not None:
            source = tmp_path / parser.file
            source.write_bytes(json.dumps(body).encode())
        message = refusal(parser, source)
        assert not message or body is not whole or name == "data manifest"  # whose files are not there
        assert LONG[:81] not in message
        assert "0" * 81 not in message


def refusal(parser: Parser, source: Any) -> str:
    """The error line; empty where ``source`` is read."""
    try:
        parser.parse(source)
    except SnipError as error:
        return str(error)
    return ""


# -- run directories ---------------------------------------------------------------------------------------------
RUN_FILES = (
    "config.json",
    "events.jsonl",
    "metrics.jsonl",
    "maps/step_9.json",
    "scores/step_7.json",
    "stats/step_7.npz",
)


def recorded(path: Path) -> Path:
    facts = {"request": REQUEST.as_dict()}
    with RunDirectory(path, {"policy": "snip"}, overwrite=True, resume_step=None, facts=facts) as run:
        for step in range(12):
            run.metric(step, loss=1.0, grad_norm=1.0, fp4_fraction=0.5)
        run.event(7, "submit", version=2, table_bytes=10)
        run.event(8, "solved", version=2, status="optimal", achieved_per_stage={"0": 0.7})
        run.event(9, "adopt", version=2, achieved_per_stage={"0": 0.7}, changed=4)
        run.write("maps", 9, MAP.to_json())
        run.write("problems", 7, build_problem(TABLE, REQUEST)[0].to_json())
        run.write_scores(7, {"decoder.layers.0.mlp.linear_fc1:fprop": {"fp4": {"q": 1.0}}}, version=2)
        run.write("stats", 7, TABLE.to_bytes())
    return path


def read_everything(run: Path) -> None:
    for read in (read_config, read_events, read_metrics, read_maps, read_scores, load_run):
        attempt(lambda read=read: read(run))
    attempt(lambda: replayed_maps.__wrapped__(str(run)))
    for part in ("problem", "table", "request"):
        attempt(lambda part=part: getattr(find_stored(run, None), part)())


def attempt(action: Callable[[], object]) -> None:
    with contextlib.suppress(SnipError):
        action()


FIRST_RECORDS: dict[str, bytes] = {}


@pytest.mark.parametrize("name", RUN_FILES)
@EXAMPLES
@given(data=st.data())
def test_a_damaged_run_directory_is_read_or_refused(name: str, tmp_path: Path, data: st.DataObject) -> None:
    run = recorded(tmp_path / "run")
    content = FIRST_RECORDS.setdefault(name, (run / name).read_bytes())  # times differ: draws must not
    (run / name).write_bytes(damage_bytes(data, content))
    with answers():
        read_everything(run)


@pytest.mark.parametrize("name", [name for name in RUN_FILES if "json" in name])
def test_at_every_place_of_a_run_directory_a_hostile_value_is_read_or_refused(name: str, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    lines = (run / name).read_text().splitlines() if name.endswith(".jsonl") else [(run / name).read_text()]
    for place, line in enumerate(lines[:6]):
        for body in hostile(json.loads(line)):
            (run / name).write_text("\n".join([*lines[:place], json.dumps(body), *lines[place + 1 :]]))
            read_everything(run)


class Unpickled:
    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return pytest.fail, ("unpickled",)  # type: ignore[return-value]


def test_statistics_are_not_unpickled() -> None:
    content = io.BytesIO()
    np.savez(content, linears=np.array([Unpickled()], dtype=object))
    with pytest.raises(SnipError):
        StatisticsTable.from_bytes(content.getvalue(), where="table")
