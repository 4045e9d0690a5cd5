"""The figures of a finished run, read from its run directory."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.quality.results import LAST_STEPS, measure
from benchmarks.quality.runs import Run


def run_of(policy: str, kind: str = "from_warm") -> Run:
    return Run(kind, policy, policy, None, None, 1, 60, ())


def write(folder: Path, losses: Sequence[float], validation: float | None = 0.7) -> Path:
    """A run directory with these training losses from step 1200 on, and validations after the last."""
    metrics = [{"step": 1200 + i, "loss": loss, "fp4_fraction": 0.0, "time": 0.5 * i} for i, loss in enumerate(losses)]
    last = 1200 + len(losses)
    events = [
        {"event": "validation", "step": last, "formats": formats, "loss": validation} for formats in ("map", "bf16")
    ]
    for name, lines in (("metrics.jsonl", metrics), ("events.jsonl", events)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_training_loss_is_the_mean_of_the_last_steps(tmp_path: Path) -> None:
    found = measure(run_of("bf16"), write(tmp_path, [0.7] * 10 + [0.6] * LAST_STEPS))
    assert found["train_loss"] == pytest.approx(0.6)
    assert found["last_step"] == 1259
    assert found["validation"] == {"map": 0.7, "bf16": 0.7}


def test_a_validation_that_is_no_number_is_a_failure_of_the_run(tmp_path: Path) -> None:
    """A run directory holds null for NaN and Inf."""
    with pytest.raises(ValueError, match=r"no validation in map and bf16 after step 1209, but \{'map': nan"):
        measure(run_of("uniform-fp4"), write(tmp_path, [0.7] * 10, validation=None))


LOST = [0.6846] + [2.6] * 10 + [2.45] * LAST_STEPS
"""Of a branch whose optimizer's main values were loaded into other parameters."""


def test_a_bf16_branch_that_does_not_continue_the_warm_checkpoint_is_no_reference(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rose from 0\.6846 in the first step to 2\.45: the branch does not continue"):
        measure(run_of("bf16"), write(tmp_path, LOST))


@pytest.mark.parametrize(("policy", "kind"), [("uniform-fp4", "from_warm"), ("bf16", "from_scratch")])
def test_a_loss_that_rises_elsewhere_is_a_result(tmp_path: Path, policy: str, kind: str) -> None:
    assert measure(run_of(policy, kind), write(tmp_path, LOST))["train_loss"] == pytest.approx(2.45)


def test_a_bf16_branch_without_a_number_is_no_reference(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not continue"):
        measure(run_of("bf16"), write(tmp_path, [0.7] * 10 + [float("nan")] * LAST_STEPS))
