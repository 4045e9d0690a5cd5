"""The table of whole trainings: what is refused, why one failed, what updates cost. Trainings: tests/distributed."""

from typing import Any

import pytest

from benchmarks import job
from benchmarks.common import ROOT
from benchmarks.jobs import turns as job_turns
from benchmarks.jobs.updates import accounts, adopted_maps, predicted_step


def test_an_unknown_contender_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        job.main(["--model", "1b", "--contenders", "fp3"])
    assert "fp3: unknown" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Traceback (most recent call last):\n  File\nRuntimeError: no such device\n", "RuntimeError: no such device"),
        ("[rank0]: RuntimeError: first\n[rank0]:[W722] a warning of the destructor\n", "RuntimeError: first"),
        ("pretrain_gpt: --x is wrong\n[W722] a warning of the destructor\n", "pretrain_gpt: --x is wrong"),
        ("Killed\n\n", "Killed"),
        ("", ""),
    ],
)
def test_the_line_that_says_why(text: str, line: str) -> None:
    assert job_turns.last_error(text).startswith(line)
    assert bool(line) == bool(job_turns.last_error(text))


def test_an_update_is_accounted_for() -> None:
    events: list[dict[str, Any]] = [
        {"step": 4, "event": "probe", "kind": "statistics", "wait_s": 0.2},
        {"step": 4, "event": "probe", "kind": "forward_noise", "wait_s": 0.1},
        {"step": 4, "event": "submit", "wait_s": 0.1},
        {"step": 6, "event": "adopt", "wait_s": 0.2},
        {"step": 6, "event": "recapture", "wait_s": 2.0},
        {"step": 6, "event": "metric", "wait_s": None},
        {"step": 12, "event": "submit", "wait_s": 0.1},
        {"step": 14, "event": "adopt", "wait_s": 0.0},
    ]
    ms = [9000.0, 100.0, 100.0, 100.0, 500.0, 100.0, 2300.0, 90.0, 80.0, 80.0, 80.0, 80.0]
    ms += [180.0, 80.0, 70.0, 70.0, 70.0, 70.0, 70.0]
    first, second = accounts(events, ms)
    assert (first["update_step"], first["adopt_step"], second["update_step"]) == (4, 6, 12)
    assert first["usual_ms"] == {"before": 100.0, "after": 80.0}
    assert first["longer_s"] == pytest.approx(0.4 + 2.22 + 0.01)
    assert first["from_adoption_s"] == pytest.approx(2.23)
    assert first["events_s"] == pytest.approx(2.6)
    assert first["events"] == pytest.approx({"probe": 0.3, "submit": 0.1, "adopt": 0.2, "recapture": 2.0})
    assert first["probe_s"] == {"statistics": 0.2, "forward_noise": 0.1}
    assert second["probe_s"] == {}
    assert second["longer_s"] == pytest.approx(0.1)


def test_the_maps_of_a_run_are_counted_by_kind_of_gemm() -> None:
    maps = adopted_maps(ROOT / "examples/recorded_run")
    assert [each["step"] for each in maps] == [40, 150, 225, 270]
    for each in maps:
        assert sum(each["formats"].values()) == 22 * 4 * 3
        assert each["formats"]["mlp.linear_fc2:wgrad fp8_tensor"] == 22
        assert 0 < each["loss"] <= 0.002
    planned, own = (predicted_step(ROOT / "examples/recorded_run", bf16_ms) for bf16_ms in (None, 500.0))
    assert 155.3 < planned < 400.0  # its request holds 155.37 ms that no format changes
    assert 500.0 - own == pytest.approx(planned * (maps[-1]["step_speedup"] - 1), rel=1e-6)
