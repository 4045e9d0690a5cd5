"""Faults into real trainings, a few of each group; the whole campaign is ``python -m faults.campaign``."""

import json
from pathlib import Path

import pytest
from warm_ranks import WarmRanks

from faults import judge
from faults.delayed import LAG, run_delayed
from faults.jobs import run_batch
from faults.kind import Lost
from faults.kinds import KINDS
from faults.plan import Batch, Fault, make_plan, window

TWO_STAGES = ("--pipeline-model-parallel-size", "2")


def judged(warm: WarmRanks, tmp_path: Path, batch: Batch) -> list[str]:
    results = run_batch(batch, warm, tmp_path)
    assert [(result["number"], result["lost"]) for result in results] == [(f.number, None) for f in batch.faults]
    return [result["outcome"] for result in results]


def test_trainings_go_on_through_faults(warm: WarmRanks, tmp_path: Path) -> None:
    """A killed solver, garbage from it, NaN in the second rank's statistics, a full disk, a lost run directory."""
    faults = (
        Fault(0, "sidecar killed", 2, {"delay_s": 0.0, "build_s": 30.0, "signal": 9}),
        Fault(1, "garbage on the pipe", 7, {"mode": "noise", "seed": 1}),
        Fault(2, "garbage on the pipe", 12, {"mode": "object", "seed": 1}),
        Fault(3, "NaN or Inf in one rank's statistics", 17, {"rank": 1, "column": "boundary.h2", "value": "inf"}),
        Fault(4, "run directory full", 22, {"steps": 2}),
        Fault(5, "run directory gone", 28, {"how": "removed"}),
    )
    outcomes = judged(warm, tmp_path, Batch(0, "update", 2, TWO_STAGES, 38, faults))
    # A process that dies before it has its job costs no update: the next process gets it.
    assert outcomes[0] in ("update dropped (died), map kept", "update adopted in time")
    assert outcomes[1:] == [
        "update dropped (died), map kept",
        "update dropped (died), map kept",
        "update dropped (not finite), map kept",
        "records kept and written later, update adopted",
        "directory made again, every later record in it",
    ]


def test_jobs_go_on_from_their_checkpoint(warm: WarmRanks, tmp_path: Path) -> None:
    """SIGTERM; then a kill."""
    faults = (
        Fault(0, "SIGTERM (preemption)", 12, {"rank": 0, "delay_s": 0.02}),
        Fault(1, "rank killed, job started again", 18, {"rank": 0, "delay_s": 0.0}),
    )
    outcomes = judged(warm, tmp_path, Batch(1, "restart", 1, (), 26, faults))
    assert outcomes == [
        "checkpoint written, clean end, resumed where it stopped",
        "latest checkpoint used, redone steps bitwise the same",
    ]


def test_training_goes_on_while_the_solver_is_slow(warm: WarmRanks, tmp_path: Path) -> None:
    """The solver takes ten steps. The campaign judges what waiting for it costs, which depends on the load."""
    figures = run_delayed(warm, tmp_path / "delayed", delay_s=4.0, step_s=0.4)
    assert figures["postponed"] >= 1
    assert figures["steps_meanwhile"] > LAG


# -- the harness itself ------------------------------------------------------------------------------------------
def test_the_plan_follows_from_its_seed() -> None:
    plan = make_plan(200, 7)
    faults = [fault for batch in plan for fault in batch.faults]
    assert [fault.number for fault in faults] == list(range(200))
    assert len({fault.kind for fault in faults}) == len([kind for kind in KINDS.values() if kind.weight]) >= 12
    assert make_plan(200, 7) == plan != make_plan(200, 8)
    for batch in plan:
        steps = [fault.step for fault in batch.faults]
        assert steps == sorted(set(steps))
        assert steps[-1] < batch.steps - 3
        if batch.group == "update":  # each in a window of its own, and an undisturbed one after them
            assert len({window(step).start for step in steps}) == len(steps)
            assert window(batch.steps - 2).start > window(steps[-1]).start


def record(folder: Path, rank: int, *lines: tuple[int, str | None, str]) -> None:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps({"step": s, "loss": loss, "norm": n, "map": "00"}) + "\n" for s, loss, n in lines)
    (folder / f"trace{rank}.jsonl").write_text(text)


def test_the_judge_sees_a_bit(tmp_path: Path) -> None:
    record(tmp_path / "a", 0, (0, "0x1p0", "n"), (1, "0x1p1", "n"))
    record(tmp_path / "a", 1, (0, None, "n"), (1, None, "n"))
    found = judge.curve(tmp_path / "a")
    judge.complete(found, 2)
    record(tmp_path / "b", 0, (0, "0x1p0", "n"), (1, "0x1.0000000000001p1", "n"))
    with pytest.raises(Lost, match="step 1 differs"):
        judge.same(found, judge.curve(tmp_path / "b"), "replay")
    record(tmp_path / "c", 0, (0, "0x1p0", "n"), (0, "0x1p0", "other"))
    with pytest.raises(Lost, match="step 0 was not the same"):
        judge.curve(tmp_path / "c")
    with pytest.raises(Lost, match=r"steps missing: \[2\]"):
        judge.complete(found, 3)


@pytest.mark.parametrize(
    ("kind", "events"),
    [
        ("infeasible", [{"event": "adopt"}]),
        ("one rank slow", [{"event": "solve_failed", "reason": "died", "message": ""}]),
        ("NaN or Inf in one rank's statistics", [{"event": "dropped"}, {"event": "adopt"}]),
    ],
)
def test_an_unexpected_outcome_is_a_loss(kind: str, events: list[dict[str, str]]) -> None:
    with pytest.raises(Lost):
        KINDS[kind].outcome(events, ["injected"])
