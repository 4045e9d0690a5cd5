"""``snip calibrate`` as a user runs it, on a CPU: a table that cost models read, and one line for every mistake."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from snip_megatron.cli import main
from snip_megatron.precision import Format, Gemm
from snip_megatron.timing.loading import load_cost_model
from snip_megatron.timing.shapes import LinearShape


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
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
