"""The table of whole trainings: medians, what failed, what updates cost. Its trainings: tests/distributed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import job
from benchmarks.jobs import turns as job_turns
from benchmarks.jobs.turns import Outcome
from benchmarks.jobs.updates import accounts


def printed(*ms: float) -> str:
    return "".join(f" iteration {i}/ | elapsed time per iteration (ms): {t} |\n" for i, t in enumerate(ms))


class MadeUp:
    """Takes the place of :class:`job.Job`'s trainings: what each turn prints, or its error."""

    def __init__(self, answers: dict[str, list[float] | str]) -> None:
        self.answers, self.order = answers, list[str]()

    def train(self, turns: Sequence[job.Turn]) -> Iterator[tuple[job.Turn, Outcome, Path]]:
        for turn in turns:
            self.order.append(turn.name)
            answer = self.answers[turn.name]
            found = Outcome("", answer, 1.0) if isinstance(answer, str) else Outcome(printed(*answer), None, 1.0)
            yield turn, found, Path()


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(job, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(job, "header", lambda commit: {"device": "made up", "commit": commit, "versions": {}} | COMMAND)


COMMAND = {"command": "python job.py", "date": "today"}


def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trainings: MadeUp, code: int, *more: str) -> dict[str, Any]:
    monkeypatch.setattr(job.Job, "train", lambda _, turns: trainings.train(turns))
    out = tmp_path / "job.json"
    assert job.main(["--model", "1b", "--out", str(out), "--commit", "abc", *more]) == code
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.usefixtures("on_a_gpu")
def test_medians_of_the_second_half_over_bf16(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainings = MadeUp({"bf16": [900.0, 500.0, 400.0, 400.0], "snip_fp8": [9.0, 9.0, 310.0, 330.0]})
    found = table(monkeypatch, tmp_path, trainings, 0, "--contenders", "bf16,snip_fp8")
    assert found["ms"] == {"bf16": 400.0, "snip_fp8": 320.0}
    assert found["speedup"] == {"bf16": 1.0, "snip_fp8": 1.25}
    assert {"device", "commit", "command", "model", "ms", "speedup"} <= found.keys()
    assert found["model"] == "1b"


@pytest.mark.usefixtures("on_a_gpu")
def test_a_failure_is_noted_and_stops_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainings = MadeUp({"snip_fp8": "pretrain_gpt: no such thing", "bf16": [4.0, 4.0]})
    found = table(monkeypatch, tmp_path, trainings, 1, "--contenders", "snip_fp8,bf16")
    assert found["failed"] == {"snip_fp8": "pretrain_gpt: no such thing"}
    assert found["ms"] == {"bf16": 4.0}


@pytest.mark.usefixtures("on_a_gpu")
def test_a_second_command_adds_to_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table(monkeypatch, tmp_path, MadeUp({"bf16": "RuntimeError: x"}), 1, "--contenders", "bf16")
    everybody = {turn: [2.0, 2.0] for turn in job.CONTENDERS} | {"bf16": [4.0, 4.0]}
    everybody |= {f"{c}:{g}": [2.0, 2.0] for c, how in job.CONTENDERS.items() for g in how.graphs}
    monkeypatch.setattr(job, "read_events", lambda run: [])
    trainings = MadeUp(everybody)
    found = table(monkeypatch, tmp_path, trainings, 0)
    assert set(found["ms"]) == set(job.CONTENDERS) - set(job.EXTRA)
    assert found["failed"] == {}
    assert found["speedup"]["te_fp8_block_graphs"] == 2.0
    trainings.order.clear()
    table(monkeypatch, tmp_path, trainings, 0)  # nobody is missing
    assert trainings.order == []


def test_an_unknown_contender_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        job.main(["--model", "1b", "--contenders", "fp3"])
    assert "fp3: unknown" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--beside", "0"], "--beside 0: must be at least 1"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--gpus", "-1"], "--gpus -1: must be at least 1"),
        (["--graphs", "local,fast"], "--graphs fast: unknown; choose among local, transformer_engine, full_iteration"),
    ],
)
def test_numbers_without_which_nothing_would_run_are_refused(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        job.parse(["--model", "1b", *given])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"ms": {}}'])
def test_a_damaged_table_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    out = tmp_path / "job.json"
    out.write_text(text)
    with pytest.raises(SystemExit, match=r"job\.py: --out .*job\.json: (cannot be read|is no result)") as refusal:
        job.main(["--model", "tiny", "--out", str(out), "--contenders", "bf16_graphs"])
    assert "\n" not in str(refusal.value)
    assert out.read_text() == text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Traceback (most recent call last):\n  File\nRuntimeError: no such device\n", "RuntimeError: no such device"),
        ("RuntimeError: first\n[W722] a warning of the destructor\n", "RuntimeError: first"),
        ("torch.OutOfMemoryError: CUDA out of memory\n", "torch.OutOfMemoryError: CUDA out of memory"),
        ("pretrain_gpt: --x cannot be combined with --y: leave one out\n", "pretrain_gpt: --x cannot be combined with"),
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
        {"step": 6, "event": "recapture", "layers": 3, "parts": {"inputs": 0.5, "capture": 1.5}, "wait_s": 2.0},
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
    assert first["recapture_s"] == {"inputs": 0.5, "capture": 1.5}
    assert (first["recaptured_layers"], second["recaptured_layers"]) == (3, None)
    assert second["probe_s"] == second["recapture_s"] == {}
    assert second["longer_s"] == pytest.approx(0.1)
