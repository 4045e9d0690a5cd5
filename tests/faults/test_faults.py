"""A sample of the table of faults and moments. The whole table is ``python -m benchmarks.reliability.faults``."""

import json
from pathlib import Path

from warm_ranks import WarmRanks

from benchmarks.reliability.faults import LAYOUTS, chunks, run_cases
from faults.job import curve_of
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
    def trace(name: str, *lines: tuple[int, str | None]) -> None:
        rank = int(name[-1])
        text = [json.dumps({"step": step, "rank": rank, "values": [loss, "n", "00"]}) + "\n" for step, loss in lines]
        (tmp_path / f"trace-{name}.jsonl").write_text("".join(text) + '{"step": 9, "ra')  # torn by a SIGKILL

    trace("start0-0", (0, None), (1, None))  # of the first pipeline stage
    trace("start0-1", (0, "0x1p0"), (1, "0x1.8p1"), (1, "0x1p1"))  # a step that torchrun repeated
    trace("start1-1", (0, "0x1p0"), (1, "0x1.0000000000001p1"))
    first, second = curve_of(tmp_path, "start0"), curve_of(tmp_path, "start1")
    assert first.keys() == {(0, 0), (1, 0), (0, 1), (1, 1)}
    assert first[0, 1] == second[0, 1]
    assert first[1, 1][0] == "0x1p1"
    assert first[1, 1] != second[1, 1]
