"""A few rows of the table of faults. The whole table is ``python -m faults.campaign``."""

import json
from pathlib import Path

import pytest
from warm_ranks import WarmRanks

from faults.campaign import LAYOUTS, Job, LostError, curve_of, run_faults
from faults.table import FAULTS
from snip_megatron.runtime.run_data import read_events

TWO_STAGES = LAYOUTS[2]


def test_trainings_go_on_through_faults(warm: WarmRanks, tmp_path: Path) -> None:
    names = ["solver killed", "garbage from the solver", "Inf in a statistic", "disk full", "disk stalled"]
    names += ["run directory removed", "exception in a probe", "probe out of memory"]
    results = run_faults(warm, tmp_path, TWO_STAGES, 0.0, names)
    assert [(result["fault"], result["lost"]) for result in results] == [(name, None) for name in names]


def test_jobs_go_on_from_their_checkpoint(warm: WarmRanks, tmp_path: Path) -> None:
    results = run_faults(warm, tmp_path, LAYOUTS[0], 0.02, ["preemption", "rank killed"])
    assert [(result["outcome"], result["lost"]) for result in results] == [("stopped", None), ("killed", None)]


def test_training_goes_on_while_the_solver_is_slow(warm: WarmRanks, tmp_path: Path) -> None:
    """Without ``--snip-wait`` the decision is postponed, and the map adopted when it is there."""
    job = Job(warm, tmp_path, LAYOUTS[0], 0.0)
    arguments = ("--snip-update-interval", "100000", "--exit-signal-handler")
    _, code = job.train("training", 20000, {2: "slow solver"}, *arguments, stop_at_map=True)
    assert code == 0, job.error
    kinds = [event["event"] for event in read_events(job.run) if event["step"] >= 2]
    assert "postpone" in kinds
    assert "adopt" in kinds


# -- the judge -----------------------------------------------------------------------------------------------------
def trace(folder: Path, rank: int, *lines: tuple[int, str | None, str]) -> Path:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps({"step": s, "loss": loss, "norm": n, "map": "00"}) + "\n" for s, loss, n in lines)
    (folder / f"trace{rank}.jsonl").write_text(text)
    return folder


def test_the_judge_sees_a_bit(tmp_path: Path) -> None:
    trace(tmp_path / "a", 0, (0, "0x1p0", "n"), (1, "0x1p1", "n"))
    first = curve_of(trace(tmp_path / "a", 1, (0, None, "n"), (1, None, "n")))
    second = curve_of(trace(tmp_path / "b", 0, (0, "0x1p0", "n"), (1, "0x1.0000000000001p1", "n")))
    assert first[0] == second[0]
    assert first[1] != second[1]
    with pytest.raises(LostError, match="step 0 is not the same"):
        curve_of(trace(tmp_path / "c", 0, (0, "0x1p0", "n"), (0, "0x1p0", "other")))
    with pytest.raises(LostError, match="or has no loss"):
        curve_of(trace(tmp_path / "d", 0, (0, None, "n")))


def test_every_fault_has_an_outcome_and_a_way_in() -> None:
    for name, fault in FAULTS.items():
        assert fault.outcomes, name
        assert fault.in_rank is not None or fault.in_solver is not None, name
        assert not fault.ends or set(fault.outcomes) <= {"stopped", "killed"}, name
