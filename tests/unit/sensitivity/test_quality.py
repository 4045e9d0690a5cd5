"""Q: the two rules, the projection over formats, the rounding."""

import numpy as np
import pytest

from snip_megatron.sensitivity.policies import policy_scores
from snip_megatron.sensitivity.problem import monotone, rounded
from snip_megatron.sensitivity.request import BACKWARD_SHARE, SolveRequest

from .synthetic import make_table

RNG = np.random.default_rng(0)
TABLE = make_table(1)
LOSS, WEIGHT = (RNG.uniform(0.1, 1.0, (4, 3, 2)) * [1e-2, 1.0] for _ in range(2))
LOSS[:, 1:] = 0.0


def combine(request: SolveRequest, loss: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return policy_scores(TABLE, request, loss, weight)


def test_split_takes_fprop_from_the_loss_and_scales_the_rest() -> None:
    q = combine(SolveRequest(q="split"), LOSS, WEIGHT)
    np.testing.assert_array_equal(q[:, 0], LOSS[:, 0])
    assert q[:, 1:, 1].sum() == pytest.approx(BACKWARD_SHARE * q[:, 0, 1].sum())
    np.testing.assert_allclose(q[:, 1:] / q[0, 1, 1], WEIGHT[:, 1:] / WEIGHT[0, 1, 1])


def test_paper_sums_normalised_terms() -> None:
    q = combine(SolveRequest(q="paper"), LOSS, WEIGHT)
    assert q[:, :, 1].sum() == pytest.approx(2.0)
    rescaled = combine(SolveRequest(q="paper"), 7 * LOSS, 0.01 * WEIGHT)
    np.testing.assert_allclose(rescaled, q)


@pytest.mark.parametrize("rule", ["split", "paper"])
def test_without_weight_divergence_the_loss_decides_alone(rule: str) -> None:
    q = combine(SolveRequest(q=rule), LOSS, np.zeros_like(LOSS))
    np.testing.assert_array_equal(np.argsort(q[:, 0, 1]), np.argsort(LOSS[:, 0, 1]))
    assert not q[:, 1:].any()
    assert np.isfinite(combine(SolveRequest(q=rule), 0 * LOSS, 0 * LOSS)).all()


def test_fewer_bits_are_never_better() -> None:
    scores = np.array([[3.0, 0.0, 1.0], [1.0, -2.0, 2.0], [2.0, 0.0, -5.0]])
    projected = monotone(scores, ("fp8", "bf16", "fp4"))
    assert projected.tolist() == [[3.0, 0.0, 3.0], [1.0, -2.0, 2.0], [2.0, 0.0, 2.0]]


def test_rounding_keeps_four_digits() -> None:
    values = np.array([[1.23456e-12, -987.654321], [0.0, 1e3]])
    assert rounded(values).tolist() == [[1.235e-12, -987.7], [0.0, 1e3]]
