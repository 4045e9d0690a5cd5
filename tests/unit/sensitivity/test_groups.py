"""Groups: which options share a format, what pins make of them, and that solved maps obey."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snip_megatron.errors import SnipError
from snip_megatron.precision import Format, Gemm, option_id
from snip_megatron.sensitivity import SolveRequest, build_problem, fixed_map
from snip_megatron.sensitivity.groups import option_groups, spread_pins
from snip_megatron.sensitivity.problem import check_groups, check_reachable, reachable_share
from snip_megatron.solver import solve

from .synthetic import linear_rows, make_table

NAMES = [row.name for row in linear_rows(3)]


def members(groups: dict[str, str]) -> list[set[str]]:
    found: dict[str, set[str]] = {}
    for key, group in groups.items():
        found.setdefault(group, set()).add(key)
    return sorted(found.values(), key=lambda keys: sorted(keys))


def keys(names: Iterable[str], gemm: str) -> set[str]:
    return {option_id(name, Gemm(gemm)) for name in names}


def test_a_glob_is_one_group_a_gemm() -> None:
    groups = option_groups(NAMES, ["*.mlp.*"])
    mlp = [name for name in NAMES if ".mlp." in name]
    assert members(groups) == sorted((keys(mlp, g) for g in ("fprop", "dgrad", "wgrad")), key=sorted)
    assert set(groups.values()) == {f"*.mlp.* {g}" for g in ("fprop", "dgrad", "wgrad")}


def test_block_is_one_group_a_block() -> None:
    groups = option_groups(NAMES, ["block:*.mlp.*"])
    assert len(members(groups)) == 9
    assert groups[f"{NAMES[2]}:fprop"] == groups[f"{NAMES[3]}:fprop"] == "block:*.mlp.* in block 0 fprop"
    assert groups[f"{NAMES[2]}:fprop"] != groups[f"{NAMES[6]}:fprop"]


def test_a_glob_may_name_gemms_and_layers_have_none() -> None:
    assert members(option_groups(NAMES, ["*.0.*:wgrad"])) == [keys(NAMES[:4], "wgrad")]
    assert members(option_groups(NAMES, ["*.0.*"], "layer")) == [set(NAMES[:4])]
    assert option_groups(NAMES, []) == {}


def test_groups_with_an_option_in_common_become_one() -> None:
    groups = option_groups(NAMES, ["*.0.*:fprop", "*.2.*:fprop", "*linear_fc2:fprop"])
    fc2 = [name for name in NAMES if name.endswith("fc2")]
    assert members(groups) == [keys({*NAMES[:4], *NAMES[8:], *fc2}, "fprop")]
    assert set(groups.values()) == {"*.0.*:fprop fprop and *.2.*:fprop fprop and *linear_fc2:fprop fprop"}


@pytest.mark.parametrize(
    ("spec", "granularity", "hint"),
    [
        ("decoder.layers.7.*", "gemm", f"the first option is {NAMES[0]}:fprop"),
        ("block:*.mlp.*:fprop", "layer", "at granularity layer a group names linears, not GEMMs"),
    ],
)
def test_a_group_of_nothing_is_an_error(spec: str, granularity: str, hint: str) -> None:
    with pytest.raises(SnipError) as raised:
        option_groups(NAMES, [spec], granularity)
    assert str(raised.value) == f"--snip-group {spec}: matches no option; {hint}"


# -- pins --------------------------------------------------------------------------------------------------------
def test_a_pin_holds_for_its_whole_group() -> None:
    groups = option_groups(NAMES, ["*.0.*:fprop"])
    pinned = spread_pins({f"{NAMES[1]}:fprop": "bf16", f"{NAMES[9]}:dgrad": "fp8"}, groups)
    assert pinned == {**dict.fromkeys(keys(NAMES[:4], "fprop"), "bf16"), f"{NAMES[9]}:dgrad": "fp8"}


def test_contradicting_pins_are_refused_with_both_names() -> None:
    request = SolveRequest(pins=(("*.0.*qkv", "bf16"), ("*.0.*fc1", "fp8")), groups=("*.0.*:wgrad",), target=0.1)
    expected = (
        f"--snip-group *.0.*:wgrad wgrad: --snip-pin fixes {NAMES[0]}:wgrad to bf16 and {NAMES[2]}:wgrad to fp8,"
        " but a group shares one format; change a pin or the group"
    )
    for refuse in (check_groups, check_reachable, reachable_share):
        with pytest.raises(SnipError) as raised:
            refuse(linear_rows(3), request)
        assert str(raised.value) == expected
    with pytest.raises(SnipError, match="change a pin or the group"):
        fixed_map("uniform-fp4", NAMES, request.pins, request.groups)


def test_pins_in_a_group_count_against_the_budget() -> None:
    alone = reachable_share(linear_rows(2), SolveRequest(pins=(("*.0.*qkv", "bf16"),)))
    together = reachable_share(linear_rows(2), SolveRequest(pins=(("*.0.*qkv", "bf16"),), groups=("*.0.*",)))
    assert together == pytest.approx(0.5)
    assert alone > 0.8


def test_fixed_maps_follow_groups() -> None:
    fixed = fixed_map("uniform-fp4", NAMES, ((f"{NAMES[0]}:fprop", "bf16"),), ("*.0.*",))
    assert fixed is not None
    for name, gemm in itertools.product(NAMES, Gemm):
        held = name in NAMES[:4] and gemm is Gemm.FPROP
        assert fixed.format_of(name, gemm) is (Format.BF16 if held else Format.FP4)


def test_groups_over_too_many_stages_are_refused_at_the_start() -> None:
    specs = tuple(f"decoder.layers.*.{kind}" for kind in ("self_attention.*", "mlp.linear_fc1", "mlp.linear_fc2"))
    check_groups(linear_rows(4, stages=2), SolveRequest(groups=specs))
    single = tuple(f"*.{kind}" for kind in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))
    with pytest.raises(SnipError, match=r"--snip-group \*.linear_qkv .* 12 groups span pipeline stages"):
        check_groups(linear_rows(4, stages=2), SolveRequest(groups=single))
    check_groups(linear_rows(4, stages=2), SolveRequest(groups=tuple(f"block:{glob}" for glob in single)))


# -- maps --------------------------------------------------------------------------------------------------------
SPECS = ["*.mlp.*", "block:*", "*.0.*", "*.1.*:fprop", "*:dgrad", "block:*self_attention*:wgrad"]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sampled_from(SPECS), min_size=1, max_size=3, unique=True), st.sampled_from([1, 2]), st.integers(0, 9)
)
def test_solved_maps_obey(specs: list[str], stages: int, seed: int) -> None:
    table = make_table(layers=2, stages=stages, seed=seed)
    request = SolveRequest(groups=tuple(specs), target=0.6, stage_tolerance=0.1)
    problem, _ = build_problem(table, request)
    solution = solve(problem, deterministic_time=1.0)
    groups = option_groups([row.name for row in table.linears], specs)
    if solution.status == "infeasible":
        return
    for members_of in members(groups):
        assert len({solution.choices[key] for key in members_of}) == 1
    stage_of = {row.name: row.stage for row in table.linears}
    flops = {row.name: float(row.n * row.k) for row in table.linears}
    for stage in range(stages):
        own = [key for key in solution.choices if stage_of[key.partition(":")[0]] == stage]
        low = sum(flops[k.partition(":")[0]] for k in own if solution.choices[k] is Format.FP4)
        share = low / sum(flops[k.partition(":")[0]] for k in own)
        assert share >= 0.5 - 1e-9
        assert solution.achieved_per_stage[stage] == pytest.approx(share)


def test_a_group_costs_what_it_must() -> None:
    """Without the group the optimum splits it; with it the loss is higher, and the format shared."""
    table = make_table(layers=2, seed=3)
    free = solve(build_problem(table, SolveRequest(target=0.5))[0])
    held = solve(build_problem(table, SolveRequest(target=0.5, groups=("*",)))[0])
    assert free.objective is not None
    assert held.objective is not None
    assert held.objective > free.objective
    for gemm in Gemm:
        assert len({f for key, f in held.choices.items() if key.endswith(gemm.value)}) == 1
