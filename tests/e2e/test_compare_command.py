"""`compare` and `validate_proxy` of benchmarks/quality as a user runs them: a real experiment on the CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from snip_command import ROOT, SNIP, snip_alone

NANO = ROOT / "benchmarks/quality/experiments" / "nano.json"
COMPARE, VALIDATE = ((sys.executable, "-m", f"benchmarks.quality.{name}") for name in ("compare", "validate_proxy"))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "SNIP_COMMIT": "c0ffee"}


def alone(*arguments: object, command: tuple[str, ...] = COMPARE) -> subprocess.CompletedProcess[str]:
    return snip_alone(*arguments, command=command, SNIP_COMMIT="c0ffee")


def refused(*arguments: object) -> str:
    done = alone(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    return done.stderr.strip()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    text, folder = tmp_path / "text", tmp_path / "data"
    text.mkdir()
    for number, paragraph in enumerate((ROOT / "LICENSE").read_text().split("\n\n")):
        (text / f"{number}.txt").write_text(paragraph)
    made = alone("prepare-data", text, "--tokenizer", "bytes", "--holdout", "0.2", "--output", folder, command=SNIP)
    assert made.returncode == 0, made.stderr
    return folder


def results(out: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((out / "nano.json").read_text())
    return body


def until_one_run_is_done(out: Path, process: subprocess.Popen[str]) -> Iterator[None]:
    while not ((out / "nano.json").exists() and results(out)["runs"]):
        assert process.poll() is None
        yield


@pytest.mark.matrix  # minutes, of a tool that is not in the wheel
def test_an_interrupted_comparison_goes_on_and_its_warm_checkpoint_is_measured(data: Path, tmp_path: Path) -> None:
    body = json.loads(NANO.read_text())
    body["from_warm"]["policies"] = ["uniform-fp4", "snip"]
    experiment, work, first = tmp_path / "experiment.json", tmp_path / "work", tmp_path / "first"
    experiment.write_text(json.dumps(body))
    arguments = (experiment, "--data", data, "--gpus", "0", "--work", work)
    process = subprocess.Popen(
        [*COMPARE, *arguments, "--out", first], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=ROOT
    )
    for _ in until_one_run_is_done(first, process):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert "1 runs are left; the same command with --resume goes on" in err
    assert [run["status"] for run in results(first)["runs"]] == ["done"]
    kept = results(first)["runs"][0]

    assert "add --resume to go on from it" in refused(*arguments, "--out", first)

    resumed = alone(*arguments, "--out", first, "--resume", "--per-gpu", "2")
    assert resumed.returncode == 0, resumed.stderr
    assert kept in results(first)["runs"]
    assert "warm checkpoint" not in resumed.stderr  # it was there

    runs = {run["id"]: run for run in results(first)["runs"]}
    for identity in runs:  # "save": true
        assert (work / "runs" / identity / "checkpoint" / "latest_checkpointed_iteration.txt").read_text() == "14"
    check_figures(runs, results(first))
    average = next(run for run in results(first)["runs"] if run["label"] == "snip")["average_share"]
    assert 0.4 < average < 0.75  # bf16 in the first two of six steps
    assert f"| 75 % | snip | {average:.3f} |" in (first / "nano.md").read_text()

    nothing_to_do = alone(*arguments, "--out", first, "--resume")
    assert nothing_to_do.returncode == 0
    assert nothing_to_do.stdout.strip() == (first / "nano.md").read_text().strip()
    check_estimators(arguments, tmp_path)


def check_figures(runs: dict[str, Any], body: dict[str, Any]) -> None:
    by_label = {run["label"]: run for run in runs.values()}
    assert set(by_label) == {"uniform-fp4", "snip"}
    (sha,) = body["warm"]
    for run in by_label.values():
        assert (run["warm_sha256"], run["commit"], run["last_step"]) == (sha, "c0ffee", 13)
        assert set(run["validation"]) == {"map", "bf16"}
    assert by_label["uniform-fp4"]["validation"]["map"] != by_label["uniform-fp4"]["validation"]["bf16"]
    assert by_label["uniform-fp4"]["fp4_share"] == 1.0
    assert by_label["snip"]["fp4_share"] >= 0.75
    assert [adopted["step"] for adopted in by_label["snip"]["adopted"]] == [10]


def check_estimators(arguments: tuple[object, ...], out: Path) -> None:
    """Errors of a GEMM reach weights of other linears: what counts a linear's own error alone ranks otherwise."""
    done = alone(*arguments, "--out", out, "--probe-microbatches", "1", command=VALIDATE)
    assert done.returncode == 0, done.stderr
    early, validation = json.loads((out / "proxy.json").read_text())["validations"]
    assert early["step"] == 5
    assert (validation["step"], validation["tokens"], validation["format"]) == (9, 256, "fp4")
    found = {(c["quantity"], c["estimator"]): c for c in validation["comparisons"]}
    assert {found["loss", name]["options"] for name in ("noise", "fisher", "ceiling")} == {8}
    rho = {name: found["drift: all", name]["rho"] for name in ("noise", "min-rel-err", "min-abs-err")}
    assert rho["noise"] > 0.6
    assert rho["noise"] > 0.2 + max(rho["min-rel-err"], rho["min-abs-err"])
