"""The front of a run's latest Problem: solved when the page is written, bounded, the run's own map on it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic_run

from snip_megatron.precision import Format
from snip_megatron.precision.budget import Budget
from snip_megatron.reporting.figures import front_figure
from snip_megatron.reporting.front import latest_front
from snip_megatron.reporting.report import write_report
from snip_megatron.runtime.records.run_data import Update, load_run
from snip_megatron.runtime.records.run_directory import RunDirectory
from snip_megatron.solver import Problem, solve

LAST = synthetic_run.FIRST + (synthetic_run.UPDATES - 1) * synthetic_run.INTERVAL


def problem() -> Problem:
    return synthetic_run.problem_of(synthetic_run.scores_of(np.random.default_rng(0)))


def in_seconds(base: Problem, budget: Budget) -> Problem:
    """The same items with 4 bits saving half of the time."""
    items = tuple(
        replace(i, choices=tuple(replace(c, saving=c.saving / 2) for c in i.choices), cost=i.cost) for i in base.items
    )
    return Problem(budget, items)


def store(path: Path, *stored: Problem | str) -> Path:
    with RunDirectory(path, {}, overwrite=False, resume_step=None) as run:
        for step, one in enumerate(stored):
            run.write("problems", step, one if isinstance(one, str) else one.to_json())
    return path


def test_the_run_s_own_map_lies_on_the_front_of_its_latest_update(whole_run: Path) -> None:
    run = load_run(whole_run)
    unreadable: list[str] = []
    front = latest_front(whole_run, run.updates, unreadable)
    assert unreadable == []
    assert (front.step, front.share, front.asked) == (LAST, True, Budget("fp4", 0.75))
    assert len(front.points) == 17
    assert all(p.proven for p in front.points)
    reached, losses = [p.x for p in front.points], [p.loss for p in front.points]
    assert reached == sorted(reached)
    assert losses == sorted(losses)
    assert (reached[0], reached[-1]) == (0.0, 1.0)
    assert front.points[-1].shares == {Format.FP4: 1.0}
    assert front.chosen is not None
    own = next(p for p in front.points if p.x == pytest.approx(0.75))
    assert front.chosen == pytest.approx((own.x, own.loss))
    figure = front_figure(front)
    assert [trace["name"] for trace in figure["data"]] == ["least loss of any map", "asked", "the run's map"]
    assert figure["layout"]["shapes"][0]["x0"] == 0.75


@pytest.mark.parametrize("budget", [Budget("speedup", 1.3), Budget("loss", 0.05)])
def test_time_and_loss_budgets_share_an_axis_of_speedup(tmp_path: Path, budget: Budget) -> None:
    asked = in_seconds(problem(), budget)
    run = store(tmp_path / "run", problem(), asked)
    own = solve(asked)
    updates = [
        Update(0, version=1, objective=1.0, achieved=0.5),
        Update(1, version=2, speedup=own.speedup, loss=own.loss),
    ]
    front = latest_front(run, updates, [], points=5)
    assert (front.step, front.share, front.asked) == (1, False, budget)
    assert front.points[0].x == 1.0
    assert front.points[-1].x == pytest.approx(2.0)
    assert front.chosen == (own.speedup, own.loss)
    # No point of the front is both faster and better than the run's own.
    assert all(p.x <= own.speedup * (1 + 1e-4) or p.loss >= own.loss * (1 - 1e-4) for p in front.points)
    figure = front_figure(front)
    line = figure["layout"]["shapes"][0]
    assert (line["y0"] if budget.kind == "loss" else line["x0"]) == budget.value


def test_without_a_problem_there_is_no_front(tmp_path: Path) -> None:
    assert latest_front(store(tmp_path / "none"), [], []) is None


def test_what_cannot_be_drawn_is_named_and_the_page_is_written(tmp_path: Path) -> None:
    run = store(tmp_path / "run", problem(), '{"schema": "snip.prob')
    unreadable: list[str] = []
    assert latest_front(run, [], unreadable) is None
    assert len(unreadable) == 1
    assert "step_1.json: not JSON" in unreadable[0]
    page = write_report(run).read_text()
    assert "step_1.json: not JSON" in page
    assert 'id="front"' not in page
