"""``snip solve`` as a user runs it, on a problem file and on a run: map, exit codes, one line for every mistake."""

import json
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snip_command import refused, snip

from snip_megatron.precision import DENSE_LAYER, Format, PrecisionMap
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.phases import PrecisionPlan
from snip_megatron.runtime.run_directory import RunDirectory
from snip_megatron.sensitivity import SolveRequest, build_problem
from snip_megatron.sensitivity.times import OptionTimes
from snip_megatron.timing.cost_model import LinearShape, load_cost_model
from tests.unit.sensitivity.synthetic import make_table


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
    process = snip("solve", written, "--solver", solver)
    assert process.returncode == 0
    assert ": share in four bits 0.75" in process.stderr.splitlines()[0]
    assert process.stderr.splitlines()[1] == "24 in fp4, 8 in fp8"
    body = json.loads(process.stdout)
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
    loaded = PrecisionMap.from_json(process.stdout)
    assert len(loaded.choices) == 32


def test_infeasible_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    path, out = tmp_path / "p.json", tmp_path / "map.json"
    raw = problem()
    for item in raw["items"][20:]:
        item["choices"] = item["choices"][:1]
    path.write_text(json.dumps(raw))
    line = refused("solve", path, "--out", out, code=3)
    assert "stage 1" in line
    assert line.endswith("the highest reachable target is 0.27")
    assert not out.exists()


def test_mistakes_on_the_command_line(written: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(problem(target=1.7)))
    for arguments, words in [
        (["solve", bad], f"{bad}: budget.target"),
        (["solve", written, "--budget", "fp8=0.5"], "--budget fp8=0.5: "),
        (["solve", tmp_path / "none.json"], "cannot be read"),
        (["solve", written, "--time-limit", "0"], "--time-limit"),
        (["solve", written, "--out", tmp_path / "none" / "map.json"], "there is no folder"),
        (["solve"], "PROBLEM.json"),
        (["sovle"], "; did you mean solve? (see snip --help)"),
        (["solve", written, "--bugdet", "fp4=0.5"], "; did you mean --budget? (see snip solve --help)"),
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
    process = snip("solve", path, "--out", out)
    assert (process.returncode, process.stderr) == (0, "")
    assert [line.partition(":")[0] for line in process.stdout.splitlines()[1:]] == [
        "phase 0, 300 steps",
        "phase 1, 100 steps",
    ]
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


LAYERS = 4
SHAPES = {
    kind: LinearShape(8192, n, k)
    for kind, (n, k) in zip(DENSE_LAYER, ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), strict=True)
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One update at step 10 of a run that asked for half of the FLOPs in fp4."""
    table = make_table(LAYERS, 2, seed=3)
    rows = (replace(row, n=SHAPES[row.id.path].n, k=SHAPES[row.id.path].k) for row in table.linears)
    table = replace(table, step=10, tokens_per_step=8192, linears=tuple(rows))
    request = SolveRequest(budget=Budget("fp4", 0.5), estimator="noise")
    path = tmp_path_factory.mktemp("runs") / "run"
    facts = {"request": request.as_dict(), "predicted_times": None}
    with RunDirectory(path, {}, overwrite=False, resume_step=None, facts=facts) as run:
        run.write("stats", 10, table.to_bytes())
        run.write("problems", 10, build_problem(table, request)[0].to_json())
    return path


def solved(process: subprocess.CompletedProcess[str]) -> dict:
    assert process.returncode == 0, process.stderr
    body: dict = json.loads(process.stdout)
    assert len(body["choices"]) == 12 * LAYERS
    return body


def test_another_budget_of_a_run(recorded: Path) -> None:
    stored_budget = solved(snip("solve", recorded))
    more = solved(snip("solve", recorded, "--budget", "fp4=0.8"))
    assert 0.5 <= stored_budget["achieved"] < 0.8 <= more["achieved"]
    assert stored_budget["objective"] < more["objective"]
    stored = solved(snip("solve", recorded / "problems" / "step_10.json", "--budget", "fp4=0.8"))
    assert stored["choices"] == more["choices"]


def test_a_speedup_from_a_run_that_asked_for_a_share(recorded: Path, tmp_path: Path) -> None:
    assert "no times are stored" in refused("solve", recorded, "--budget", "speedup=1.2")
    run = tmp_path / "known"
    shutil.copytree(recorded, run)
    body = json.loads((run / "config.json").read_text())
    formats = [Format.FP8, Format.FP4]
    body["facts"]["predicted_times"] = OptionTimes.predict(load_cost_model("h200"), SHAPES, formats).as_dict()
    (run / "config.json").write_text(json.dumps(body))
    fast = solved(snip("solve", run, "--budget", "speedup=1.2", "--formats", "bf16,fp8"))
    assert fast["speedup"] >= 1.2 * (1 - 1e-8)
    assert fast["fp4_share"] == 0.0
    assert fast["budget"] == "speedup"
    assert set(fast["choices"].values()) == {"bf16", "fp8"}

    body["facts"] |= {"predicted_times": None, "linear_shapes": {kind: asdict(s) for kind, s in SHAPES.items()}}
    (run / "config.json").write_text(json.dumps(body))
    command = ("solve", run, "--budget", "speedup=1.2", "--formats", "bf16,fp8", "--timings")
    assert solved(snip(*command, "h200"))["choices"] == fast["choices"]
    assert solved(snip(*command, "flops"))["choices"] != fast["choices"]
    assert "has no effect with --budget fp4=0.5" in refused("solve", run, "--timings", "h200")
    assert "lies in no run directory" in refused("solve", run / "config.json", "--timings", "h200")


def test_mistakes_with_a_run(recorded: Path, tmp_path: Path) -> None:
    for arguments, words in [
        ([recorded, "--step", "11"], "has an update at 10"),
        ([recorded, "--policy", "bf16"], "nothing to solve"),
        ([recorded, "--formats", "fp8,nvfp4"], "hold no nvfp4"),
        ([recorded, "--pin", "*.linear_fc9=fp8"], "--pin *.linear_fc9=fp8: matches no option"),
        ([recorded, "--policy", "best"], "--policy best: unknown"),
        ([tmp_path], "not a run directory"),
    ]:
        assert words in refused("solve", *arguments)
    alone = tmp_path / "step_10.npz"
    alone.write_bytes((recorded / "stats" / "step_10.npz").read_bytes())
    assert "lies in no run directory" in refused("solve", alone)
