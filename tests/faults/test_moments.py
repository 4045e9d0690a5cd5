"""A sample of the table of faults and moments. The whole table is ``python -m faults.moments_campaign``."""

from pathlib import Path

from warm_ranks import WarmRanks

from faults.moments import FAULTS, MOMENTS, Case, all_cases
from faults.moments_campaign import LAYOUTS, chunks, run_cases

SAMPLE = [
    Case("recording", "exception"), Case("reduction", "NaN"), Case("solving", "solver killed"),
    Case("record", "out of memory"), Case("answer", "NaN"), Case("adoption", "exception"),
    Case("checkpoint", "rank killed"), Case("decision", "SIGTERM"), Case("end", "exception"),
]  # fmt: skip


def test_training_keeps_its_losses_or_ends_in_a_line(warm: WarmRanks, tmp_path: Path) -> None:
    results = run_cases(warm, tmp_path / "job", "PP2, virtual stages", SAMPLE, 0.5)
    assert [(line["moment"], line["fault"], line["lost"]) for line in results] == [(*case, None) for case in SAMPLE]
    outcomes = {(line["moment"], line["fault"]): line["outcome"] for line in results}
    assert outcomes["recording", "exception"] == "dropped (statistics), adopted"
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
