"""Steps' times before and under maps, costs and savings, from records and from a job, which says longer steps."""

from pathlib import Path
from typing import Any

import pytest

from snip_megatron.runtime.account import Account
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.coordinator import RankZeroCoordinator
from snip_megatron.runtime.exchange import StepFigures
from snip_megatron.runtime.run_data import read_events, read_metrics
from snip_megatron.runtime.run_directory import RunDirectory
from snip_megatron.sensitivity.request import SolveRequest


def steps(account: Account, first: int, *seconds: float | None) -> int:
    for step, each in enumerate(seconds, first):
        account.step(step, each)
    return first + len(seconds)


def test_time_saved_is_that_of_usual_steps_less_what_updates_cost() -> None:
    account = Account()
    at = steps(account, 0, 9.0, 9.0, 9.0, *[1.0] * 20)
    account.event(at, "probe", {"wait_s": 1.5})
    account.event(at, "submit", {"wait_s": 0.5})
    account.event(at, "validation", {"wait_s": 100.0})  # bf16 would have it too
    account.event(at, "guard", {"action": "refused", "wait_s": 0.125})
    at = steps(account, at, 7.0, 7.0, 7.0, *[1.0] * 7)  # what follows an update is no usual step
    account.event(at, "adopt", {"version": 4, "wait_s": 0.25})
    assert account.saved_s() is None
    steps(account, at, 5.0, 5.0, 5.0, *[0.75] * 36, 30.0)  # a stall is not the map's doing
    settled = 3 * (7.0 - 1.0) + 3 * (5.0 - 0.75)
    assert (account.bf16_s, account.updates, account.cost_s) == (1.0, 1, 2.375 + settled)
    before, under = account.stretches()
    assert (before.quantised, before.steps, before.saved_s) == (False, 33, 0.0)
    assert (under.version, under.steps, under.step_s, under.speedup) == (4, 40, 0.75, pytest.approx(4 / 3))
    assert account.saved_s() == pytest.approx(40 * 0.25 - 2.375 - settled)
    assert account.figures(judged=True) == pytest.approx(
        {"step_s": 0.75, "speedup": 4 / 3, "saved_h": (7.625 - settled) / 3600}
    )
    assert account.figures(judged=False) == {"step_s": 0.75}


def test_the_latest_steps_in_bf16_are_those_whose_parts_are_timed() -> None:
    account = Account()
    at = steps(account, 0, 9.0, 9.0, 9.0, *[3.0] * 7)
    assert (account.latest_bf16_s, account.map_s) == (None, None)
    at = steps(account, at, *[3.0] * 9, *[1.0] * 8)
    account.event(at, "submit", {})
    at = steps(account, at, 9.0, 9.0, 9.0)
    account.event(at, "adopt", {"version": 1})
    steps(account, at, *[0.5] * 20)
    assert (account.latest_bf16_s, account.bf16_s, account.map_s) == (1.0, 3.0, 0.5)
    assert account.bf16_steps == 24


def test_the_line_of_a_run() -> None:
    account = Account()
    assert account.line(unjudged=None) is None
    at = steps(account, 0, *[0.2] * 8)
    assert account.line(unjudged=None) == "snip: bf16 | measuring steps"
    at = steps(account, at, *[0.2] * 12)
    assert account.line(unjudged=None) == "snip: bf16 | 200.0 ms a step"
    account.event(at, "adopt", {"version": 3, "formats": {"fp4": 0.75, "fp8": 0.249, "bf16": 0.001}, "wait_s": 1.0})
    steps(account, at, *[0.1] * 30)
    line = account.line(unjudged=None)
    assert line == "snip: map 3, 75% fp4, 25% fp8 | 100.0 ms a step, 2.00 x bf16 | saved 2.0 s, updates included"
    line = account.line(unjudged="emulated")
    assert line == "snip: map 3, 75% fp4, 25% fp8 | 100.0 ms a step, emulated"
    account.event(at, "probe", {"wait_s": 3.0})
    lost = account.line(unjudged=None)
    assert lost.endswith("lost 1.0 s, updates included")


def a_job(path: Path, resume_step: int | None, device: str = "one", **config: Any) -> RankZeroCoordinator:
    run = RunDirectory(path, {}, overwrite=False, resume_step=resume_step, facts={"device": device})
    settings = SnipConfig(enabled=True, policy="bf16", **config)
    return RankZeroCoordinator(settings, SolveRequest(), (), None, run, unjudged=None)


def train(job: RankZeroCoordinator, first: int, last: int, seconds: float) -> None:
    for step in range(first, last):
        job.record_step_time(step, seconds)
        job.metric(StepFigures(step, 1.0, 1.0), 0.0)


def test_records_and_a_running_job_have_the_same_account_and_a_resumed_job_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = a_job(tmp_path, None)
    train(job, 0, 30, 0.5)
    job.event(30, "adopt", version=1, formats={"fp4": 1.0}, wait_s=1.0)
    train(job, 30, 60, 0.25)
    job.print_line(59)
    news = job.news()
    assert news == pytest.approx({"step_s": 0.25, "speedup": 2.0, "saved_h": (30 * 0.25 - 1.0) / 3600}, rel=1e-3)
    assert job.news() is None
    assert "snip: map 1, 100% fp4 | 250.0 ms a step, 2.00 x bf16 | saved 6.5 s" in capsys.readouterr().out
    job.close()

    replayed = Account()
    replayed.read(read_events(tmp_path), read_metrics(tmp_path))
    assert replayed.figures(judged=True) == news

    again = a_job(tmp_path, 60)
    again.event(60, "adopt", version=1, formats={"fp4": 1.0}, changed=0)
    train(again, 60, 90, 0.25)
    again.print_line(89)
    resumed = again.news()
    assert resumed["speedup"] == 2.0  # against bf16 steps of the first job
    assert resumed["saved_h"] == pytest.approx(news["saved_h"] + 30 * 0.25 / 3600, rel=1e-3)
    again.close()
    assert [e["changed_fact"] for e in read_events(tmp_path) if e["event"] == "resume"] == [None]

    elsewhere = a_job(tmp_path, 90, device="another")
    elsewhere.event(90, "adopt", version=1, formats={"fp4": 1.0}, changed=0)
    train(elsewhere, 90, 120, 0.1)
    elsewhere.print_line(119)
    assert elsewhere.news() == {"step_s": 0.1}
    elsewhere.close()
    assert [e["changed_fact"] for e in read_events(tmp_path) if e["event"] == "resume"] == [None, "device"]


def test_the_peak_before_the_first_update_and_at_the_line(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, {}, overwrite=False, resume_step=None)
    config = SnipConfig(enabled=True, first_update=4, update_interval=20, lag=2)
    job = RankZeroCoordinator(config, SolveRequest(), (), None, run)
    try:
        for step in range(10):
            job.receive_results(step)
            job.record_step_time(step, 0.1)
            if step == 7:
                job.print_line(step)
            if step:  # figures arrive one step later
                job.metric(StepFigures(step - 1, 1.0, 1.0), 0.0)
    finally:
        job.close()
    peaks = {row["step"]: row["peak_bytes"] for row in read_metrics(tmp_path) if "peak_bytes" in row}
    assert list(peaks) == [3, 7]
    assert 2**24 < peaks[3] <= peaks[7] < 2**40
