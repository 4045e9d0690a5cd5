"""Proxy validation and staleness on tables whose truth is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sensitivity.synthetic import make_table, with_columns

from snip_megatron.cli import main
from snip_megatron.errors import SnipError
from snip_megatron.evaluation import proxy
from snip_megatron.evaluation.proxy import CEILING, QUANTITIES, find_tables, spearman, validate
from snip_megatron.evaluation.staleness import stale, summarise
from snip_megatron.sensitivity import scores
from snip_megatron.sensitivity.loss_divergence import FPROP, second_order
from snip_megatron.sensitivity.policies import ESTIMATORS
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.sensitivity.weight_divergence import weight_divergence
from snip_megatron.statistics.measured import Measured
from snip_megatron.statistics.table import StatisticsTable

FORMATS = ("fp8", "fp4")
FP4 = FORMATS.index("fp4")


def measured_from(table: StatisticsTable, noise: float, seed: int) -> Measured:
    """What the recipe says, times a random factor: truth that the estimators know up to ``noise``."""
    rng = np.random.default_rng(seed)
    shape = (len(table.linears), 3, len(table.formats))
    truth = Measured.nothing(len(table.linears), table.formats)
    factor = np.exp(noise * rng.standard_normal(shape))
    truth.columns["loss"][:] = second_order(table, FORMATS) * factor
    drift = weight_divergence(table, FORMATS) * factor
    truth.columns["drift"][:] = drift
    truth.columns["raw_drift"][:] = drift
    truth.columns["step"][:] = table.step
    return truth


def table_with_truth(noise: float = 0.0, *, again: float | None = None, step: int = 7) -> StatisticsTable:
    table = replace(make_table(layers=4, seed=3), step=step)
    table = with_columns(table, "linear", bg2=0.0)
    twice = None if again is None else measured_from(table, again, 2)
    return replace(table, measured=measured_from(table, noise, 1), measured_again=twice)


def test_an_estimator_that_is_the_truth_correlates_perfectly() -> None:
    validation = validate(table_with_truth(again=0.0), "fp4", "run")
    for quantity in QUANTITIES:
        for name in ("noise", CEILING):
            comparison = validation.of(quantity, name)
            assert comparison is not None
            assert comparison.rho == pytest.approx(1.0)
        assert validation.met(quantity) is True
    loss, pooled = validation.of("loss", "noise"), validation.of("drift: all", "noise")
    assert loss is not None
    assert pooled is not None
    assert (loss.options, pooled.options) == (16, 48)  # fprop only; all three GEMMs
    assert validation.of("drift: all", "fisher") is None  # it has no weight divergence


def test_an_estimator_that_is_added_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (proxy, scores):
        monkeypatch.setattr(module, "ESTIMATORS", (*ESTIMATORS, "added"))
    added, fisher = (validate(table_with_truth(0.1), "fp4", "run").of("loss", name) for name in ("added", "fisher"))
    assert added is not None
    assert fisher is not None
    assert added.rho == fisher.rho  # divergences() knows no other ΔL


def test_targets_follow_the_ceiling() -> None:
    noisy = validate(table_with_truth(3.0), "fp4", "run")
    assert noisy.met("loss") is False
    assert noisy.met("drift: all") is False
    excused = validate(table_with_truth(3.0, again=3.0), "fp4", "run")
    loss, ceiling = excused.of("loss", "noise"), excused.of("loss", CEILING)
    assert loss is not None
    assert ceiling is not None
    assert loss.rho is not None
    assert ceiling.rho is not None
    assert excused.met("loss") is (loss.rho >= min(0.95, ceiling.rho - 0.03))


def test_options_below_the_rounding_noise_are_counted_and_left_out_of_the_second_figure() -> None:
    table = table_with_truth(0.3)
    assert table.measured is not None
    drowned = np.zeros((16, 3, 2), dtype=bool)
    drowned[:8, FPROP] = True
    table.measured.columns["floor"][drowned] = 1e6
    table.measured.columns["drift"][drowned] = 0.0
    comparison = validate(table, "fp4", "run").of("drift: fprop", "noise")
    assert comparison is not None
    assert (comparison.options, comparison.trusted) == (16, 8)
    assert comparison.trusted_rho != comparison.rho


def test_a_rule_that_inverts_the_order_is_seen() -> None:
    table = table_with_truth()
    assert table.measured is not None
    table.measured.columns["loss"][:] *= -1.0
    comparison = validate(table, "fp4", "run").of("loss", "fisher")
    assert comparison is not None
    assert comparison.rho == pytest.approx(-1.0)


def test_spearman_of_too_little_is_none() -> None:
    assert spearman([1.0, 2.0], [1.0, 2.0]) is None
    assert spearman([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None
    assert spearman([1.0, 2.0, 3.0], [1.0, 4.0, 9.0]) == pytest.approx(1.0)


def save(folder: Path, *tables: StatisticsTable) -> Path:
    (folder / "stats").mkdir(parents=True)
    for table in tables:
        (folder / "stats" / f"step_{table.step}.npz").write_bytes(table.to_bytes())
    return folder


def test_the_command_reads_runs_and_writes_figures_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = save(tmp_path / "run", table_with_truth(0.1, again=0.1, step=5), table_with_truth(0.1, step=11))
    assert main(["validate-proxy", str(run), "--out", str(tmp_path / "out"), "--gpus", "0"]) == 0
    body = json.loads((tmp_path / "out" / "proxy.json").read_text())
    assert [v["step"] for v in body["validations"]] == [5, 11]
    shown = capsys.readouterr().out
    assert "| loss | 16 (16 above noise) | " in shown
    assert "loss: noise ≥ 0.95 or within 0.03 of the ceiling: met" in shown
    assert (tmp_path / "out" / "proxy.html").read_text().count('class="plotly-graph-div"') == 6


def test_tables_without_truth_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(SnipError, match="no run directory with statistics"):
        find_tables(tmp_path)
    run = save(tmp_path / "run", make_table())
    assert main(["validate-proxy", str(run), "--out", str(tmp_path / "out"), "--gpus", "0"]) == 2


def aged(table: StatisticsTable, step: int, change: float) -> StatisticsTable:
    rng = np.random.default_rng(step)
    factor = np.exp(change * rng.standard_normal((len(table.linears), 1)))
    return replace(with_columns(table, "by_format", c2=table.by_format["c2"] * factor), step=step)


def test_scores_that_change_fast_early_and_slowly_late() -> None:
    table = make_table(layers=4, seed=3)
    tables = [aged(table, step, 2.0 if step < 50 else 0.002) for step in (0, 10, 20, 80, 90, 100)]
    pairs = stale(tables, SolveRequest(formats=FORMATS, target=0.5))
    assert {(pair.phase, pair.lag) for pair in pairs} == {(p, lag) for p in ("early", "late") for lag in (10, 20)}
    early, late = (next(s for s in summarise(pairs) if s.phase == p and s.lag == 10) for p in ("early", "late"))
    assert (early.pairs, late.pairs) == (2, 2)
    assert early.loss is not None
    assert late.loss is not None
    assert early.loss < 0.9 < 0.98 < late.loss
    assert early.excess is not None
    assert late.excess is not None
    assert early.excess > late.excess >= 0.0


def test_equal_scores_are_never_stale() -> None:
    table = make_table(layers=4, seed=3)
    tables = [replace(table, step=step) for step in (0, 1, 10, 11)]
    for pair in stale(tables, SolveRequest(formats=FORMATS)):
        assert (pair.loss, pair.drift, pair.score) == (pytest.approx(1.0),) * 3
        assert pair.excess == pytest.approx(0.0)


def test_staleness_needs_two_updates_of_one_model_in_one_half_of_its_steps(tmp_path: Path) -> None:
    for steps in ((0,), (0, 10)):
        with pytest.raises(SnipError, match="two updates in one half of its steps"):
            stale([replace(make_table(), step=step) for step in steps], SolveRequest(formats=FORMATS))
    with pytest.raises(SnipError, match="the linears differ"):
        stale([make_table(2), make_table(2), make_table(4)], SolveRequest())
    tables = [replace(make_table(layers=4, seed=3), step=step) for step in (0, 1, 10, 11)]
    run = save(tmp_path / "run", *tables)
    assert main(["validate-proxy", "--stale", str(run), "--out", str(tmp_path / "out"), "--gpus", "0"]) == 0
    body = json.loads((tmp_path / "out" / "stale.json").read_text())
    assert [(s["phase"], s["lag"]) for s in body["runs"][0]["summary"]] == [("early", 1), ("late", 1)]
    assert (tmp_path / "out" / "stale.html").exists()
