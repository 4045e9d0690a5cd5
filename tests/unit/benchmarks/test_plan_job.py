"""Predictions beside the committed trainings of a 1.1 B model."""

import json

import pytest

from benchmarks.jobs.plan_job import JOBS, first_map, layout_of, rows_of
from snip_megatron.timing.cost_model import load_cost_model


@pytest.mark.parametrize(
    "name",
    ["job_1b_h200_2026-11-22.json", "job_1b_h200_2026-11-23.json", "job_8b-blocks_h200_2026-11-23.json",
     "job_8b-blocks-4k-tp2_2xh200_2026-11-25.json", "job_8b-blocks-4k-dp2_2xh200_2026-11-22.json",
     "job_8b-blocks-4k-pp2_2xh200_2026-11-22.json"],
)  # fmt: skip
def test_promised_speedups_of_steps_with_graphs_are_kept_within_5_percent(name: str) -> None:
    job = json.loads((JOBS / name).read_text(encoding="utf-8"))
    rows = [row for row in rows_of(job, load_cost_model("h200")) if row["graphs"] != "none"]
    assert rows
    assert max(abs(row["speedup"]["error"]) for row in rows) < 0.05


@pytest.mark.parametrize(("name", "tp", "pp", "dp"), [("tp2", 2, 1, 1), ("pp2", 1, 2, 1), ("dp2", 1, 1, 2)])
def test_layouts_of_two_gpus_are_predicted(name: str, tp: int, pp: int, dp: int) -> None:
    job = json.loads((JOBS / f"job_8b-blocks-4k-{name}_2xh200_2026-11-22.json").read_text(encoding="utf-8"))
    layout = layout_of(job)
    assert (layout.tp, layout.pp, layout.dp, layout.sequence_parallel) == (tp, pp, dp, tp > 1)
    rows = {row["contender"]: row for row in rows_of(job, load_cost_model("h200"))}
    assert abs(rows["snip_fp4_75_graphs"]["ms"]["error"]) < 0.07
    if name == "tp2":
        assert rows["snip_fp4_75"]["speedup"]["measured"] == job["ms"]["bf16"] / job["ms"]["snip_fp4_75"]


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_the_plan_predicts_a_mixture_whose_steps_in_bf16_wait_for_their_host(card: str) -> None:
    job = json.loads((JOBS / f"job_qwen3-moe_{card}_2026-11-26.json").read_text(encoding="utf-8"))
    row = first_map(job, load_cost_model(card))
    assert row["bf16"] > 1.6 * row["planned_bf16"]
    assert abs(row["planned_error"]) < 0.07
