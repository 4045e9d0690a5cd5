"""``snip calibrate`` as a user runs it, on a CPU: a table that cost models read, and one line for every mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from snip_megatron.cli import main
from snip_megatron.precision import Format, Gemm
from snip_megatron.timing.loading import load_cost_model
from snip_megatron.timing.shapes import LinearShape
from snip_megatron.timing.table import TimingTable


def snip(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "snip_megatron.cli", "calibrate", "--device", "cpu", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


def test_a_table_of_this_cpu(tmp_path: Path) -> None:
    out = tmp_path / "cpu.json"
    done = snip("--out", out, "--formats", "fp8,fp4", "--commit", "abc")
    assert done.returncode == 0, done.stderr
    assert "cpu, reference, 8 shapes" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["cpu.json"]
    body = json.loads(out.read_text())
    assert (body["device"], body["backend"], body["commit"], body["complete"]) == ("cpu", "reference", "abc", True)
    assert body["command"].startswith("snip calibrate --device cpu")
    model = load_cost_model(out)
    assert model.formats == (Format.BF16, Format.FP8, Format.FP4)
    assert model.seconds(LinearShape(64, 128, 128), Gemm.WGRAD, Format.FP4) > 0


def small_table(device: str) -> str:
    """The least that a table may hold."""
    gemms = [{"tokens": 8, "n": 8, "k": 8, "seconds": {"bf16": [1e-5, 1e-5, 1e-5]}}]
    return json.dumps(
        {"schema": "snip.timings/1", "device": device, "backend": "reference", "formats": ["bf16"], "gemms": gemms}
    )


def test_collectives_are_added_to_a_table(tmp_path: Path) -> None:
    table, out = tmp_path / "cpu.json", tmp_path / "with.json"
    table.write_text(small_table("cpu"))
    done = snip("--ranks", 2, "--add-to", table, "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "snip calibrate: cpu, 10 collectives are added"
    before, after = TimingTable.load(table), TimingTable.load(out)
    assert len(after.collectives) == 10
    assert replace(after, collectives={}) == before


def test_a_table_of_another_device_is_not_added_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "other.json"
    table.write_text(small_table("Another"))
    common = ["calibrate", "--device", "cpu", "--add-to", str(table)]
    assert main([*common, "--ranks", "2"]) == 2
    assert "were measured on Another, this is cpu" in capsys.readouterr().err
    assert main(common) == 2
    assert "were measured on Another, this is cpu" in capsys.readouterr().err
    table.write_text(small_table("cpu"))
    assert main(common) == 2
    assert "nothing is left to measure; give --ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks 0: must be a whole number of 1 or more"),
        (["--ranks", "100000"], "--ranks 100000: a CPU takes at most 64"),
        (["--formats", "fp9"], "--formats fp9: give distinct names among fp8, fp4"),
        (["--time", "0"], "--time 0.0: must be a number of seconds above 0"),
        (["--out", "/nowhere/t.json"], "--out /nowhere/t.json: there is no folder /nowhere"),
        (["--gemm", "hopper"], "--snip-gemm hopper: needs a Hopper GPU"),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["calibrate", "--device", "cpu", *arguments])
    except SystemExit as end:  # argparse
        code = end.code
    output, error = capsys.readouterr()
    assert (code, output) == (2, "")
    assert error.count("\n") == 1
    assert error.startswith(f"snip calibrate: {message}")
