"""Scores of the estimator ``measured``: what is trusted, and what stands in for the rest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from snip_megatron.errors import SnipError
from snip_megatron.precision import Gemm
from snip_megatron.sensitivity import SolveRequest, build_problem
from snip_megatron.sensitivity.loss_divergence import second_order
from snip_megatron.sensitivity.measured import trusted
from snip_megatron.sensitivity.policies import divergences, pinned_gemms
from snip_megatron.sensitivity.scores import option_scores, truth
from snip_megatron.sensitivity.weight_divergence import added_variance, weight_divergence
from snip_megatron.statistics.measured import Measured
from snip_megatron.statistics.table import StatisticsTable

from .synthetic import make_table

REQUEST = SolveRequest(estimator="measured", stage_tolerance=None)
FP4 = 1


def measured_table(loss: float = 3.0, drift: float = 2.0) -> StatisticsTable:
    """Everything measured, in constant proportion to the cheap estimator; losses without noise."""
    table = make_table()
    measured = Measured.nothing(len(table.linears), table.formats)
    change = loss * second_order(table, table.formats)
    measured["first_order"][:, 0] = 0.5
    measured["loss"][:, 0] = change[:, 0] + 0.5
    measured["drift"][:] = drift * weight_divergence(table, table.formats)
    measured["raw_drift"][:] = 1.01 * measured["drift"]
    measured["floor"][:, :2] = 0.01 * measured["drift"][:, :2]
    measured["variance"][:] = added_variance(table, table.formats)
    measured["step"][:] = table.step
    return replace(table, measured=measured)


def forget(table: StatisticsTable, *at: tuple[int, int, int]) -> None:
    """Make options unmeasured."""
    assert table.measured is not None
    for option in at:
        for column in table.measured.columns.values():
            column[option] = 0.0
        table.measured["step"][option] = -1.0


def test_what_was_measured_is_the_score() -> None:
    table = measured_table()
    loss, drift = divergences(table, REQUEST)
    np.testing.assert_allclose(loss, 3.0 * second_order(table, table.formats), rtol=1e-9)
    np.testing.assert_allclose(drift, 2.0 * weight_divergence(table, table.formats))


def test_the_unmeasured_get_the_cheap_score_on_the_measured_scale() -> None:
    table = measured_table()
    expected = divergences(table, REQUEST)
    forget(table, (1, 0, FP4), (5, 0, FP4), (2, 1, 0), (3, 2, FP4))
    for found, whole in zip(divergences(table, REQUEST), expected, strict=True):
        np.testing.assert_allclose(found, whole, rtol=1e-9)
    for linear in range(len(table.linears)):  # nothing known of a format: the other one's scale
        forget(table, (linear, 1, FP4))
    np.testing.assert_allclose(divergences(table, REQUEST)[1], expected[1])
    for linear in range(len(table.linears)):  # nothing of a GEMM: the cheap score itself
        forget(table, (linear, 1, 0))
    _, drift = divergences(table, REQUEST)
    np.testing.assert_allclose(drift[:, 1], weight_divergence(table, table.formats)[:, 1])
    np.testing.assert_allclose(drift[:, 0], expected[1][:, 0])


def test_the_scale_is_that_of_what_this_update_renewed() -> None:
    """Scores drift apart while training: older ones say less about today's ratio."""
    table = measured_table()
    assert table.measured is not None
    forget(table, (0, 1, FP4))
    table.measured["drift"][1:4, 1, FP4] *= 10.0
    table.measured["raw_drift"][1:4, 1, FP4] *= 10.0
    prior = weight_divergence(table, table.formats)[0, 1, FP4]
    for fresh, factor in ((slice(1, 4), 20.0), (slice(4, 8), 2.0)):
        table.measured["step"][1:, 1, FP4] = 0.0
        table.measured["step"][fresh, 1, FP4] = table.step
        assert divergences(table, REQUEST)[1][0, 1, FP4] == pytest.approx(factor * prior)


def test_what_stands_above_rounding_noise_is_trusted() -> None:
    table = measured_table()
    measured = table.measured
    assert measured is not None
    measured["loss_floor"][:, 0] = 1e-9
    measured["loss"][2, 0, 0] = 0.5 + 1.9e-9
    measured["loss"][3, 0, 0] = 0.5 - 2.1e-9  # negative, but plain
    measured["raw_drift"][1, 1, 0], measured["floor"][1, 1, 0] = 1.0, 0.8
    loss, drift = trusted(measured)
    assert not loss[2, 0, 0]
    assert loss[3, 0, 0]
    assert not loss[:, 1:].any()
    assert np.argwhere(~drift).tolist() == [[1, 1, 0]]
    expected = 2.0 * weight_divergence(table, table.formats)[1, 1, 0]
    assert divergences(table, REQUEST)[1][1, 1, 0] == pytest.approx(expected)


