"""Loss divergence and weight divergence: the steps of the recipe one by one, on tables with known answers."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snip_megatron.precision import Role
from snip_megatron.precision.errors import SnipError
from snip_megatron.sensitivity.divergence import (
    dgrad_error2,
    dgrad_propagation,
    fprop_propagation,
    second_order,
    update_error,
    weight_divergence,
)
from snip_megatron.sensitivity.table import RHO_GRID

from .synthetic import make_table, scaled_loss, with_columns, with_experts


def test_second_order_is_half_the_tokens_times_the_squared_products() -> None:
    table = with_columns(make_table(), "by_format", c2=np.array([1e-6, 4e-6]))
    scores = second_order(table, ("fp4", "fp8"))
    assert scores.shape == (8, 3, 2)
    np.testing.assert_allclose(scores[:, 0], [[512 * 4e-6, 512 * 1e-6]] * 8)
    assert not scores[:, 1:].any()


def test_bf16_has_none_and_an_unrecorded_format_is_named() -> None:
    table = make_table(formats=("fp8", "fp4"))
    assert not second_order(table, ("bf16",)).any()
    with pytest.raises(SnipError, match=r"step 7 hold no nvfp4 \(only fp8, fp4\)"):
        second_order(table, ("fp8", "nvfp4"))


QKV, PROJ, FC1, FC2 = range(4)  # of layer 0; layer 1 follows


def quiet_table(**columns: np.ndarray | float):
    """All ratios 1 unless named: k = 1, fX = fG = 1, ‖E‖/‖Y‖ = 1, branch = residual."""
    table = make_table(layers=2)
    table = with_columns(table, "linear", **dict.fromkeys(("fx2", "xs2", "fg2", "gs2", "y2", "d2", "g2", "w2"), 1.0))
    table = with_columns(table, "by_format", c2=1.0, e2=1.0)
    table = with_columns(table, "boundary", **dict.fromkeys(("cn2", "r2", "fr2", "branch_r2"), 1.0))
    for group, names in (("linear", table.linear), ("by_format", table.by_format), ("boundary", table.boundary)):
        table = with_columns(table, group, **{c: v for c, v in columns.items() if c in names})
    return table


def test_fprop_reaches_all_gradients_and_later_activations() -> None:
    table = quiet_table(c2=np.array([[1.0, 4.0]] * 8), e2=0.0, fg2=0.09, fx2=0.16)
    reach = fprop_propagation(table, "fp4")  # k = 2: ρ = .6 everywhere, ξ = .8 above
    later = np.repeat([[0, 0, 1, 1, 2, 2, 3, 3]], 8, 0) > np.repeat([[0, 0, 1, 1, 2, 2, 3, 3]], 8, 0).T
    np.testing.assert_allclose(reach[0], np.where(later, 1.0, 0.6))


def test_fprop_local_effects_stay_in_the_sub_block() -> None:
    reach = fprop_propagation(quiet_table(c2=0.0, e2=0.25), "fp4")[0]
    expected = np.zeros((8, 8))
    for first in (QKV, FC1, 4 + QKV, 4 + FC1):
        expected[first, first] = expected[first, first + 1] = 0.5  # its other half's gradient; the second's X
    np.testing.assert_allclose(reach, expected)


def test_fprop_without_the_forward_noise_pass_is_refused() -> None:
    with pytest.raises(SnipError, match="lack the forward-noise pass"):
        fprop_propagation(quiet_table(cn2=0.0), "fp4")
    assert not fprop_propagation(quiet_table(cn2=0.0, c2=0.0, e2=0.0), "fp4")[0].any()


def test_dgrad_goes_down_unchanged() -> None:
    # ‖E_D‖/‖D‖ = 1/2 everywhere, a branch carries 1/10 of the residual gradient: q = .05.
    n = np.array([192.0, 64.0, 256.0, 64.0] * 2)
    table = quiet_table(dg_row2=(0.25 * n)[:, None], dw2=0.0, branch_r2=0.01)
    reach = dgrad_propagation(table, "fp4")[0]
    assert reach[4 + FC2, : 4 + FC1] == pytest.approx(0.05)
    assert reach[4 + FC2, 4 + FC1] == pytest.approx(0.5)  # behind the second: the first's G, undiluted
    assert reach[4 + FC1, 4 + FC1] == 0.0  # no gradient of its own
    assert reach[QKV].tolist() == [0.0] * 8
    assert not np.triu(reach, 1).any()  # nothing later in the network


def test_dgrad_s_error_is_diluted_by_what_flows_back_beside_it() -> None:
    """Readers of one sub-block carry 0.64 and 0.36 of its gradient. What does not lie on a path is not reached."""
    experts = {"experts.linear_fc1": 0, "experts.linear_fc2": 2, "shared_experts.linear_fc1": 0}
    experts |= {"shared_experts.linear_fc2": 2}
    latent = {"linear_q_down_proj": 0, "linear_kv_down_proj": 0, "linear_q_up_proj": 1, "linear_proj": 2}
    d2 = {"experts": [0.64, 1.0, 0.36, 1.0], "latent": [0.36, 0.64, 1.0, 1.0]}
    expected = {
        "experts": ([0.04, 0.04, 0.03, 0.03], {(5, 4), (7, 6)}),
        "latent": ([0.03, 0.04, 0.03, 0.05], {(6, 4), (7, 4), (7, 5), (7, 6)}),
    }
    for kind, module, paths in (("experts", "mlp", experts), ("latent", "self_attention", latent)):
        norms = np.array([1.0] * 4 + d2[kind])
        n = np.array([192.0, 64.0, 256.0, 64.0] * 2)
        table = quiet_table(dg_row2=(0.25 * norms * n)[:, None], dw2=0.0, branch_r2=0.01, d2=norms)
        second_layer = [
            replace(row, name=f"decoder.layers.1.{module}.{path}", sub_block=3, role=list(Role)[role])
            for row, (path, role) in zip(table.linears[4:], paths.items(), strict=True)
        ]
        reach = dgrad_propagation(replace(table, linears=(*table.linears[:4], *second_layer)), "fp4")[0]
        outside, inside = expected[kind]
        np.testing.assert_allclose(reach[4:, :4], np.repeat(np.array(outside)[:, None], 4, 1))
        assert {(4 + i, 4 + j) for i, j in zip(*np.nonzero(reach[4:, 4:]), strict=True)} == inside
        assert reach[4:, 4:].max() == pytest.approx(0.5)


def test_dgrad_of_the_first_block_is_not_free() -> None:
    table = quiet_table(branch_r2=0.01)
    reach = dgrad_propagation(table, "fp4")
    local = np.sqrt(dgrad_error2(table, "fp4"))
    # Sinks: the embedding, then the norm of every sub-block and the final norm.
    assert reach[1][QKV, 0] == pytest.approx(0.1 * local[QKV])
    assert reach[1][QKV, 1] == pytest.approx(local[QKV])  # its own norm, undiluted
    assert reach[1][QKV, 2:].tolist() == [0.0] * 4
    q = 0.1 * local[4 + FC2]
    assert reach[1][4 + FC2] == pytest.approx([q, q, q, q, local[4 + FC2], 0.0])
    assert np.all(weight_divergence(table, ("fp4",))[:, 1, 0] > 0.0)


def test_wgrad_moves_its_own_linear_only() -> None:
    table = quiet_table(wdrift2=4.0, w2=np.array([1.0, 4.0, 16.0, 64.0] * 2))
    np.testing.assert_allclose(weight_divergence(table, ("fp4",))[:, 2, 0], [2, 1, 0.5, 0.25] * 2)


def test_drift_interpolates_the_grid() -> None:
    drift2 = (3.0 * RHO_GRID**0.5)[None, :] ** 2
    rho = np.array([[1e-6], [1e-4], [np.sqrt(RHO_GRID[4] * RHO_GRID[5])], [1.0], [1e3], [0.0]])
    values = update_error(drift2, np.array([4.0]), rho)[:, 0]
    expected = [1.5e-2 * 1e-2, 1.5e-2, 1.5 * rho[2, 0] ** 0.5, 1.5, 1.5 * 10**0.5, 0.0]
    np.testing.assert_allclose(values, expected, rtol=1e-12, atol=1e-300)


@given(st.lists(st.floats(0.0, 1e6), min_size=2, max_size=8))
def test_drift_grows_with_the_error(rhos: list[float]) -> None:
    table = make_table()
    rho = np.sort(np.array(rhos))[:, None] * np.ones(len(table.linears))
    values = update_error(table.arrays["drift2"], table.linear["w2"], rho)
    assert np.all(np.diff(values, axis=0) >= -1e-12 * values[:-1])


@given(st.floats(1e-6, 1e6), st.integers(0, 20))
def test_scaling_the_loss_changes_nothing(c: float, seed: int) -> None:
    """AdamW forgets the scale of its gradients, and all errors are relative."""
    table = make_table(seed=seed)
    scaled = scaled_loss(table, c)
    actual, expected = (weight_divergence(t, ("fp8", "fp4")) for t in (scaled, table))
    np.testing.assert_allclose(actual, expected, rtol=1e-9)


def test_sums_over_experts() -> None:
    """Σ_e ‖δG_e‖²‖W_e‖² of weights of one size is an eighth of the product of sums."""
    dense, mixed = quiet_table(), with_experts(quiet_table(), experts=8)
    ratio = dgrad_error2(mixed, "fp4") / dgrad_error2(dense, "fp4")
    assert ratio.tolist() == pytest.approx([1.0] * 6 + [1 / 8] * 2)
