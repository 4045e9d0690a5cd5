"""A short soak, and its judge. The long one is ``python -m benchmarks.reliability.soak``."""

from pathlib import Path

from warm_ranks import WarmRanks

from benchmarks.reliability.soak import draw_faults, flatness, soak
from faults.job import NOT_REACHED
from faults.table import Case, ends_process


def test_a_training_goes_on_through_faults_and_holds_what_it_held(warm: WarmRanks, tmp_path: Path) -> None:
    faults = {60: Case("record", "disk full"), 85: Case("recording", "exception"), 139: Case("reduction", "exception")}
    result = soak(warm, tmp_path, "pp2", 140, faults, extra=("--hidden-size", "32"))
    assert (result["lost"], result["stopped"], result["compared"]) == (None, None, 140)
    dropped = {"moment": "recording", "fault": "exception", "outcome": "dropped (statistics), adopted"}
    assert result["faults"][1] == {"from_step": 85, **dropped}
    assert result["faults"][2]["outcome"] == NOT_REACHED  # no update follows it
    assert (result["events"]["adopt"], result["events"]["dropped"]) == (6, 1)
    assert len(result["resources"]) == 2
    for usage in result["resources"]:
        assert not {"descriptors", "threads", "device", "written"} & set(usage["growing"])  # memory settles later
    assert result["resources"][0]["files"] > 4 * 5  # of five updates
    assert "files" not in result["resources"][1]  # rank 0 alone writes


def test_drawn_faults_end_no_job() -> None:
    faults = draw_faults(5000, seed=1)
    assert faults == draw_faults(5000, seed=1) != draw_faults(5000, seed=2)
    assert len(faults) == 98
    assert not any(map(ends_process, faults.values()))


def test_the_judge_sees_what_grows() -> None:
    def samples(**slopes: float) -> list[dict[str, int]]:
        base = {"descriptors": 40, "threads": 9, "written": 0, "files": 9}
        base |= dict.fromkeys(("allocated", "device", "resident"), 10**9)
        rates = {"written": 100.0} | slopes
        return [
            {"step": step} | {name: int(value + rates.get(name, 0) * step) for name, value in base.items()}
            for step in range(200)
        ]

    assert flatness(samples())["growing"] == []
    for name in ("descriptors", "threads", "allocated", "device", "resident"):
        assert flatness(samples(**{name: 0.05 if name in ("descriptors", "threads") else 3e5}))["growing"] == [name]
    growing = [sample | {"written": sample["step"] ** 2} for sample in samples()]
    assert flatness(growing)["growing"] == ["written"]
    removed = [sample | {"written": sample["written"] % 5000} for sample in samples()]
    assert flatness(removed)["growing"] == []
