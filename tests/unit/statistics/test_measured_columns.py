"""Columns from readings: floors, what repeats over microbatches and what does not, and their file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from snip_megatron.layers.registry import decoder_linear_names
from snip_megatron.precision import Gemm
from snip_megatron.statistics.measured import MEASURED_COLUMNS, Measured
from snip_megatron.statistics.measured_columns import Readings, measured_at, measured_columns, step_drift2, step_share
from snip_megatron.statistics.measured_schedule import Unit, all_units, plan_trials
from snip_megatron.statistics.table import (
    BOUNDARY_COLUMNS,
    FORMAT_COLUMNS,
    LINEAR_COLUMNS,
    RHO_GRID,
    LinearRow,
    SinkRow,
    StatisticsTable,
)

NAMES = decoder_linear_names(2)
FORMATS = ("fp8", "fp4")
OWNERS = len(NAMES) + 2
NOISE = np.full(len(NAMES), 1.0)


def table(tokens_per_step: int = 512) -> StatisticsTable:
    """‖W‖² = 4 and s2 = 1 everywhere; 100 elements a linear, 50 a sink."""
    n = len(NAMES)
    return StatisticsTable(
        step=40,
        tokens=512,
        tokens_per_step=tokens_per_step,
        formats=FORMATS,
        linears=tuple(LinearRow(name, 0, 10, 10) for name in NAMES),
        sinks=(SinkRow("embedding.word_embeddings", 0, 50), SinkRow("decoder.final_layernorm", 4, 50)),
        linear={c: np.full(n, 4.0 if c == "w2" else 1.0) for c in LINEAR_COLUMNS},
        by_format={c: np.ones((n, 2)) for c in FORMAT_COLUMNS},
        boundary={c: np.ones(5) for c in BOUNDARY_COLUMNS},
        drift2=np.ones((n, len(RHO_GRID))),
        sink_drift2=np.ones((2, len(RHO_GRID))),
        sink_w2=np.full(2, 4.0),
    )


def readings(units: list[Unit] | None = None, sizes: int = 1) -> Readings:
    trials = plan_trials(NAMES, FORMATS, all_units(NAMES) if units is None else units)
    rng = np.random.default_rng(0)
    shape = (len(trials), OWNERS)
    return Readings(
        trials=trials,
        drift2=rng.uniform(1.0, 2.0, (sizes, *shape)),
        norm2=rng.uniform(1.0, 2.0, shape),
        noise2=rng.uniform(0.0, 1.0, shape),
        natural2=np.full(OWNERS, 2.0),
        loss=rng.normal(size=len(trials)),
        first_order=rng.normal(size=len(trials)),
        repeated=True,
    )


def trial_of(found: Readings, gemm: Gemm, linear: str, fmt: str | None) -> int:
    for i, trial in enumerate(found.trials):
        same_format = trial.format is None if fmt is None else trial.format is not None and trial.format.value == fmt
        if trial.gemm is gemm and linear in trial.linears and same_format:
            return i
    raise AssertionError


def test_drift_is_summed_over_owners_above_their_floors() -> None:
    found, i = readings(), 5  # attention's proj of layer 1
    drift2 = found.drift2[0]
    option = trial_of(found, Gemm.DGRAD, NAMES[i], "fp4")
    nudge = trial_of(found, Gemm.DGRAD, NAMES[7], None)  # above the layer
    drift2[option] = 9.0
    drift2[nudge] = 5.0
    drift2[nudge, 2] = 30.0  # more than was read: nothing is left of it
    measured = measured_columns(found, table(), NOISE)
    at = (i, 1, 1)
    assert measured["raw_drift"][at] == pytest.approx(OWNERS * 3.0 / 2.0)
    assert measured["drift"][at] == pytest.approx((OWNERS - 1) * 2.0 / 2.0)
    assert measured["floor"][at] == pytest.approx(((OWNERS - 1) * 5.0**0.5 + 3.0) / 2.0)
    assert measured["loss"][at] == measured["first_order"][at] == measured["loss_floor"][at] == 0.0


def test_losses_belong_to_fprop_and_have_the_nudge_s_for_noise() -> None:
    found = readings()
    measured = measured_columns(found, table(), NOISE)
    option, nudge = trial_of(found, Gemm.FPROP, NAMES[2], "fp8"), trial_of(found, Gemm.FPROP, NAMES[0], None)
    assert measured["loss"][2, 0, 0] == found.loss[option]
    assert measured["first_order"][2, 0, 0] == found.first_order[option]
    assert measured["loss_floor"][2, 0, 0] == abs(found.loss[nudge])
    assert not measured["loss"][:, 1:].any()


def test_all_wgrads_of_one_trial_are_told_apart() -> None:
    found = readings()
    measured = measured_columns(found, table(), NOISE)
    trial = trial_of(found, Gemm.WGRAD, NAMES[0], "fp4")
    expected = np.sqrt(found.drift2[0, trial, : len(NAMES)]) / 2.0
    np.testing.assert_allclose(measured["drift"][:, 2, 1], expected)
    np.testing.assert_allclose(measured["raw_drift"][:, 2, 1], expected)
    assert not measured["floor"][:, 2].any()
    np.testing.assert_allclose(measured["variance"][:, 2, 1], found.norm2[trial, : len(NAMES)] * 100 / 900)


def test_variance_is_a_share_of_each_owner_s_own() -> None:
    found = readings()
    option = trial_of(found, Gemm.FPROP, NAMES[3], "fp4")
    found.norm2[option], found.norm2[trial_of(found, Gemm.FPROP, NAMES[0], None)] = 3.0, 1.0
    expected = 2.0 * (8 * 100 / 1.0 + 2 * 50 / 2.0) / 900
    assert measured_columns(found, table(), NOISE)["variance"][3, 0, 1] == pytest.approx(expected)
    alone = replace(found, natural2=np.zeros(OWNERS))  # one microbatch: nothing is known of the sinks'
    assert measured_columns(alone, table(), NOISE)["variance"][3, 0, 1] == pytest.approx(2.0 * 8 * 100 / 900)


def test_what_was_not_measured_is_unknown_and_renewal_keeps_it() -> None:
    first = measured_columns(readings([Unit(0, Gemm.FPROP)]), table(), NOISE)
    assert first.known[:4, 0].all()
    assert first.known[:, 2].all()
    assert not first.known[4:, 0].any()
    assert not first.known[:, 1].any()
    later = measured_columns(readings([Unit(1, Gemm.DGRAD)]), replace(table(), step=90), NOISE)
    both = first.renewed(later)
    assert both["step"][0, 0, 0] == 40
    assert both["step"][4, 1, 0] == both["step"][0, 2, 0] == 90
    np.testing.assert_array_equal(both["drift"][:4, 0], first["drift"][:4, 0])
    np.testing.assert_array_equal(both["drift"][4:, 1], later["drift"][4:, 1])
    ages = measured_at(NAMES, both)
    assert (ages[Unit(0, Gemm.FPROP)], ages[Unit(1, Gemm.DGRAD)], ages[Unit(1, Gemm.FPROP)]) == (40.0, 90.0, -1.0)


@pytest.mark.parametrize(("noise", "share"), [(0.0, 1.0), (1.0, 0.25), (0.5, 0.625), (-0.2, 1.0), (1.7, 0.25)])
def test_the_part_that_repeats_stays_and_the_rest_averages_out(noise: float, share: float) -> None:
    """A step has four times the probe's tokens: a quarter of the squared noise is left of it."""
    found = readings()
    found = replace(found, noise2=found.norm2 * noise)
    np.testing.assert_allclose(step_share(found, 0.25), share)
    np.testing.assert_allclose(step_share(replace(found, repeated=False), 0.25), 0.25)


