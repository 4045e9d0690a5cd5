"""A sample of the table of faults and moments. The whole table is ``python -m faults.campaign``."""

import json
from pathlib import Path

import pytest
from warm_ranks import WarmRanks

from faults.campaign import LAYOUTS, LostError, chunks, curve_of, run_cases
from faults.table import FAULTS, MOMENTS, Case, all_cases

SAMPLE = [
    Case("recording", "exception"), Case("reduction", "NaN"), Case("solving", "solver killed"),
    Case("solving", "garbage"), Case("record", "out of memory"), Case("answer", "NaN"), Case("rise", "NaN"),
    Case("adoption", "exception"), Case("checkpoint", "rank killed"), Case("decision", "SIGTERM"),
    Case("end", "exception"),
]  # fmt: skip


def test_training_keeps_its_losses_or_ends_in_a_line(warm: WarmRanks, tmp_path: Path) -> None:
    results = run_cases(warm, tmp_path / "job", "PP2, virtual stages", SAMPLE, 0.5)
    assert [(line["moment"], line["fault"], line["lost"]) for line in results] == [(*case, None) for case in SAMPLE]
    outcomes = {(line["moment"], line["fault"]): line["outcome"] for line in results}
    assert outcomes["recording", "exception"] == "dropped (statistics), adopted"
    assert outcomes["rise", "NaN"] == "dropped (rise)"
    assert outcomes["adoption", "exception"].startswith("ended in a line: [rank 1] rank 1 on ")
    assert outcomes["checkpoint", "rank killed"] == "killed, and started again"
    assert outcomes["decision", "SIGTERM"] == "stopped with a checkpoint"


def test_every_cell_of_the_table_is_run_once_under_each_layout() -> None:
    assert {case.moment for case in all_cases()} == set(MOMENTS)
    assert {case.fault for case in all_cases()} == set(FAULTS)
    for layout in LAYOUTS:
        run = [case for cases, _ in chunks(layout) for case in cases]
        assert sorted(run) == sorted(all_cases())
    assert len(LAYOUTS) * len(all_cases()) >= 200


def test_the_judge_sees_a_bit(tmp_path: Path) -> None:
    def trace(name: str, *lines: tuple[int, str | None, str]) -> None:
        text = "".join(json.dumps({"step": s, "loss": loss, "norm": n, "map": "00"}) + "\n" for s, loss, n in lines)
        (tmp_path / f"trace{name}.jsonl").write_text(text)

    trace("0.0-0", (0, None, "n"), (1, None, "n"))  # of the first pipeline stage
    trace("0.0-1", (0, "0x1p0", "n"), (1, "0x1p1", "n"))
    trace("1.0-1", (0, "0x1p0", "n"), (1, "0x1.0000000000001p1", "n"))
    first, second = curve_of(tmp_path, "0."), curve_of(tmp_path, "1.")
    assert first[0] == second[0]
    assert first[1] != second[1]
    trace("0.0-2", (0, "0x1p0", "other"))
    with pytest.raises(LostError, match="step 0 is not the same"):
        curve_of(tmp_path, "0.")
