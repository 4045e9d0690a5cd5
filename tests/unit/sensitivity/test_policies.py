"""Policies: what each protects, the rules of Q, and the maps and plans that are known before training."""

from dataclasses import replace

import numpy as np
import pytest
from dense_names import dense_names
from hypothesis import assume, given
from hypothesis import strategies as st

from snip_megatron.precision import Format, Gemm, LinearId, PrecisionMap, fp4_fraction, misplaced
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.linears import pinned_formats
from snip_megatron.sensitivity.policies import (
    FIXED,
    LATE,
    POLICIES,
    divergences,
    fixed_map,
    formats_of,
    late_plan,
    late_shares,
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


def test_rules_protect_ends_the_last_blocks_and_kinds() -> None:
    table = make_table(layers=22)
    per_layer = per_flop(table, scores_of(table, policy="layer-id")).reshape(22, -1)
    assert np.ptp(per_layer, axis=1).max() < 1e-12
    np.testing.assert_allclose(per_layer[::-1, 0], per_layer[:, 0])
    assert (np.diff(per_layer[:11, 0]) < 0).all()
    tail = per_flop(table, scores_of(table, policy="tail")).reshape(22, -1).min(axis=1)
    assert np.flatnonzero(tail).tolist() == [19, 20, 21]
    qkv, proj, fc1, fc2 = per_flop(table, scores_of(table, policy="layer-type"))[:4, 0]
    assert fc2 > proj > fc1 == qkv == 0.0


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


DENSE = dense_names(20)
HARDWARE = [("mxfp8", "nvfp4"), ("mxfp8", "mxfp4"), ("bf16", "mxfp8", "nvfp4", "nvfp4_46", "nvfp4_hadamard")]


def map_of(policy: str, *formats: str, names: list[str] = DENSE) -> PrecisionMap:
    result = fixed_map(policy, names, formats=formats)
    assert result is not None
    return result


@pytest.mark.parametrize("formats", [(), ("fp8", "fp4"), *HARDWARE])
@pytest.mark.parametrize("policy", FIXED)
def test_a_map_covers_every_gemm_with_formats_that_may_run_there(policy: str, formats: tuple[str, ...]) -> None:
    assert policy in POLICIES
    result = map_of(policy, *formats)
    used = {(g, result.format_of(n, g)) for n in DENSE for g in Gemm}
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


@pytest.mark.parametrize(("formats", "low"), [((), "nvfp4"), (HARDWARE[0], "nvfp4"), (HARDWARE[1], "mxfp4")])
def test_nvidias_recipe(formats: tuple[str, ...], low: str) -> None:
    result = map_of("nvidia", *formats)
    for name in DENSE:
        by_gemm = [result.format_of(name, g).value for g in Gemm]
        assert by_gemm == (["bf16"] * 3 if LinearId.parse(name).layer >= 17 else [low, low, f"{low}_hadamard"])
    small = map_of("nvidia", names=dense_names(2))
    assert [small.format_of(n, Gemm.FPROP).value for n in dense_names(2)] == ["nvfp4"] * 4 + ["bf16"] * 4


FLOPS = {f"decoder.layers.{layer}.mlp.{kind}": 3.0 for layer in (0, 1) for kind in ("linear_fc1", "linear_fc2")}
LATE_NAMES = list(FLOPS)


def late_maps(request: SolveRequest, names: list[str]) -> tuple[PrecisionMap, PrecisionMap]:
    (early, _), (late, _) = late_shares(replace(request, budget=Budget("fp4", 0.0)), dict.fromkeys(names, 3.0))
    return early, late


def formats(precision_map: PrecisionMap, name: str = LATE_NAMES[0]) -> list[str]:
    return [precision_map.format_of(name, gemm).value for gemm in Gemm]


def test_late_forward_switches_the_fprops_and_late_all_everything() -> None:
    for policy, last in (("late-forward", ["fp8", "fp4", "fp4"]), ("late-all", ["fp8", "fp8", "fp8"])):
        early, late = late_maps(SolveRequest(policy=policy), LATE_NAMES)
        assert formats(early) == ["fp4", "fp4", "fp4"]
        assert formats(late) == last


@given(st.sampled_from(LATE), st.floats(0.0, 1.0), st.integers(0, 5000), st.integers(1, 5000), st.floats(0.0, 20.0))
def test_the_average_is_reached_and_one_more_precise_step_would_miss_it(
    policy: str, target: float, origin: int, steps: int, unquantised: float
) -> None:
    request = SolveRequest(policy=policy, budget=Budget("fp4", target))
    early, late = late_maps(request, LATE_NAMES)
    high, low = (fp4_fraction(each, FLOPS, unquantised) for each in (early, late))
    assume(target <= high)
    plan = late_plan(request, FLOPS, origin, origin + steps, unquantised)
    assert plan.phases[0].begin == origin
    assert plan.last == origin + steps
    shares = [fp4_fraction(phase.precision_map, FLOPS, unquantised) for phase in plan.phases]
    average = sum(n * share for n, share in zip(plan.steps, shares, strict=True)) / steps
    assert average >= target - 1e-9
    assert plan.achieved == pytest.approx(average)
    if Format.FP4 in early.choices.values() and shares[0] == high:
        assert average - (high - low) / steps < target + 1e-9


def test_a_share_that_no_plan_reaches_is_refused_with_what_is_reachable() -> None:
    request = SolveRequest(policy="late-all", budget=Budget("fp4", 0.9), pins=(("*.0.mlp.linear_fc1", "fp8"),))
    with pytest.raises(SnipError, match=r"an average fp4 share of 0\.7500 at most, less than the 0\.9"):
        late_plan(request, FLOPS, 0, 10)
    with pytest.raises(SnipError, match="begins in four bits, and none of --snip-formats fp8 has"):
        late_plan(SolveRequest(policy="late-forward", formats=("fp8",), budget=Budget("fp4", 0.0)), FLOPS, 0, 10)


@given(st.sampled_from(LATE), st.floats(0.0, 1.0), st.integers(2, 5000), st.data())
def test_the_remainder_of_a_plan_is_the_plan_again(policy: str, target: float, steps: int, data: st.DataObject) -> None:
    """A plan that begins within another plan, with what that one has spent, has the same phases from there on."""
    request = SolveRequest(policy=policy, budget=Budget("fp4", target))
    whole = late_plan(request, FLOPS, 0, steps)
    step = data.draw(st.integers(0, steps - 1))
    shares = {phase.begin: fp4_fraction(phase.precision_map, FLOPS) for phase in whole.phases}
    spent = sum(shares[whole.phases[whole.index_at(s)].begin] for s in range(step))
    remainder = late_plan(request, FLOPS, 0, steps, step=step, spent=spent)
    assert remainder.at(step).choices == whole.at(step).choices
    assert [phase.begin for phase in remainder.phases if phase.begin > step] == [
        phase.begin for phase in whole.phases if phase.begin > step
    ]
