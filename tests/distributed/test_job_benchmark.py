"""The table of whole trainings is made on the CPU, so that its first call on a GPU works."""

import json
from pathlib import Path

import pytest
from launch import cpu_environment

from benchmarks import job


def test_a_table_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cpu_environment().items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "job.json"
    contenders = "te_fp8_tensor,snip_fp4_75,snip_bf16_graphs"
    command = ["--model", "tiny-moe", "--contenders", contenders, "--out", str(out), "--commit", "abc", "--steps", "16"]
    assert job.main([*command, "--kernels", "--work", str(tmp_path / "work"), "--beside", "2"]) == 0
    result = json.loads(out.read_text())
    assert (result["device"], result["commit"], result["model"]) == ("cpu", "abc", "tiny-moe")
    assert list(result["ms"]) == ["snip_fp4_75"]
    assert all(len(run["steps_ms"]) == 16 for runs in result["runs"].values() for run in runs)
    assert result["skipped"] == {
        "te_fp8_tensor": "needs a GPU: Transformer Engine's FP8",
        "snip_bf16_graphs": "needs a GPU: CUDA graphs",
    }
    assert result["failed"] == {}
    first, *_ = result["updates"]["snip_fp4_75"]
    assert (first["update_step"], first["adopt_step"]) == (5, 7)
    assert first["events"]["probe"] > 0.0
    assert first["events_s"] == pytest.approx(sum(first["events"].values()))
    assert list(result["kernels"]) == list(result["ms"])
    assert list(result["host"]) == list(result["ms"])
    assert all(set(host) == {"busy", "synchronisations", "launches", "ms"} for host in result["host"].values())
    for kernels in result["kernels"].values():
        assert kernels["ms"]["gemm"] > 0.0
        assert len(kernels["longest"]) == 20
