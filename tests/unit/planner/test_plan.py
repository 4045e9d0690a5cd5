"""Questions and whole plans: budgets met, in the units they are asked in."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from sensitivity.synthetic import make_table

from snip_megatron.planner.plan import build_problem, make_plan, parse_config
from snip_megatron.planner.render import render
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.sensitivity.problem import build_problem as score_problem
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.sensitivity.table import StatisticsTable
from snip_megatron.timing.cost_model import FlopsModel

from .formula import SMALL, layout, step_model, with_blocks

PIPELINE: dict[str, Any] = {"pp": 4, "tp": 2, "global_batch_size": 16}


def request(budget: str, formats: str | None = None, **fields: Any) -> SnipConfig:
    """A configuration by its fields."""
    arguments = fields | {"budget": budget} | ({} if formats is None else {"formats": tuple(formats.split(","))})
    return parse_config(arguments, FlopsModel())


def plan(budget: str, formats: str | None = None, statistics: Path | None = None, **fields: Any) -> dict[str, Any]:
    return make_plan(step_model(layout(**PIPELINE)), request(budget, formats, **fields), statistics)


def test_a_share_of_flops_is_met_on_every_stage() -> None:
    result = plan("fp4=0.6")
    assert 0.6 <= result["budget"]["fp4_share"] < 0.62
    assert sum(result["budget"]["gemms"].values()) == 8 * 4 * 3
    assert result["budget"]["status"] == "optimal"
    assert "--snip-budget fp4=0.6 " in result["budget"]["snip_arguments"]


@pytest.mark.parametrize("granularity", ["gemm", "layer"])
def test_a_speedup_of_the_linears(granularity: str) -> None:
    result = plan("speedup=1.5", "bf16,fp8,fp4", granularity=granularity)
    argument = "" if granularity == "gemm" else " --snip-granularity layer"
    text = render(result)
    assert f"in training: --snip-budget speedup=1.5 --snip-formats bf16,fp8,fp4{argument}\n" in text
    assert "no map is shown, because losses are not known before a run" in text
    assert "GEMMs:" not in text
    assert 1.5 <= result["steps"]["map"]["linears_speedup"] < 1.6
    assert result["steps"]["map"]["speedup"] < 1.5


def test_a_bound_on_losses_that_are_not_known_takes_the_fastest_uniform_map() -> None:
    result = plan("loss=0.01", "bf16,fp8")
    assert result["budget"]["losses"] is None
    assert result["budget"]["gemms"] == {"fp8": 3 * len(layout(**PIPELINE).model.rows)}
    assert result["budget"]["status"] == "static"
    assert any("--statistics uses a run's own" in line for line in result["assumptions"])


def test_a_bound_on_the_loss(tmp_path: Path) -> None:
    path = statistics(tmp_path / "step_100.npz")
    loose, tight = (plan(f"loss={bound}", "bf16,fp8,fp4", statistics=path) for bound in ("0.5", "1e-6"))
    assert loose["budget"]["loss"] <= 0.5
    assert tight["budget"]["loss"] <= 1e-6
    assert loose["steps"]["map"]["seconds"] < tight["steps"]["map"]["seconds"]


@pytest.mark.parametrize(
    ("factor", "line"), [(0.99, "does not fit: the map needs"), (1.05, "little for what is not counted"), (1.2, "fits")]
)
def test_the_memory_of_a_gpu_counts(factor: float, line: str) -> None:
    step, asked = step_model(layout(**PIPELINE)), request("fp4=0.5")
    peak = make_plan(step, asked)["memory"]["peak"]
    result = make_plan(step, asked, gpu_memory=factor * peak)
    assert result["memory"]["fits"] is (factor > 1)
    assert line in render(result)
    assert ("little" in render(result)) == (factor == 1.05)


def statistics(path: Path, formats: tuple[str, ...] = ("fp8", "fp4"), blocks: int = SMALL.blocks) -> Path:
    """A file of random statistics of SMALL, recorded on one pipeline stage."""
    table = make_table(layers=blocks, formats=formats)
    path.write_bytes(dataclasses.replace(table, linears=with_blocks(SMALL, blocks).model().rows).to_bytes())
    return path


def test_statistics_of_a_run_are_asked_on_another_pipeline(tmp_path: Path) -> None:
    path = statistics(tmp_path / "step_100.npz")
    result = plan("loss=0.5", "bf16,fp8,fp4", statistics=path)
    assert result["budget"]["losses"] == str(path)
    assert all(figure in render(result) for figure in ("GEMMs:", "Σ loss"))
    assert "--snip-budget loss=0.5 " in result["budget"]["snip_arguments"]
    assert not any("synthetic" in line for line in result["assumptions"])
    problem = build_problem(request("fp4=0.5"), step_model(layout(**PIPELINE)), path)
    assert {item.stage for item in problem.items} == {0, 1, 2, 3}


def test_statistics_are_scored_by_the_policy_and_the_estimator(tmp_path: Path) -> None:
    path = statistics(tmp_path / "step_100.npz")
    model = step_model(layout(**PIPELINE))

    def losses(**fields: str) -> list[float]:
        problem = build_problem(request("fp4=0.5", **fields), model, path)
        return [choice.loss for item in problem.items for choice in item.choices]

    scored, _ = score_problem(
        StatisticsTable.load(path), SolveRequest(policy="snip", budget=Budget("fp4", 0.5), estimator="noise")
    )
    assert losses(policy="snip", estimator="noise") == [choice.loss for item in scored.items for choice in item.choices]
    assert losses(policy="snip", estimator="fisher") != losses(policy="snip", estimator="noise")
    assert losses(policy="snip") == losses(policy="snip", estimator="fisher")  # the default
    with pytest.raises(SnipError, match=r"^--policy bf16 fixes the map"):
        losses(policy="bf16")


def test_statistics_of_another_model_or_without_the_format(tmp_path: Path) -> None:
    model = step_model(layout(**PIPELINE))
    shorter = statistics(tmp_path / "short.npz", blocks=4)
    with pytest.raises(SnipError, match=r"of another model than small: decoder\.layers\.4\.\S+ is absent"):
        build_problem(request("fp4=0.5"), model, shorter)
    without = statistics(tmp_path / "fp8.npz", ("fp8",))
    with pytest.raises(SnipError, match=r"recorded without fp4 \(it has fp8\)"):
        build_problem(request("fp4=0.5"), model, without)
    with pytest.raises(SnipError, match="cannot be read"):
        build_problem(request("fp4=0.5"), model, tmp_path / "none.npz")
