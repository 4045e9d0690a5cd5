"""``snip solve`` over a run directory as a user runs it: no new statistics, one line for every mistake."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from snip_command import refused, snip

from snip_megatron.precision import DENSE_LAYER, Format
from snip_megatron.precision.budget import Budget
from snip_megatron.runtime.run_directory import RunDirectory
from snip_megatron.sensitivity import SolveRequest, build_problem
from snip_megatron.sensitivity.times import OptionTimes
from snip_megatron.timing.cost_model import LinearShape, load_cost_model
from tests.unit.sensitivity.synthetic import make_table

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
    request = SolveRequest(budget=Budget("fp4", 0.5))
    path = tmp_path_factory.mktemp("runs") / "run"
    facts = {"request": request.as_dict(), "predicted_times": None}
    with RunDirectory(path, {}, overwrite=False, resume_step=None, facts=facts) as run:
        run.write("stats", 10, table.to_bytes())
        run.write("problems", 10, build_problem(table, request)[0].to_json())
    return path


def solved(done: subprocess.CompletedProcess[str]) -> dict:
    assert (done.returncode, done.stderr) == (0, "")
    body: dict = json.loads(done.stdout)
    assert len(body["choices"]) == 12 * LAYERS
    return body


def test_another_budget_of_a_run(recorded: Path) -> None:
    own = solved(snip("solve", recorded))
    more = solved(snip("solve", recorded, "--budget", "fp4=0.8"))
    assert 0.5 <= own["achieved"] < 0.8 <= more["achieved"]
    assert own["objective"] < more["objective"]
    stored = solved(snip("solve", recorded / "problems" / "step_10.json", "--budget", "fp4=0.8"))
    assert stored["choices"] == more["choices"]


def test_another_policy_over_the_statistics(recorded: Path) -> None:
    statistics = recorded / "stats" / "step_10.npz"
    first = solved(snip("solve", statistics, "--policy", "backward-first"))
    # 50 % in fp4 is within the two thirds of dgrad and wgrad: no fprop.
    assert {k.split(":")[1] for k, f in first["choices"].items() if f == "fp4"} <= {"dgrad", "wgrad"}
    paper = solved(snip("solve", recorded, "--q", "paper", "--step", "10"))
    assert paper["choices"] != first["choices"]


def test_a_speedup_from_a_run_that_asked_for_a_share(recorded: Path, tmp_path: Path) -> None:
    assert "no times are stored" in refused("solve", recorded, "--budget", "speedup=1.2")
    known = tmp_path / "known"
    shutil.copytree(recorded, known)
    body = json.loads((known / "config.json").read_text())
    formats = [Format.FP8, Format.FP4]
    body["facts"]["predicted_times"] = OptionTimes.predict(load_cost_model("h200"), SHAPES, formats).as_dict()
    (known / "config.json").write_text(json.dumps(body))
    fast = solved(snip("solve", known, "--budget", "speedup=1.2", "--formats", "bf16,fp8"))
    assert fast["speedup"] >= 1.2 * (1 - 1e-8)
    assert fast["fp4_share"] == 0.0
    assert fast["budget"] == "speedup"
    assert set(fast["choices"].values()) == {"bf16", "fp8"}


def test_mistakes(recorded: Path, tmp_path: Path) -> None:
    for arguments, words in [
        ([recorded, "--step", "11"], "has an update at 10"),
        ([recorded, "--policy", "bf16"], "nothing to solve"),
        ([recorded, "--formats", "fp8,nvfp4"], "hold no nvfp4"),
        ([recorded, "--pin", "*.linear_fc9=fp8"], "--pin *.linear_fc9=fp8: matches no option"),
        ([recorded, "--pin", "fc1"], "--pin fc1: expected GLOB=FORMAT"),
        ([recorded, "--q", "best"], "--q best: unknown"),
        ([recorded, "--policy", "best"], "--policy best: unknown"),
        ([recorded, "--stage-tolerance", "2"], "--stage-tolerance 2: "),
        ([recorded, "--policy", "snip", "--estimator", "measured"], "--estimator measured: unknown"),
        ([tmp_path], "not a run directory"),
    ]:
        assert words in refused("solve", *arguments)
    alone = tmp_path / "step_10.npz"
    alone.write_bytes((recorded / "stats" / "step_10.npz").read_bytes())
    assert "lies in no run directory" in refused("solve", alone)
