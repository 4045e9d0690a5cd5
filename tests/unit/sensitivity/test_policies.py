"""Policies: what each protects, in which order, and that fixed ones choose nothing."""

import numpy as np
import pytest
from refusal import refusal

from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.linears import pinned_formats
from snip_megatron.sensitivity.policies import UNSOLVED, divergences, fixed_map, policy_scores
from snip_megatron.sensitivity.request import SolveRequest
from snip_megatron.sensitivity.table import StatisticsTable

from .synthetic import linear_rows, make_table, with_columns, with_experts

NAMES = [row.name for row in linear_rows(2)]


def scores_of(table: StatisticsTable, **fields) -> np.ndarray:
    """[linears, 3, formats]."""
    request = SolveRequest(**fields)
    return policy_scores(table, request, *divergences(table, request))


def per_flop(table: StatisticsTable, scores: np.ndarray) -> np.ndarray:
    """4-bit scores over FLOPs: what a solver goes by. [linears, 3]."""
    return scores[:, :, -1] / np.array([row.n * row.k for row in table.linears])[:, None]


def test_min_abs_err_uses_the_errors_of_each_gemm() -> None:
    columns = {"dx_row2": 1.0, "dw2": 4.0, "dg_row2": 9.0, "dg_col2": 16.0, "dx_col2": 25.0}
    table = with_columns(make_table(), "by_format", **columns)
    np.testing.assert_allclose(scores_of(table, policy="min-abs-err")[..., 0], [[1 + 2, 3 + 2, 4 + 5]] * 8)
    table = with_columns(table, "linear", x2=100.0, w2=400.0, g2=900.0)
    expected = [1 / 10 + 2 / 20, 3 / 30 + 2 / 20, 4 / 30 + 5 / 10]
    np.testing.assert_allclose(scores_of(table, policy="min-rel-err")[..., 0], [expected] * 8)


def test_random_is_seeded_and_follows_the_seed_only() -> None:
    a, b = make_table(seed=1), make_table(seed=2)
    np.testing.assert_array_equal(scores_of(a, policy="random"), scores_of(b, policy="random"))
    first, other = (scores_of(a, policy="random", seed=s)[..., 1].ravel() for s in (1, 5))
    assert np.argsort(other).tolist() != np.argsort(first).tolist()
    assert np.isfinite(scores_of(a, policy="random", seed=-3)).all()


def test_backward_first_puts_every_dgrad_and_wgrad_before_any_fprop() -> None:
    table = make_table(layers=3)
    c2 = table.by_format["c2"].copy()
    c2[4] = 0.0  # an fprop without loss divergence is still an fprop
    table = with_columns(table, "by_format", c2=c2)
    scores = scores_of(table, policy="backward-first")
    assert scores[:, 1:, 1].max() < (scores[:, 0, 1] - scores[:, 0, 0]).min()
    by_loss = divergences(table, SolveRequest())[0][:, 0, 1]
    np.testing.assert_array_equal(np.argsort(scores[:, 0, 1]), np.argsort(by_loss))


def test_layer_id_protects_the_ends() -> None:
    table = make_table(layers=5)
    by_block = per_flop(table, scores_of(table, policy="layer-id")).reshape(5, -1)
    assert np.ptp(by_block, axis=1).max() < 1e-12
    order = by_block[:, 0]
    np.testing.assert_allclose(order[::-1], order)
    assert order[0] > order[1] > order[2]


@pytest.mark.parametrize(("layers", "kept"), [(2, 1), (8, 1), (22, 3), (80, 12)])
def test_tail_protects_the_last_blocks(layers: int, kept: int) -> None:
    table = make_table(layers=layers)
    blocks = per_flop(table, scores_of(table, policy="tail")).reshape(layers, -1).min(axis=1)
    assert np.flatnonzero(blocks).tolist() == list(range(layers - kept, layers))


def test_layer_type_protects_the_named_kinds_in_order() -> None:
    table = make_table()
    qkv, proj, fc1, fc2 = per_flop(table, scores_of(table, policy="layer-type"))[:4, 0]
    assert fc2 > proj > fc1 == qkv == 0.0


def test_experts_are_protected_like_the_mlp_in_whose_place_they_are() -> None:
    table = with_experts(make_table())
    assert table.linears[-1].experts > 1
    scores = scores_of(table, policy="layer-type")
    assert scores[-1, 0, 1] / scores[3, 0, 1] == pytest.approx(2.0)  # the dense fc2; by FLOPs: two experts a token


@pytest.mark.parametrize("policy", UNSOLVED)
def test_fixed_policies_choose_nothing(policy: str) -> None:
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


@pytest.mark.parametrize(
    ("glob", "granularity", "hint"),
    [
        ("decoder.layers.9.*", "gemm", "the first option is decoder.layers.0.self_attention.linear_qkv:fprop"),
        ("*:dgrad", "layer", "at granularity layer a pin names linears, not GEMMs"),
    ],
)
def test_a_pin_that_matches_nothing_is_an_error(glob: str, granularity: str, hint: str) -> None:
    message = refusal(pinned_formats, NAMES, ((glob, "bf16"),), granularity)
    assert message == f"--snip-pin {glob}=bf16: matches no option; {hint}"
