"""What a report says about the bytes that a rank sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import synthetic_run

from snip_megatron.precision import Format, PrecisionMap
from snip_megatron.records.run_data import load_run
from snip_megatron.records.run_directory import RunDirectory
from snip_megatron.reporting.report import render
from snip_megatron.reporting.sent import sent_sentence
from snip_megatron.reporting.summary import summarise

MIB = 2**20


def a_run(tmp: Path, *steps: Any, adopts: int | None = 3) -> Path:
    """A run whose steps sent so many bytes, and that adopted an fp4 map at step ``adopts``."""
    path = tmp / "run"
    with RunDirectory(path, synthetic_run.CONFIG, overwrite=False, resume_step=None) as run:
        for step, sent in enumerate(steps):
            if step == adopts:
                run.event(step, "adopt", version=7)
                run.write("maps", step, PrecisionMap.uniform(synthetic_run.LINEARS, Format.FP4, version=7).to_json())
            run.metric(step, 2.0, 1.0, 0.0, **({} if sent is None else {"wire_bytes": sent}))
    return path


def sentence(path: Path) -> str | None:
    run = load_run(path)
    return sent_sentence(run, [each.stretch for each in summarise(run).maps])


def test_bytes_under_a_map_and_in_bf16(tmp_path: Path) -> None:
    before, after = (
        {"all_gather": 6 * MIB, "send": MIB},
        {"all_gather": 2 * MIB, "reduce_scatter": 3 * MIB, "send": MIB},
    )
    rare = {"all_gather": 90 * MIB}  # a checkpoint's, say
    path = a_run(tmp_path, before, before, rare, after, rare, after)
    assert sentence(path) == (
        "Rank 0 sent 6 MiB a step under map 7 (reduce-scatters 3 MiB, all-gathers 2 MiB, sends to another stage 1 MiB);"
        " in bf16 7 MiB."
    )
    assert "Rank 0 sent 6 MiB a step under map 7" in render(load_run(path))


def test_a_step_number_that_is_broken_does_not_hold_up_the_report(tmp_path: Path) -> None:
    path = a_run(tmp_path, {"send": MIB}, {"send": MIB}, adopts=None)
    with (path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 4611686018427387904, "loss": 2.0}\n')
    assert sentence(path) == "Rank 0 sent 1 MiB a step in bf16 (sends to another stage 1 MiB)."


@pytest.mark.parametrize("recorded", [None, {}, "many", {"all_gather": None}])
def test_without_records_nothing_is_said(tmp_path: Path, recorded: Any) -> None:
    path = a_run(tmp_path, recorded, recorded)
    assert sentence(path) is None
    assert "Rank 0 sent" not in render(load_run(path))
