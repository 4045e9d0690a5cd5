"""`snip report RUN` as a user calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.reporting.run_directory import RunDirectory

ROOT = Path(__file__).resolve().parents[2]


def snip(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "snip_megatron.cli", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def recorded(tmp_path) -> Path:
    path = tmp_path / "run"
    with RunDirectory(path, {"policy": "snip"}, overwrite=False, resume_step=None) as run:
        for step in range(5):
            run.metric(step, loss=5.0 - step, grad_norm=1.0, fp4_fraction=0.0)
        run.write_map(3, PrecisionMap.uniform(["decoder.layers.0.mlp.linear_fc1"], Format.FP4, version=1))
        run.event(3, "adopt", version=1, achieved=1.0)
    return path


def test_writes_the_page_and_says_where(recorded, tmp_path):
    done = snip("report", "run", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == "run/report.html"
    assert "</html>" in (recorded / "report.html").read_text(encoding="utf-8")


def test_out(recorded, tmp_path):
    done = snip("report", str(recorded), "--out", "page.html", cwd=tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "page.html").exists()
    assert not (recorded / "report.html").exists()


@pytest.mark.parametrize("arguments", [("absent",), (".",), ("run/config.json",), ("run", "--out", ".")])
def test_bad_input_is_one_line(recorded, tmp_path, arguments):
    done = snip("report", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("snip report: ")
    assert done.stderr.count("\n") == 1