def test_drift_of_a_step_lies_between_the_two_sizes() -> None:
    """Where drift is proportional to the error, it follows the error's size exactly."""
    found = readings(sizes=2)
    found.drift2[0] = 7.0 * found.norm2
    found.drift2[1] = 0.25 * found.drift2[0]
    np.testing.assert_allclose(step_drift2(found, 0.25), found.drift2[0] * step_share(found, 0.25))
    only_noise = replace(found, repeated=False)
    np.testing.assert_allclose(step_drift2(only_noise, 0.25), found.drift2[1])
    found.drift2[:, 3] = 0.0
    assert not step_drift2(found, 0.25)[3].any()


def test_shares_are_those_of_real_sums() -> None:
    """δ of sixteen microbatches, bias and noise: from four of them, what all sixteen average to."""
    rng = np.random.default_rng(3)
    size, parts, step = 4000, 4, 16
    for bias_share in (0.0, 0.3, 1.0):
        bias = bias_share * rng.normal(size=size)
        each = bias + rng.normal(size=(step, size))
        probe = each[:parts].mean(0)
        total, own = (probe**2).sum(), ((each[:parts] / parts) ** 2).sum()
        noise = (parts * own - total) / (parts - 1)  # of parts that are data parallel ranks
        values = {"norm2": np.full((1, 1), total), "noise2": np.full((1, 1), noise)}
        found = replace(readings(), **values)
        truth = (each.mean(0) ** 2).sum() / total
        assert float(step_share(found, parts / step)[0, 0]) == pytest.approx(truth, rel=0.1)


def test_file_round_trip_and_refusals() -> None:
    measured = measured_columns(readings(), table(), NOISE)
    again = Measured.from_bytes(measured.to_bytes())
    assert again.formats == FORMATS
    for name in MEASURED_COLUMNS:
        np.testing.assert_array_equal(again[name], measured[name], err_msg=name)
    assert measured.fits(len(NAMES), FORMATS)
    assert not measured.fits(len(NAMES), ("fp4",))
    for content in (b"", b"nothing", measured.to_bytes()[:-30]):
        with pytest.raises(ValueError, match="not measured columns"):
            Measured.from_bytes(content)


def test_a_table_keeps_them() -> None:
    plain = table()
    measured = measured_columns(readings(), plain, NOISE)
    whole = replace(plain, measured=measured, measured_again=Measured.nothing(len(NAMES), FORMATS))
    loaded = StatisticsTable.from_bytes(whole.to_bytes(), where="x")
    assert loaded.measured is not None
    assert loaded.arrays().keys() == whole.arrays().keys()
    for name, array in whole.arrays().items():
        np.testing.assert_array_equal(loaded.arrays()[name], array, err_msg=name)
    assert StatisticsTable.from_bytes(plain.to_bytes(), where="x").measured is None
    assert whole.non_finite() == []  # changes of the loss may be negative
    measured["drift"][3, 0, 1] = -1.0
    measured["loss"][0, 0, 0] = np.nan
    assert whole.non_finite() == [f"measured.loss at {NAMES[0]}", f"measured.drift at {NAMES[3]}"]
    with pytest.raises(ValueError, match="measured in fp4, expected fp8, fp4"):
        replace(plain, measured=Measured.nothing(len(NAMES), ("fp4",)))
    with pytest.raises(ValueError, match=r"measured loss: float64\(3, 3, 2\), expected float64\(8, 3, 2\)"):
        replace(plain, measured=Measured.nothing(3, FORMATS))
