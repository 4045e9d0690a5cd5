"""Which GPUs the runs of a comparison get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from snip_megatron.cli import main
from snip_megatron.commands import validate_proxy
from snip_megatron.commands.compare import devices
from snip_megatron.errors import SnipError

NANO = Path(__file__).resolve().parents[3] / "benchmarks/quality/experiments" / "nano.json"


@pytest.mark.parametrize(
    ("gpus", "ranks", "per_gpu", "expected"),
    [
        ([], 1, None, [None]),
        ([], 2, 3, [None] * 3),
        (["0", "1"], 1, 2, ["0", "1", "0", "1"]),
        (["0"], 1, None, ["0"] * 8),
        (["0", "1", "2", "3", "4"], 2, None, ["0,1", "2,3"]),
        (["4", "5"], 2, 2, ["4,5", "4,5"]),
    ],
)
def test_a_run_of_several_ranks_has_as_many_gpus(
    gpus: list[str], ranks: int, per_gpu: int | None, expected: list[str | None]
) -> None:
    assert devices(gpus, ranks, per_gpu) == expected


def test_too_few_gpus_and_no_run_are_refused() -> None:
    with pytest.raises(SnipError, match=r"training\.ranks: 2: a run needs as many GPUs, and 1 are used"):
        devices(["0"], 2, None)
    with pytest.raises(SnipError, match="--per-gpu 0"):
        devices([], 1, 0)


class Recorded(Exception):
    """Holds the arguments of record_truth()."""


def record(monkeypatch: pytest.MonkeyPatch, prepared: Path, ranks: int, *arguments: str) -> Any:
    def record_truth(*given: Any) -> None:
        raise Recorded(*given)

    monkeypatch.setattr(validate_proxy, "stop_on_signals", lambda pool: [])  # the signals are pytest's here
    monkeypatch.setattr(validate_proxy, "select_gpus", lambda wanted: ["0", "1", "2", "3"])
    monkeypatch.setattr(validate_proxy, "record_truth", record_truth)
    body = json.loads(NANO.read_text())
    body["training"]["ranks"] = ranks
    experiment = prepared / "e.json"
    experiment.write_text(json.dumps(body))
    with pytest.raises(Recorded) as caught:
        main(["validate-proxy", str(experiment), "--data", str(prepared), "--out", str(prepared / "out"), *arguments])
    return caught.value.args


def test_a_measurement_of_several_ranks_has_as_many_gpus(monkeypatch: pytest.MonkeyPatch, prepared: Path) -> None:
    for ranks, expected in ((1, ["0", "1", "2", "3"]), (2, ["0,1", "2,3"])):
        *_, pool = record(monkeypatch, prepared, ranks)
        assert pool.devices == expected


def test_a_step_that_is_named_twice_is_measured_once(monkeypatch: pytest.MonkeyPatch, prepared: Path) -> None:
    """Two measurements at a time would remove each other's run directory."""
    assert record(monkeypatch, prepared, 1, "--steps", "8,4,8")[3] == (8, 4)


@pytest.mark.parametrize("fmt", ["fp9", "bf16", "nvfp4_hadamard"])
def test_a_format_that_cannot_be_compared_is_refused_before_the_warm_run(
    fmt: str, prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["validate-proxy", str(NANO), "--data", str(prepared), "--out", str(prepared / "out"), "--gpus", "0"]
    assert main([*arguments, "--format", fmt]) == 2
    assert fmt in capsys.readouterr().err
    assert not (prepared / "out").exists()
