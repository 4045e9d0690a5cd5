"""Which options a measurement of the truth forces, and what it makes of the readings."""

import numpy as np
import pytest

from benchmarks.quality.truth import plan_trials, truth_of
from snip_megatron.precision import DENSE_LAYER, Format, Gemm

NAMES = [f"decoder.layers.{i}.{kind}" for i in range(2) for kind in DENSE_LAYER]
FORMATS = ["fp8", "fp4"]


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
    drift2[at], drift2[at, 0] = 9.0, 100.0  # more than was read: nothing is left of it
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
