"""The figures of a run, the recovered gap, and the paired test against the formula of Student's t."""

import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchmarks.quality.results import LAST_STEPS, Results, measure
from benchmarks.quality.runs import Run
from benchmarks.quality.statistics import differences, holm, paired, rows
from benchmarks.quality.tables import markdown

PLAN = {"kind": "from_warm", "budgets": [0.75], "validation": "map"}
FACTS = dict.fromkeys(("commit", "hardware", "torch", "date", "side_by_side"), "-")


def entry(policy: str, loss: float, seed: int = 1, budget: float | None = None, **fields: Any) -> dict[str, Any]:
    of_run = {"status": "done", "kind": "from_warm", "label": policy, "policy": policy, "budget": budget, "seed": seed}
    result = {"warm_sha256": "w", "fp4_share": 0.75, "validation": {"map": loss, "bf16": loss - 0.001}}
    return of_run | result | fields


def references(seed: int = 1, **fields: Any) -> list[dict[str, Any]]:
    return [entry("bf16", 2.0, seed, **fields), entry("uniform-fp4", 2.1, seed, **fields)]


def test_rows_take_references_of_their_own_block() -> None:
    entries = references(1) + references(2, warm_sha256="other") + [entry("snip", 2.01, 1, 0.75)]
    entries += [entry("snip", 2.02, 2, 0.75, warm_sha256="other"), entry("snip", 9.0, 3, 0.75)]  # seed 3: no reference
    row = next(row for row in rows(entries) if row.label == "snip")
    assert row.recovered["map"] == pytest.approx({("w", 1): 0.9, ("other", 2): 0.8})
    assert row.gap["bf16"] == pytest.approx({("w", 1): 0.01, ("other", 2): 0.02})


def test_of_two_runs_of_a_policy_and_seed_only_the_last_one_counts() -> None:
    """A comparison that goes on with other settings keeps its earlier runs in the file."""
    entries = [
        *references(),
        entry("snip", 2.05, 1, 0.75, average_share=0.5),
        entry("bf16", 3.0),
        entry("uniform-fp4", 3.1),
        entry("snip", 3.01, 1, 0.75, average_share=0.75),
    ]
    row = next(row for row in rows(entries) if row.label == "snip")
    assert row.recovered["map"] == pytest.approx({("w", 1): 0.9})
    assert row.share == 0.75


def test_differences_are_paired_by_seed_and_adjusted_together() -> None:
    """Seeds differ by far more than policies do: only pairing shows the difference."""
    entries = []
    for seed, shift in enumerate((0.0, 0.3, -0.2, 0.1), 1):
        bf16 = 2.0 + shift
        entries += [entry("bf16", bf16, seed), entry("uniform-fp4", bf16 + 0.1, seed)]
        noise = 1e-4 * (-1) ** seed
        ours = bf16 + 0.01 + noise
        entries += [entry("snip", ours, seed, 0.75), entry("random", ours + 0.03, seed, 0.75)]
        entries += [
            entry("fisher", ours - 2 * noise, seed, 0.75),
            entry("backward-first", ours + 0.01 + noise, seed, 0.75),
        ]
    plan = PLAN | {"ours": "snip", "theirs": ["random", "fisher", "backward-first"]}
    result = {d.theirs: d for d in differences(rows(entries), [plan])}
    assert set(result) == {"random", "fisher", "backward-first"}
    assert result["random"].mean == pytest.approx(0.3)
    assert result["random"].verdict == "better"
    assert result["fisher"].verdict == "no difference shown"
    records = {str(i): entry | FACTS for i, entry in enumerate(entries)}
    experiment = {"name": "e", "model": "nano", "planned": [plan]}
    page = markdown(Results(Path("e.json"), experiment, {"tokens": 1, "sha256": "0"}, {}, records))
    assert re.search(r"snip − random \| \+0\.300 .* better \|", page)
    raw = [d.p for d in result.values() if d.p is not None]
    assert [d.adjusted for d in result.values()] == pytest.approx(holm(raw))


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8).filter(lambda v: np.std(v) > 1e-6))
def test_paired_is_students_t(values: list[float]) -> None:
    mean, low, high, p = paired(values)
    centre, error, freedom = np.mean(values), np.std(values, ddof=1) / math.sqrt(len(values)), len(values) - 1
    half = stats.t.ppf(0.975, freedom) * error
    assert mean == pytest.approx(centre)
    assert (low, high) == pytest.approx((centre - half, centre + half))
    assert p == pytest.approx(2 * stats.t.sf(abs(centre) / error, freedom), abs=1e-12)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_rejects_what_the_closed_test_rejects(p: list[float]) -> None:
    """Holm is the closure of Bonferroni: a hypothesis's adjusted p is the largest over all sets that hold it."""
    indices = range(len(p))
    sets = [s for n in range(1, len(p) + 1) for s in itertools.combinations(indices, n)]
    closed = [max(min(1.0, len(s) * min(p[j] for j in s)) for s in sets if i in s) for i in indices]
    assert holm(p) == pytest.approx(closed)


def test_planned_comparisons_are_adjusted_among_themselves_only() -> None:
    """Four planned comparisons, two of which were made: p is that of four, and the first need not be called snip."""
    entries = []
    for seed, noise in enumerate((0.0, 1e-4, -1e-4, 5e-5, -2e-5), 1):
        entries += references(seed)
        losses = {"snip, auto": 2.01 + noise, "late-all": 2.02, "random": 2.05, "snip, static": 2.01}
        entries += [entry(label, loss, seed, 0.9) for label, loss in losses.items()]
    plan = PLAN | {"ours": "snip, auto", "theirs": ["late-all", "snip, static"], "budgets": [0.9, 0.95]}
    result = differences(rows(entries), [plan | {"validation": "bf16"}])
    assert [(d.ours, d.theirs, d.budget, d.validation) for d in result] == [
        ("snip, auto", "late-all", 0.9, "bf16"),
        ("snip, auto", "snip, static", 0.9, "bf16"),
    ]  # nothing ran at 95 %
    better, same = result
    assert (better.verdict, same.verdict) == ("better", "no difference shown")
    assert better.adjusted == pytest.approx(4 * better.p)


def run_of(policy: str, kind: str = "from_warm") -> Run:
    return Run(kind, policy, policy, None, None, 1, 60, ())


def write(folder: Path, losses: Sequence[float]) -> Path:
    """A run directory with these training losses from step 1200 on, and validations after the last."""
    metrics = [{"step": 1200 + i, "loss": loss, "fp4_fraction": 0.0, "time": 0.5 * i} for i, loss in enumerate(losses)]
    last = 1200 + len(losses)
    events = [{"event": "validation", "step": last, "formats": formats, "loss": 0.7} for formats in ("map", "bf16")]
    for name, lines in (("metrics.jsonl", metrics), ("events.jsonl", events)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_training_loss_is_the_mean_of_the_last_steps(tmp_path: Path) -> None:
    result = measure(run_of("bf16"), write(tmp_path, [0.7] * 10 + [0.6] * LAST_STEPS))
    assert result["train_loss"] == pytest.approx(0.6)
    assert result["last_step"] == 1259
    assert result["validation"] == {"map": 0.7, "bf16": 0.7}


LOST = [0.6846] + [2.6] * 10 + [2.45] * LAST_STEPS
"""Of a branch whose optimizer's main values were loaded into other parameters."""


def test_a_bf16_branch_that_does_not_continue_the_warm_checkpoint_is_no_reference(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rose from 0\.6846 in the first step to 2\.45: the branch does not continue"):
        measure(run_of("bf16"), write(tmp_path, LOST))
