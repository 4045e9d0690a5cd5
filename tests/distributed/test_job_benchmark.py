"""The table of whole trainings is made on the CPU, so that its first call on a GPU works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import cpu_environment

from benchmarks import job
from benchmarks.jobs import turns as job_turns
from snip_megatron.records.readers import read_events


def test_a_table_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cpu_environment().items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "job.json"
    contenders = "snip_fp8,te_fp8_tensor,snip_fp4_75,snip_bf16_graphs"
    command = ["--model", "tiny", "--contenders", contenders, "--out", str(out), "--commit", "abc", "--steps", "16"]
    assert job.main([*command, "--kernels", "--work", str(tmp_path / "work"), "--beside", "2"]) == 0
    result = json.loads(out.read_text())
    assert (result["device"], result["commit"], result["model"]) == ("cpu", "abc", "tiny")
    assert list(result["ms"]) == ["snip_fp8", "snip_fp4_75"]
    assert read_events(next((tmp_path / "work").glob("snip_fp8-*/run")))[0]["event"] == "adopt"
    assert all(len(run["steps_ms"]) == 16 for runs in result["runs"].values() for run in runs)
    assert result["skipped"] == {
        "te_fp8_tensor": "needs a GPU: Transformer Engine's FP8",
        "snip_bf16_graphs": "needs a GPU: CUDA graphs",
    }
    assert result["failed"] == {}
    first, *_ = result["updates"]["snip_fp4_75"]
    assert (first["update_step"], first["adopt_step"]) == (4, 6)
    assert first["events"]["probe"] > 0.0
    assert first["events_s"] == pytest.approx(sum(first["events"].values()))
    assert list(result["kernels"]) == list(result["ms"])
    for kernels in result["kernels"].values():
        assert kernels["ms"]["gemm"] > 0.0
        assert len(kernels["longest"]) == 20


def test_a_training_that_is_refused_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cpu_environment().items():
        monkeypatch.setenv(name, value)
    with job_turns.Training(1, ["--snip", "--snip-lag", "0"], tmp_path) as training:
        training.wait_ready()
        outcome = training.take_turn(60.0)
    assert outcome.error is not None
    assert "--snip-lag 0: must be at least 1" in outcome.error
