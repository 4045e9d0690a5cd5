"""Proxy validation on tables whose truth is known, and the trials that measure it."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.quality.proxy import CEILING, QUANTITIES, first_order, validate
from benchmarks.quality.truth import TRUTH_COLUMNS, Truth, plan_trials, truth_of
from snip_megatron.precision import DENSE_LAYER, Format, Gemm
from snip_megatron.sensitivity.divergence import second_order, weight_divergence
from snip_megatron.sensitivity.table import StatisticsTable
from tests.unit.sensitivity.synthetic import make_table, with_columns

FORMATS = ("fp8", "fp4")


def truth_from(table: StatisticsTable, noise: float, seed: int) -> Truth:
    """Return the recipe's values times random factors: a truth that the estimators know up to ``noise``."""
    rng = np.random.default_rng(seed)
    shape = (len(table.linears), 3, len(table.formats))
    truth = {column: np.zeros(shape) for column in TRUTH_COLUMNS}
    factor = np.exp(noise * rng.standard_normal(shape))
    drift = weight_divergence(table, FORMATS) * factor
    return truth | {"loss": second_order(table, FORMATS) * factor, "drift": drift, "raw_drift": drift.copy()}


def measured(noise: float = 0.0, again: float = 0.0, step: int = 7) -> tuple[StatisticsTable, Truth, Truth]:
    table = replace(make_table(layers=4, seed=3), step=step)
    return table, truth_from(table, noise, 1), truth_from(table, again, 2)


def test_an_estimator_that_is_the_truth_correlates_perfectly() -> None:
    validation = validate(*measured(), "fp4", "run")
    for quantity in QUANTITIES:
        for name in ("noise", CEILING):
            comparison = validation.of(quantity, name)
            assert comparison.rho == pytest.approx(1.0)
    loss, pooled = validation.of("loss", "noise"), validation.of("drift: all", "noise")
    assert (loss.options, pooled.options) == (16, 48)  # fprop only; all three GEMMs
    assert validation.of("drift: all", "fisher") is None  # it has no weight divergence


NAMES = [f"decoder.layers.{i}.{kind}" for i in range(2) for kind in DENSE_LAYER]


def test_every_option_is_forced_and_each_layer_perturbed_where_its_noise_starts() -> None:
    trials = plan_trials(NAMES, FORMATS)
    forced = {(t.gemm, name, t.format.value) for t in trials if t.format for name in t.linears}
    assert forced == {(gemm, name, fmt) for gemm in Gemm for name in NAMES for fmt in FORMATS}
    starts = [(t.gemm, t.linears) for t in trials if t.format is None]
    assert starts == [
        (gemm, (NAMES[4 * layer + at],)) for layer in (0, 1) for gemm, at in ((Gemm.FPROP, 0), (Gemm.DGRAD, 3))
    ]
    assert len(trials) == len(starts) + 2 * 8 * 2 + 2  # the wgrads of all linears at once


def test_the_floor_of_the_layer_is_subtracted_in_quadrature() -> None:
    trials = plan_trials(NAMES, FORMATS)
    drift2, loss, w2 = np.full((len(trials), 10), 25.0), np.full(len(trials), -3.0), np.array([4.0] * 9 + [0.0])
    at = trials.index(next(t for t in trials if t.format is None and t.gemm is Gemm.DGRAD))
    drift2[at], drift2[at, 0] = 9.0, 100.0  # the floor is above what was read: 0 remains
    loss[trials.index(trials[0])] = -0.5
    truth = truth_of(trials, drift2, loss, w2, NAMES, FORMATS)
    for name, expected in (("raw_drift", 9 * 2.5), ("drift", 8 * 2.0), ("floor", 2.5 + 8 * 1.5)):
        assert truth[name][:4, 1] == pytest.approx(expected)  # the owner without a norm counts as 0
    assert truth["drift"][:, 2] == pytest.approx(2.5)  # of its own linear
    assert not truth["floor"][:, 2].any()
    assert (truth["loss"][:, 0] == -3.0).all()
    assert (truth["loss_floor"][:4, 0] == 0.5).all()
    assert not truth["loss"][:, 1:].any()
    assert trials[1].format is Format.FP8


def test_first_order_known_answer() -> None:
    table = with_columns(make_table(), "linear", d2=3.0, gw2=5.0)
    table = with_columns(table, "by_format", dx_row2=7.0, dw2=11.0)
    n, k = 192, 64
    expected = np.sqrt(3.0 * 7.0 / (1024 * k) + 5.0 * 11.0 / (n * k))
    assert first_order(table, ("fp4",))[0, 0, 0] == pytest.approx(expected)