def test_a_noisy_loss_is_drawn_to_the_cheap_estimator_s() -> None:
    """fp8 a hundredth of fp4 and far below the noise: its scores are the scaled prior, fp4's what was measured."""
    table = measured_table()
    measured = table.measured
    assert measured is not None
    prior = second_order(table, table.formats)[:, 0]
    noise = float(prior[:, 0].mean()) * 30.0
    draws = np.random.default_rng(0).normal(size=prior.shape) * noise
    measured["loss"][:, 0] += draws
    measured["loss_floor"][:, 0] = noise
    loss, _ = divergences(table, REQUEST)
    np.testing.assert_allclose(loss[:, 0, FP4], 3.0 * prior[:, FP4] + draws[:, FP4], rtol=0.05)
    np.testing.assert_allclose(loss[:, 0, 0], 3.0 * prior[:, 0], rtol=0.5)
    assert np.abs(draws[:, 0]).max() > 10.0 * prior[:, 0].max()


def test_what_happens_to_stand_out_of_the_noise_sets_no_scale() -> None:
    """Ten times the truth, and therefore trusted: the scale comes from a format that is above the noise."""
    table = measured_table()
    measured = table.measured
    assert measured is not None
    prior = second_order(table, table.formats)[:, 0, 0]
    measured["loss_floor"][:, 0] = prior.mean()
    measured["loss"][:, 0, 0] = 0.5
    measured["loss"][:2, 0, 0] = 0.5 + 30.0 * prior[:2]
    forget(table, (7, 0, 0))
    assert divergences(table, REQUEST)[0][7, 0, 0] == pytest.approx(3.0 * prior[7])


def test_a_problem_of_it_keeps_four_bits_above_eight() -> None:
    table = measured_table()
    assert table.measured is not None
    table.measured["loss"][0, 0] = 0.5, 0.5 - 1.0
    table.measured["loss"][0, 0, 0] += 1e-3
    problem, scores = build_problem(table, REQUEST)
    item = problem.items[0]
    assert item.choices[1].loss >= item.choices[0].loss
    assert scores[item.id]["fp4"]["loss_divergence"] == pytest.approx(-1.0)
    for rule in ("split", "noise", "paper"):
        build_problem(table, replace(REQUEST, q=rule))


def test_scores_by_option_from_one_table() -> None:
    table = measured_table()
    assert table.measured is not None
    forget(table, (0, 0, FP4))
    table = replace(table, measured_again=table.measured)
    name = table.linears[1].name
    by_measured = option_scores(table, REQUEST)
    by_noise = option_scores(table, replace(REQUEST, estimator="noise", policy="random"))
    by_fisher = option_scores(table, replace(REQUEST, estimator="fisher"), "fp8")
    assert by_measured.keys() == by_noise.keys() == {f"{r.name}:{g.value}" for r in table.linears for g in Gemm}
    key = f"{name}:fprop"
    assert by_measured[key].delta_loss == pytest.approx(3.0 * by_noise[key].delta_loss)
    assert by_measured[key].delta_drift == pytest.approx(2.0 * by_noise[key].delta_drift)
    assert by_fisher[key].delta_loss == second_order(table, ("fp8",))[1, 0, 0]
    assert by_fisher[key].delta_drift == 0.0
    bare, again = truth(table, "fp4"), truth(table, "fp4", again=True)
    assert bare == again
    assert bare.keys() == by_measured.keys() - {f"{table.linears[0].name}:fprop"}
    assert bare[key].loss_trusted
    assert bare[key].delta_loss == pytest.approx(by_measured[key].delta_loss)


def test_refusals_say_what_to_record() -> None:
    table = make_table()
    with pytest.raises(SnipError, match="hold nothing measured; record them with --snip-estimator measured"):
        option_scores(table, REQUEST)
    with pytest.raises(SnipError, match="record them with --snip-measured-twice"):
        truth(measured_table(), "fp4", again=True)
    with pytest.raises(SnipError, match="hold no mxfp4"):
        truth(measured_table(), "mxfp4")
    with pytest.raises(SnipError, match="estimator 'guess': unknown"):
        option_scores(table, replace(REQUEST, estimator="guess"))


def test_pins_by_gemm_at_either_granularity() -> None:
    names = [row.name for row in make_table().linears]
    pins = (("*.layers.0.mlp.linear_fc1", "bf16"), (f"{names[4]}:dgrad", "fp8"))
    assert pinned_gemms(names, replace(REQUEST, pins=pins)) == {
        *((names[2], gemm) for gemm in Gemm),
        (names[4], Gemm.DGRAD),
    }
    by_layer = replace(REQUEST, pins=pins[:1], granularity="layer")
    assert pinned_gemms(names, by_layer) == {(names[2], gemm) for gemm in Gemm}
