"""The charts of docs/results are what the committed results say."""

import json
from pathlib import Path

from benchmarks import maps
from benchmarks.charts import main


def test_the_committed_charts_are_current() -> None:
    assert main(["--check"]) == 0


def test_the_map_and_the_harm_of_a_run_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "map.json"
    maps.main([str(maps.RECORDED), "--format", "fp8_tensor", "--commit", "c", "--out", str(out)])
    body = json.loads(out.read_text())
    scores = json.loads((maps.RECORDED / "scores/step_30.json").read_text())["scores"]
    assert len(body["gemms"]) == 12
    for kind, row in body["gemms"].items():
        path, gemm = kind.split(":")
        assert row["formats"] == ["fp8_tensor"] * 22
        assert row["harm"] == [scores[f"decoder.layers.{n}.{path}:{gemm}"]["fp8_tensor"]["q"] for n in range(22)]
