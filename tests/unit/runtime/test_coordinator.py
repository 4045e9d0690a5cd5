"""What rank 0 records about the solver's process."""

import dataclasses
import os
import signal
from pathlib import Path

import pytest
from scripted_controller import table
from sidecar_jobs import make_job, wait_until

from snip_megatron.precision import Gemm
from snip_megatron.precision.budget import Budget
from snip_megatron.runtime.config import SnipConfig
from snip_megatron.runtime.coordinator import RankZeroCoordinator
from snip_megatron.runtime.run_data import read_events
from snip_megatron.runtime.run_directory import RunDirectory
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.sensitivity.times import OptionTimes


def test_a_restart_is_recorded_and_printed_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path, {}, overwrite=False, resume_step=None)
    coordinator = RankZeroCoordinator(SnipConfig(enabled=True), SolveRequest(), (), None, run)
    sidecar = coordinator._sidecar
    wait_until(lambda: sidecar.pid)
    os.kill(sidecar.pid or 0, signal.SIGKILL)
    sidecar.submit(make_job())
    wait_until(lambda: sidecar.restarts)
    coordinator.receive_results(3)
    coordinator.receive_results(4)
    coordinator.close()
    (event,) = [event for event in read_events(tmp_path) if event["event"] == "sidecar_restart"]
    assert (event["step"], event["restarts"]) == (3, 1)
    assert "SIGKILL" in event["reason"]
    assert (
        f"snip: the solver's process was started again ({event['reason']}); the map in force stays\n"
        in capsys.readouterr().out
    )


def test_an_update_of_another_layout_is_solved_for_the_stages_of_this_one() -> None:
    """A checkpoint holds an undecided update, and the job resumes with another pipeline."""
    measured = table(8)
    halves = tuple(dataclasses.replace(row, stage=int("mlp" in row.name)) for row in measured.linears)
    request = SolveRequest(budget=Budget("fp4", 0.5), stage_tolerance=0.0, granularity="gemm", policy="random")
    coordinator = RankZeroCoordinator(SnipConfig(enabled=True, wait=120.0), request, halves, None, None)
    coordinator.submit(8, measured, version=2)
    candidates = coordinator.decision(12, version=2)
    coordinator.close()
    assert dict(candidates[0].precision_map.achieved_per_stage) == {"0": 0.5, "1": 0.5}


def test_a_solve_that_failed_is_printed_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise a run whose solver always fails would train without a map and without a word."""
    request = SolveRequest(budget=Budget("fp4", 0.5), formats=("fp8", "nvfp4"))
    rows = table(8).linears
    with RunDirectory(tmp_path, {}, overwrite=False, resume_step=None) as run:
        coordinator = RankZeroCoordinator(SnipConfig(enabled=True, wait=120.0), request, rows, None, run)
        coordinator.submit(8, table(8), version=2)
        coordinator.decision(12, version=2)
        coordinator.close()
    (event,) = [event for event in read_events(tmp_path) if event["event"] == "solve_failed"]
    assert "hold no nvfp4" in event["message"]
    assert f"snip: update 2: {event['message']}; the map in force stays\n" in capsys.readouterr().out


def test_a_map_is_predicted_by_the_steps_of_the_map_in_force() -> None:
    rows = table(8).linears
    seconds = {row.name: {gemm.value: {"bf16": 1e-3, "fp8": 5e-4} for gemm in Gemm} for row in rows}
    times = OptionTimes("card", seconds, rest={row.stage: 1e-3 for row in rows})
    request = SolveRequest(budget=Budget("speedup", 1.5), formats=("bf16", "fp8"), times=times)
    coordinator = RankZeroCoordinator(SnipConfig(enabled=True, wait=120.0), request, rows, None, None)
    for step in range(20):
        coordinator.record_step_time(step, 0.1)
    for begin, expected in ((20, None), (60, 0.1 / 0.04)):  # without the waits of the host, which are no GEMM's
        coordinator.submit(begin, table(8), version=begin)
        chosen = coordinator.decision(begin + 2, version=begin)[0].precision_map
        if expected is not None:
            assert chosen.step_speedup == pytest.approx(expected)
        coordinator.record_adoption(begin + 2, chosen)
        coordinator.event(begin + 2, "adopt", version=begin, formats={"fp8": 1.0})
        for step in range(begin + 2, begin + 30):
            coordinator.record_step_time(step, 0.04)
            if step == begin + 26:  # a phase that changes nothing
                coordinator.record_adoption(step, chosen)
                coordinator.event(step, "adopt", version=begin, formats={"fp8": 1.0}, changed=0)
    coordinator.close()
