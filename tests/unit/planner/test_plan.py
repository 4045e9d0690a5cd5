"""Questions and whole plans: budgets met, in the units they are asked in."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from sensitivity.synthetic import make_table

from snip_megatron.planner.plan import PlanRequest, build_problem, make_plan, parse_request
from snip_megatron.planner.render import render
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError
from snip_megatron.sensitivity.problem import build_problem as score_problem
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.sensitivity.table import StatisticsTable
from snip_megatron.solver import solve
from snip_megatron.timing.cost_model import CostModel, FlopsModel

from .formula import SMALL, layout, step_model, with_blocks

PIPELINE: dict[str, Any] = {"pp": 4, "tp": 2, "global_batch_size": 16}


def request(budget: str, formats: str | None = None, *, model: CostModel | None = None, **fields: Any) -> PlanRequest:
    """A request by fields of the configuration and by arguments of ``parse_request``."""
    own = {name: fields.pop(name) for name in ("statistics", "train_iters") if name in fields}
    given = fields | {"budget": budget} | ({} if formats is None else {"formats": tuple(formats.split(","))})
    return parse_request(given, model or FlopsModel(), **own)


def plan(budget: str, formats: str | None = None, **fields: Any) -> dict[str, Any]:
    return make_plan(step_model(layout(**PIPELINE)), request(budget, formats, **fields))


def test_a_share_of_flops_is_met_on_every_stage() -> None:
    found = plan("fp4=0.6")
    assert 0.6 <= found["budget"]["fp4_share"] < 0.62
    assert sum(found["budget"]["gemms"].values()) == 8 * 4 * 3
    assert found["budget"]["status"] == "optimal"
    assert "--snip-budget fp4=0.6 " in found["budget"]["snip_arguments"]


@pytest.mark.parametrize("granularity", ["gemm", "layer"])
def test_a_speedup_of_the_linears(granularity: str) -> None:
    found = plan("speedup=1.5", "bf16,fp8,fp4", granularity=granularity)
    argument = "" if granularity == "gemm" else " --snip-granularity layer"
    assert f"in training: --snip-budget speedup=1.5 --snip-formats bf16,fp8,fp4{argument}\n" in render(found)
    assert 1.5 <= found["steps"]["map"]["linears_speedup"] < 1.6
    assert found["steps"]["map"]["speedup"] < 1.5


def test_the_speedup_of_linears_in_a_plan_is_that_of_its_budget() -> None:
    """Of one map, and as an average over phases."""
    step = step_model(layout(**PIPELINE, sequence_parallel=True))
    asked = request("speedup=1.4", "bf16,fp8", schedule="auto", train_iters=400)
    promised = solve(build_problem(asked, step)).speedup
    found = make_plan(step, asked)
    assert found["steps"]["map"]["linears_speedup"] == pytest.approx(promised, rel=1e-9)
    assert found["phases"]["average_linears_speedup"] == pytest.approx(found["phases"]["achieved"], rel=1e-9)
    assert found["phases"]["achieved"] >= 1.4 * (1 - 1e-9)


def test_a_bound_on_losses_that_are_not_known_takes_the_fastest_uniform_map() -> None:
    found = plan("loss=0.01", "bf16,fp8")
    assert found["budget"]["losses"] is None
    assert found["budget"]["gemms"] == {"fp8": 3 * len(layout(**PIPELINE).model.rows)}
    assert (found["budget"]["status"], found["phases"]) == ("static", None)
    assert any("--statistics uses a run's own" in line for line in found["assumptions"])


def test_a_bound_on_the_loss(tmp_path: Path) -> None:
    path = statistics(tmp_path / "step_100.npz")
    loose, tight = (plan(f"loss={bound}", "bf16,fp8,fp4", statistics=path) for bound in ("0.5", "1e-6"))
    assert loose["budget"]["loss"] <= 0.5
    assert tight["budget"]["loss"] <= 1e-6
    assert loose["steps"]["map"]["seconds"] < tight["steps"]["map"]["seconds"]


def test_a_bound_on_a_loss_needs_a_policy_whose_scores_are_losses() -> None:
    assert request("loss=0.1", policy="fisher").config.budget.kind == "loss"
    with pytest.raises(
        SnipError, match=r"^--budget loss=0.1 bounds a loss, and the scores of --policy random with --q split are"
    ):
        request("loss=0.1", policy="random")


# -- statistics of a run -------------------------------------------------------------------------------------------
def statistics(path: Path, formats: tuple[str, ...] = ("fp8", "fp4"), blocks: int = SMALL.blocks) -> Path:
    """A file of random statistics of SMALL, recorded on one pipeline stage."""
    table = make_table(layers=blocks, formats=formats)
    path.write_bytes(dataclasses.replace(table, linears=with_blocks(SMALL, blocks).model().rows).to_bytes())
    return path


def test_statistics_of_a_run_are_asked_on_another_pipeline(tmp_path: Path) -> None:
    path = statistics(tmp_path / "step_100.npz")
    found = plan("loss=0.5", "bf16,fp8,fp4", statistics=path)
    assert found["budget"]["losses"] == str(path)
    assert "--snip-budget loss=0.5 " in found["budget"]["snip_arguments"]
    assert not any("synthetic" in line for line in found["assumptions"])
    problem = build_problem(request("fp4=0.5", statistics=path), step_model(layout(**PIPELINE)))
    assert {item.stage for item in problem.items} == {0, 1, 2, 3}


def test_statistics_are_scored_by_the_policy_and_the_estimator(tmp_path: Path) -> None:
    path = statistics(tmp_path / "step_100.npz")
    model = step_model(layout(**PIPELINE))

    def losses(**fields: str) -> list[float]:
        problem = build_problem(request("fp4=0.5", statistics=path, **fields), model)
        return [choice.loss for item in problem.items for choice in item.choices]

    own, _ = score_problem(
        StatisticsTable.load(path), SolveRequest(policy="snip", budget=Budget("fp4", 0.5), estimator="noise")
    )
    assert losses(policy="snip", estimator="noise") == [choice.loss for item in own.items for choice in item.choices]
    assert losses(policy="snip", estimator="fisher") != losses(policy="snip", estimator="noise")
    assert losses(policy="snip") == losses(policy="snip", estimator="fisher")  # the default
    with pytest.raises(SnipError, match=r"^--policy bf16 fixes the map"):
        losses(policy="bf16")


def test_statistics_of_another_model_or_without_the_format(tmp_path: Path) -> None:
    model = step_model(layout(**PIPELINE))
    shorter = statistics(tmp_path / "short.npz", blocks=4)
    with pytest.raises(SnipError, match=r"of another model than small: decoder\.layers\.4\.\S+ is absent"):
        build_problem(request("fp4=0.5", statistics=shorter), model)
    without = statistics(tmp_path / "fp8.npz", ("fp8",))
    with pytest.raises(SnipError, match=r"recorded without fp4 \(it has fp8\)"):
        build_problem(request("fp4=0.5", statistics=without), model)
    with pytest.raises(SnipError, match="cannot be read"):
        build_problem(dataclasses.replace(request("fp4=0.5"), statistics=tmp_path / "none.npz"), model)


def phased(budget: str, steps: int, formats: str | None = None, **fields: Any) -> dict[str, Any]:
    return plan(budget, formats, **{"schedule": "auto", "train_iters": steps} | fields)


def test_phases_meet_the_share_on_average_and_harm_less_than_one_map() -> None:
    body = phased("fp4=0.8", 1000)
    found = body["phases"]
    assert [(phase["from_step"], phase["steps"]) for phase in found["phases"]] == [
        (0, 500),
        (500, 250),
        (750, 150),
        (900, 100),
    ]
    average = math.fsum(phase["steps"] * phase["fp4_share"] for phase in found["phases"]) / 1000
    assert 0.8 * (1 - 1e-9) <= average < 0.81
    assert found["average_fp4_share"] == pytest.approx(average)
    assert found["loss"] < found["static_loss"]
    assert found["phases"][-1]["fp4_share"] < 0.8  # the standing loss of the last phase is what is deployed
    in_bf16 = phased("fp4=0.8", 1000, deploy="bf16")["phases"]
    # Little of the standing loss is left in bf16, and more of the choice depends on what steps leave in the weights.
    *before, end = (phase["fp4_share"] for phase in in_bf16["phases"])
    assert found["phases"][-1]["fp4_share"] <= end < max(before)
    assert in_bf16["loss"] < found["loss"]
    text = render(body)
    assert "phases of --schedule auto over 1000 steps, deployed in the formats of the last phase" in text
    assert "in training: --snip-schedule auto --train-iters 1000" in text


def test_one_phase_is_one_map_and_what_may_not_change_does_not() -> None:
    one = '{"schema": "snip.schedule/1", "phases": [{"from": 0}]}'
    whole = phased("fp4=0.6", 100, schedule=one)
    assert whole["phases"]["loss"] == pytest.approx(whole["phases"]["static_loss"])
    assert whole["phases"]["phases"][0]["gemms"] == whole["budget"]["gemms"]
    globs = '{"schema": "snip.schedule/1", "phases": [{"from": 0}, {"from": 0.5, "change": ["*.0.*:fprop"]}]}'
    found = phased("fp4=0.6", 100, schedule=globs)
    first, last = found["phases"]["phases"]
    assert abs(first["gemms"]["fp4"] - last["gemms"]["fp4"]) <= 4  # the fprops of one block


def test_phases_out_of_reach() -> None:
    floor = '{"schema": "snip.schedule/1", "phases": [{"from": 0}, {"from": 0.9, "budget": "speedup=3.9"}]}'
    with pytest.raises(
        SnipError, match=r"over --schedule {.*: infeasible: phase 1 reaches at most 2 .*; lower the budget"
    ):
        phased("speedup=1.1", 100, "bf16,fp8", schedule=floor)
    with pytest.raises(SnipError, match="--granularity layer cannot be combined with --schedule"):
        phased("fp4=0.5", 100, granularity="layer")
