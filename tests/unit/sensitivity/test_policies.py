"""Policies: what each protects, the rules of Q, and the maps that are known before training."""


import numpy as np
import pytest
from dense_names import dense_names

from snip_megatron.precision import Format, Gemm, PrecisionMap, misplaced
from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.linears import pinned_formats
from snip_megatron.sensitivity.policies import (
    FIXED,
    POLICIES,
    divergences,
    fixed_map,
    formats_of,
    policy_scores,
)
from snip_megatron.sensitivity.request import BACKWARD_SHARE, SolveRequest
from snip_megatron.sensitivity.table import StatisticsTable

from .synthetic import linear_rows, make_table, with_columns

NAMES = [row.name for row in linear_rows(2)]


def scores_of(table: StatisticsTable, **fields) -> np.ndarray:
    """[linears, 3, formats]."""
    request = SolveRequest(**fields)
    return policy_scores(table, request, *divergences(table, request))


def test_backward_first_puts_every_dgrad_and_wgrad_before_any_fprop() -> None:
    table = make_table(layers=3)
    c2 = table.by_format["c2"].copy()
    c2[4] = 0.0  # an fprop without loss divergence is still an fprop
    table = with_columns(table, "by_format", c2=c2)
    scores = scores_of(table, policy="backward-first")
    assert scores[:, 1:, 1].max() < (scores[:, 0, 1] - scores[:, 0, 0]).min()
    by_loss = divergences(table, SolveRequest())[0][:, 0, 1]
    np.testing.assert_array_equal(np.argsort(scores[:, 0, 1]), np.argsort(by_loss))


def test_fixed_policies_choose_nothing() -> None:
    for policy in FIXED:
        with pytest.raises(SnipError, match=f"{policy} fixes the map"):
            scores_of(make_table(), policy=policy)
    assert fixed_map("snip", NAMES) is None


def test_the_last_matching_pin_wins() -> None:
    pins = (("*", "bf16"), ("*linear_fc2", "fp8"), ("*:wgrad", "fp4"))
    fixed = pinned_formats(NAMES, pins)
    assert len(fixed) == 3 * len(NAMES)
    assert fixed[f"{NAMES[0]}:fprop"] == "bf16"
    assert fixed[f"{NAMES[3]}:dgrad"] == "fp8"
    assert fixed[f"{NAMES[3]}:wgrad"] == "fp4"
    assert pinned_formats(NAMES, (("*.0.*", "bf16"),), "layer") == dict.fromkeys(NAMES[:4], "bf16")


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


DENSE = dense_names(20)
HARDWARE = [("mxfp8", "nvfp4"), ("mxfp8", "mxfp4"), ("bf16", "mxfp8", "nvfp4", "nvfp4_46", "nvfp4_hadamard")]


def made(policy: str, *formats: str, names: list[str] = DENSE) -> PrecisionMap:
    found = fixed_map(policy, names, formats=formats)
    assert found is not None
    return found


@pytest.mark.parametrize("formats", [(), ("fp8", "fp4"), *HARDWARE])
@pytest.mark.parametrize("policy", FIXED)
def test_a_map_covers_every_gemm_with_formats_that_may_run_there(policy: str, formats: tuple[str, ...]) -> None:
    assert policy in POLICIES
    found = made(policy, *formats)
    used = {(g, found.format_of(n, g)) for n in DENSE for g in Gemm}
    assert not [misplaced(fmt, g) for g, fmt in used if misplaced(fmt, g)]
    assert {fmt for _, fmt in used} == formats_of(policy, formats)


@pytest.mark.parametrize(
    ("formats", "eight", "four"),
    [
        ((), "fp8", "fp4"),
        (("mxfp4_hadamard", "mxfp4", "mxfp8"), "mxfp8", "mxfp4"),
        (("fp8_tensor", "fp8"), "fp8", "fp4"),
    ],
)
def test_uniform_maps_take_the_candidate_of_their_size(formats: tuple[str, ...], eight: str, four: str) -> None:
    assert formats_of("uniform-fp8", formats) == {Format(eight)}
    assert formats_of("uniform-fp4", formats) == {Format(four)}
