"""The ``Trainer`` of transformers under SNIP: in one process, and data parallel on two ranks."""

import json
from pathlib import Path

import pytest
from warm_ranks import WarmRanks

pytest.importorskip("accelerate")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_measures_adopts_records_and_resumes(warm: WarmRanks, tmp_path: Path, ranks: int) -> None:
    said = warm.succeed(ranks, [str(tmp_path)], module="trainer_ranks", tmp=tmp_path).stdout
    assert said.count("snip: formats are chosen for 100% of the FLOPs") == 2  # of two trainings, by one rank
    result = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    stock, snip = result[0]["stock"], result[0]["snip"]
    assert snip["losses"][:5] == stock["losses"][:5]
    assert snip["norms"][:5] == stock["norms"][:5]
    assert snip["losses"][5:] != stock["losses"][5:]
    assert snip["tokens"] == ranks * 2 * 17
    assert "fp4" in snip["map"].values()
    assert result[0]["resumed"] == snip | {"tokens": None}
    assert all(each["snip"] == snip for each in result)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == pytest.approx(snip["losses"], abs=1e-3)
    assert all(row["step_s"] > 0 for row in rows)
    assert (tmp_path / "run" / "report.html").exists()
