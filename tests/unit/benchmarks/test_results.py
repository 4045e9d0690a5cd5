"""The charts of docs/results are what the committed results say, whose files have a line a field and a run."""

import json
from pathlib import Path

from benchmarks import maps
from benchmarks.charts import main
from benchmarks.common import result_text


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


def test_long_lists_of_objects_have_a_line_an_entry_and_the_rest_a_line_a_field() -> None:
    runs = [{"id": number, "losses": [0.1] * 20} for number in range(3)]
    result = {"device": "H200", "ms": {"bf16": 1.5}, "runs": runs, "by name": {"a": runs, "b": {}}, "long": [1] * 99}
    text = result_text(result)
    assert json.loads(text) == result
    lines = text.splitlines()
    assert len(lines) == 2 + 3 + (2 + 3) + (2 + 2)
    assert [json.loads(line.strip().rstrip(",")) for line in lines[4:7]] == runs
