"""The plans of ``late-forward`` and ``late-all``: which formats, and as many precise steps as the average allows."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from snip_megatron.precision import Format, Gemm, PrecisionMap, fp4_fraction
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError
from snip_megatron.sensitivity import SolveRequest
from snip_megatron.sensitivity.policies import LATE, late_plan, late_shares

FLOPS = {f"decoder.layers.{layer}.mlp.{kind}": 3.0 for layer in (0, 1) for kind in ("linear_fc1", "linear_fc2")}
NAMES = list(FLOPS)


def late_maps(request: SolveRequest, names: list[str]) -> tuple[PrecisionMap, PrecisionMap]:
    (early, _), (late, _) = late_shares(replace(request, budget=Budget("fp4", 0.0)), dict.fromkeys(names, 3.0))
    return early, late


def formats(precision_map: PrecisionMap, name: str = NAMES[0]) -> list[str]:
    return [precision_map.format_of(name, gemm).value for gemm in Gemm]


def test_late_forward_switches_the_fprops_and_late_all_everything() -> None:
    for policy, last in (("late-forward", ["fp8", "fp4", "fp4"]), ("late-all", ["fp8", "fp8", "fp8"])):
        early, late = late_maps(SolveRequest(policy=policy), NAMES)
        assert formats(early) == ["fp4", "fp4", "fp4"]
        assert formats(late) == last


def test_the_better_format_is_the_one_with_most_bits_and_bf16_where_all_have_four() -> None:
    early, late = late_maps(SolveRequest(policy="late-all", formats=("mxfp8", "nvfp4", "nvfp4_46")), NAMES)
    assert formats(early) == ["nvfp4"] * 3  # no variant beside its base
    assert formats(late) == ["mxfp8"] * 3
    _, late = late_maps(SolveRequest(policy="late-all", formats=("fp4", "nvfp4")), NAMES)
    assert formats(late) == ["bf16"] * 3


def test_pins_hold_in_both_maps() -> None:
    request = SolveRequest(policy="late-all", pins=(("*.0.*:fprop", "bf16"),))
    for precision_map in late_maps(request, NAMES):
        assert formats(precision_map, NAMES[0])[0] == formats(precision_map, NAMES[1])[0] == "bf16"
    assert formats(late_maps(request, NAMES)[0])[1:] == ["fp4", "fp4"]


@given(
    st.sampled_from(LATE),
    st.floats(0.0, 1.0),
    st.integers(0, 5000),
    st.integers(1, 5000),
    st.floats(0.0, 20.0),
)
def test_the_average_is_reached_and_one_more_precise_step_would_miss_it(
    policy: str, target: float, origin: int, steps: int, unquantised: float
) -> None:
    request = SolveRequest(policy=policy, budget=Budget("fp4", target))
    early, late = late_maps(request, NAMES)
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
def test_what_is_left_of_a_plan_is_the_plan_again(policy: str, target: float, steps: int, data: st.DataObject) -> None:
    """A plan from any step of another plan on, with what that one has spent, ends in the same phases."""
    request = SolveRequest(policy=policy, budget=Budget("fp4", target))
    whole = late_plan(request, FLOPS, 0, steps)
    step = data.draw(st.integers(0, steps - 1))
    shares = {phase.begin: fp4_fraction(phase.precision_map, FLOPS) for phase in whole.phases}
    spent = sum(shares[whole.phases[whole.index_at(s)].begin] for s in range(step))
    rest = late_plan(request, FLOPS, 0, steps, step=step, spent=spent)
    assert rest.at(step).choices == whole.at(step).choices
    assert [phase.begin for phase in rest.phases if phase.begin > step] == [
        phase.begin for phase in whole.phases if phase.begin > step
    ]


def test_a_plan_that_comes_too_late_spends_all_that_is_left() -> None:
    plan = late_plan(SolveRequest(policy="late-all", budget=Budget("fp4", 0.9)), FLOPS, 0, 100, step=50, spent=20.0)
    assert [(phase.begin, phase.precision_map.achieved) for phase in plan.phases] == [(50, 1.0)]
    assert plan.achieved == pytest.approx(0.7)
