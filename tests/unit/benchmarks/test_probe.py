"""The probe benchmark runs where there is no GPU, and its figures are about each other what they say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHAPE = {"blocks": 1, "seq": 640, "hidden": 64, "ffn": 128, "heads": 2, "groups": 1, "vocab": 32}
PASSES = ("bf16 pass", "statistics pass", "reduction", "drift", "forward_noise pass", "update")


def test_probe_benchmark_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "probe.json"
    shape = [part for name, value in SHAPE.items() for part in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "benchmarks/layers/probe.py", "--rounds", "1", "--out", str(out), "--commit", "abc", *shape],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert (result["shape"], result["commit"], result["device"]) == (SHAPE, "abc", "cpu")
    assert "benchmarks/layers/probe.py" in result["command"]
    assert set(PASSES) == set(result["ms"])
    ms, over = result["ms"], result["over_bf16_pass"]
    assert all(ms[name] > 0.0 for name in PASSES)
    assert over["statistics pass"] == pytest.approx(ms["statistics pass"] / ms["bf16 pass"])
    assert {"recorder", "recorder: sums of X and G"} <= set(result["parts_ms"])
    assert all(value > 0.0 for value in result["parts_ms"].values())
    assert "of a bf16 pass" in done.stdout
