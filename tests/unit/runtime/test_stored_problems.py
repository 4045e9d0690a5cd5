"""A run's statistics solved again: other budgets, policies, formats and times; what is not stored is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from sensitivity.synthetic import SHAPES, make_table

from snip_megatron.precision import DENSE_LAYER, Format
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.run_directory import RunDirectory
from snip_megatron.runtime.stored_problems import StoredUpdate, find_stored, is_statistics, rebuild
from snip_megatron.sensitivity import SolveRequest, build_problem
from snip_megatron.sensitivity.times import OptionTimes
from snip_megatron.timing.cost_model import LinearShape, load_cost_model
from tests.unit.sensitivity.test_problem import PHASES

STEPS = (10, 30)
MEASURED = ("fp8", "fp8_tensor", "fp4")
LINEAR_SHAPES = {kind: LinearShape(256, *SHAPES[kind], microbatches=2) for kind in DENSE_LAYER}
TIMED = ("bf16", "fp8", "fp8_tensor")
TIMES = OptionTimes.predict(load_cost_model("flops"), LINEAR_SHAPES, [Format(f) for f in TIMED])


def write_run(path: Path, request: SolveRequest, *, facts: dict[str, Any] | None = None) -> Path:
    """Two updates as a run under ``request`` stores them."""
    defaults = {"request": request.as_dict(), "predicted_times": None}
    with RunDirectory(path, {}, overwrite=False, resume_step=None, facts=defaults if facts is None else facts) as run:
        for step in STEPS:
            table = make_table(layers=4, stages=2, formats=MEASURED, seed=step)
            run.write("stats", step, table.to_bytes())
            run.write("problems", step, build_problem(table, request)[0].to_json())
    return path


@pytest.fixture
def share(tmp_path: Path) -> Path:
    return write_run(tmp_path / "share", SolveRequest(budget=Budget("fp4", 0.5), pins=(("decoder.layers.0.*", "fp8"),)))


@pytest.fixture
def timed(tmp_path: Path) -> Path:
    return write_run(tmp_path / "timed", SolveRequest(formats=TIMED, budget=Budget("speedup", 1.5), times=TIMES))


def stored(run: Path, step: int | None = None) -> StoredUpdate:
    result = find_stored(run, step)
    assert result is not None
    return result


def test_a_run_stands_for_its_latest_update_and_a_file_for_its_own(share: Path) -> None:
    assert stored(share) == StoredUpdate(share, 30)
    assert stored(share, 10) == StoredUpdate(share, 10)
    assert find_stored(share / "stats" / "step_10.npz", None) == StoredUpdate(share, 10)
    assert find_stored(share / "problems" / "step_30.json", None) == StoredUpdate(share, 30)
    assert is_statistics(share / "stats" / "step_10.npz")
    assert not is_statistics(share / "problems" / "step_10.json")


def test_without_changes_the_problem_is_the_stored_one(share: Path, timed: Path) -> None:
    for run in (share, timed):
        for step in STEPS:
            assert rebuild(stored(run, step), {}, None) == stored(run, step).problem()


def test_a_run_that_did_not_record_its_request(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", SolveRequest(), facts={})
    with pytest.raises(SnipError, match=r"facts.request: missing"):
        rebuild(stored(old), {"q": "paper"}, None)
    assert stored(old).problem().budget.value == 0.75


def test_an_update_of_phases_is_solved_again_for_one_map(tmp_path: Path) -> None:
    request = SolveRequest(budget=Budget("fp4", 0.5))
    path = tmp_path / "planned"
    with RunDirectory(path, {}, overwrite=False, resume_step=None, facts={"request": request.as_dict()}) as run:
        table = make_table(layers=4, stages=2, formats=("fp8", "fp4"), seed=30)
        problem, _ = build_problem(table, dataclasses.replace(request, phases=PHASES))
        run.write("stats", 30, table.to_bytes())
        run.write("problems", 30, problem.to_json())
    update = stored(path)
    assert update.problem() == problem
    assert rebuild(update, {}, None) == build_problem(table, request)[0]
    other = rebuild(update, {"policy": "fisher"}, Budget("fp4", 0.7))
    assert (other.phases, other.budget) == ((), Budget("fp4", 0.7))
