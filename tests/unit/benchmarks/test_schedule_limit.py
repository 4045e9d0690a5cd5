"""The limit of plans over time: the fit finds parts that made the figures, and plans obey what must hold for any."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.interpolate import PchipInterpolator

from benchmarks.quality import schedule_limit
from benchmarks.quality.schedule_limit import Gaps, Model, best, fit, rate_weights

EXPERIMENT: dict[str, Any] = {
    "training": {"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 100},
    "warm": {"steps": 1200},
    "phases": [{"steps": 500}],
}
CARRIED, FAST, STANDING, STEPS, SCALE = 0.25, 0.15, 0.6, 25.0, 0.01
BUDGETS = (0.8, 0.9, 0.95)
CURVE = PchipInterpolator([0.0, 0.8, 0.9, 0.95, 1.0], [0.04, 0.18, 0.38, 0.55, 1.0])


def made_up(weights: np.ndarray) -> Gaps:
    """Gaps of a loss with known parts, all of them of the forward."""
    gaps: Gaps = {
        ("bf16", None): {"map": 0.0, "bf16": 0.0},
        ("uniform-fp8", None): {"map": 0.04 * SCALE, "bf16": 0.01 * SCALE},
        ("uniform-fp4", None): {"map": SCALE, "bf16": (CARRIED + FAST) * SCALE},
    }
    for label, share in (("late-all", 1.0), ("late-forward", 3.0)):
        for budget in BUDGETS:
            steps = round((1.0 - budget) * share * len(weights))
            left = CARRIED * weights[: len(weights) - steps].sum() + FAST * np.exp(-steps / STEPS)
            gaps[label, budget] = {"map": left * SCALE, "bf16": left * SCALE}
    for budget in BUDGETS:
        gaps["snip, static", budget] = {"map": float(CURVE(budget)) * SCALE, "bf16": 0.0}
        gaps["snip, auto", budget] = {"map": 0.2 * SCALE, "bf16": 0.0}
    return gaps


@pytest.fixture(autouse=True)
def few_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_limit, "STARTS", 3)


@pytest.fixture(scope="module")
def model() -> Model:
    weights = rate_weights(EXPERIMENT)
    return fit(made_up(weights), weights)


def test_the_fit_finds_the_parts(model: Model) -> None:
    assert model.carried == pytest.approx(CARRIED, rel=1e-3)
    assert model.fast == pytest.approx(FAST, rel=1e-3)
    assert model.standing == pytest.approx(STANDING)
    assert model.steps == pytest.approx(STEPS, rel=1e-2)
    assert model.residual < 1e-6


def test_one_phase_loses_what_its_map_loses(model: Model) -> None:
    assert model.weights.sum() == pytest.approx(1.0)
    assert model.loss((0.0,), np.array([1.0])) == pytest.approx(1.0, rel=1e-3)
    recovered, shares = best(model, CURVE, (0.0,), 0.9)
    assert recovered == pytest.approx(1.0 - float(CURVE(0.9)), abs=2e-3)
    assert shares == pytest.approx([0.9])


def test_more_phases_recover_no_less_and_keep_the_average(model: Model) -> None:
    coarse, _ = best(model, CURVE, (0.0, 0.5), 0.9)
    fine, shares = best(model, CURVE, (0.0, 0.5, 0.75, 0.9), 0.9)
    assert fine > coarse + 0.01
    assert shares[-1] == min(shares)  # precision late
    assert np.diff([0.0, 0.5, 0.75, 0.9, 1.0]) @ shares == pytest.approx(0.9, abs=2e-3)
