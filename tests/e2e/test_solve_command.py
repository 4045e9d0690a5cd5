"""``snip solve`` as a user runs it: map, exit codes, one line for every mistake."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snip_command import refused, snip

from snip_megatron.precision import PrecisionMap
from snip_megatron.precision.phases import PrecisionPlan


def problem(seed: int = 0, target: float = 0.75, tolerance: float | None = 0.02, **changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    names = [f"decoder.layers.{i}.mlp.linear_fc{k}:{g}" for i in range(8) for k in (1, 2) for g in ("fprop", "dgrad")]
    items = [
        {
            "id": name,
            "stage": i // 16,
            "cost": 1e12,
            "choices": [
                {"format": "fp8", "loss": 0.0, "saving": 0.0},
                {"format": "fp4", "loss": float(rng.lognormal()), "saving": 1e12},
            ],
        }
        for i, name in enumerate(names)
    ]
    budget = {"target": target, "stage_tolerance": tolerance}
    return {"schema": "snip.problem/1", "budget": budget, "items": items} | changes


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(problem()))
    return path


@pytest.mark.parametrize("solver", ["cpsat", "greedy"])
def test_a_map_on_standard_output(written: Path, solver: str) -> None:
    done = snip("solve", written, "--solver", solver)
    assert (done.returncode, done.stderr) == (0, "")
    body = json.loads(done.stdout)
    assert list(body) == [
        "schema", "version", "choices", "status", "objective", "bound", "target", "achieved", "achieved_per_stage",
        "solve_seconds",
    ]  # fmt: skip
    raw = json.loads(written.read_text())
    assert list(body["choices"]) == [item["id"] for item in raw["items"]]
    assert body["achieved"] == sum(f == "fp4" for f in body["choices"].values()) / 32 >= 0.75
    assert set(body["achieved_per_stage"]) == {"0", "1"}
    assert min(body["achieved_per_stage"].values()) >= 0.73
    assert body["bound"] <= body["objective"]
    if solver == "cpsat":
        assert body["status"] == "optimal"
        # Equal costs: at least 0.73 · 16 on a stage and 24 in all leave exactly the 12 smallest losses of each.
        losses = np.array([item["choices"][1]["loss"] for item in raw["items"]]).reshape(2, 16)
        assert body["objective"] == pytest.approx(np.sort(losses, axis=1)[:, :12].sum(), rel=1e-14)
    loaded = PrecisionMap.from_json(done.stdout)
    assert len(loaded.choices) == 32


def test_out_writes_the_whole_file_and_nothing_else(written: Path, tmp_path: Path) -> None:
    out = tmp_path / "map.json"
    out.write_text("old")
    done = snip("solve", written, "--out", out, "--time-limit", 30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert PrecisionMap.from_json(out.read_text()).status == "optimal"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["map.json", "problem.json"]


def test_infeasible_names_stage_and_reach(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    raw = problem()
    for item in raw["items"][20:]:
        item["choices"] = item["choices"][:1]
    path.write_text(json.dumps(raw))
    out = tmp_path / "map.json"
    line = refused("solve", path, "--out", out, code=3)
    assert "stage 1" in line
    assert line.endswith("the highest reachable target is 0.27")
    assert not out.exists()
    for target, code in ((0.27, 0), (0.270001, 3)):
        raw["budget"]["target"] = target
        path.write_text(json.dumps(raw))
        assert snip("solve", path).returncode == code
    raw["budget"] = {"target": 0.75, "stage_tolerance": None}
    path.write_text(json.dumps(raw))
    line = refused("solve", path, code=3)
    assert "stage 1" in line
    assert line.endswith("the highest reachable target is 0.625")


def test_mistakes_on_the_command_line(written: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(problem(target=1.7)))
    for arguments, words in [
        (["solve", bad], f"{bad}: budget.target"),
        (["solve", written, "--budget", "fp8=0.5"], "--budget fp8=0.5: "),
        (["solve", tmp_path / "none.json"], "cannot be read"),
        (["solve", tmp_path], "not a run directory"),
        (["solve", written, "--time-limit", "0"], "--time-limit"),
        (["solve", written, "--solver", "magic"], "magic"),
        (["solve", written, "--out", tmp_path / "none" / "map.json"], "there is no folder"),
        (["solve", written, "--out", tmp_path], "is a folder; name a file"),
        (["solve"], "PROBLEM.json"),
        (["sovle"], "sovle"),
    ]:
        assert words in refused(*arguments)
    assert "COMMAND" in snip().stderr


def phased(target: float = 0.75, **changes: Any) -> dict[str, Any]:
    """The same problem over two phases of a run; an error in the last one costs three times as much."""
    body = problem(target=target)
    for item in body["items"]:
        item["choices"] = [
            {"format": c["format"], "saving": c["saving"], "losses": [c["loss"], 3 * c["loss"]]}
            for c in item["choices"]
        ]
    return body | {"schema": "snip.problem/2", "phases": [{"steps": 300}, {"steps": 100}]} | changes


def test_phases_give_a_plan(tmp_path: Path) -> None:
    path, out = tmp_path / "problem.json", tmp_path / "plan.json"
    path.write_text(json.dumps(phased()))
    done = snip("solve", path, "--out", out)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    plan = PrecisionPlan.from_json(out.read_text())
    assert [(phase.begin, steps) for phase, steps in zip(plan.phases, plan.steps, strict=True)] == [
        (0, 300),
        (300, 100),
    ]
    assert plan.status == "optimal"
    shares = [phase.precision_map.achieved for phase in plan.phases]
    assert shares[0] > shares[1]
    assert plan.achieved == pytest.approx((300 * shares[0] + 100 * shares[1]) / 400)
    assert plan.achieved >= 0.75 * (1 - 1e-9)


def test_phases_out_of_reach_and_misused(tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(phased(target=0.9, spent={"steps": 1200, "achieved": 0.25})))
    line = refused("solve", path, code=3)
    assert "the highest reachable target over the whole run is 0.4375 after 1200 steps at 0.25" in line
    path.write_text(json.dumps(phased(phases=[{"steps": 0}])))
    assert "phases[0].steps: must be a number of steps from 1" in refused("solve", path)
