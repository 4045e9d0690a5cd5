"""Variants of formats are options of the GEMMs that they are for, and of no others."""

import dataclasses

import pytest

from snip_megatron.precision import Format, Gemm, split_option_id
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError
from snip_megatron.precision.linears import pinned_formats
from snip_megatron.sensitivity import SolveRequest, build_problem
from snip_megatron.sensitivity.policies import POLICIES, UNSOLVED
from snip_megatron.sensitivity.problem import check_reachable, reachable_share
from snip_megatron.sensitivity.table import StatisticsTable
from snip_megatron.solver import solve

from .synthetic import linear_rows, make_table, with_columns

FORMATS = ("mxfp8", "nvfp4_46", "nvfp4_hadamard", "nvfp4")


def table_of(formats: tuple[str, ...] = FORMATS, **relative: float) -> StatisticsTable:
    """Errors of a format are ``relative`` times those of nvfp4, or .01 times for mxfp8."""
    table = make_table(formats=formats)
    base = table.by_format["c2"][:, :1] / 1e-2
    factors = [relative.get(fmt, 0.01 if fmt == "mxfp8" else 1.0) for fmt in formats]
    return with_columns(table, "by_format", **dict.fromkeys(table.by_format, base * factors))


@pytest.mark.parametrize("policy", [p for p in POLICIES if p not in UNSOLVED])
def test_an_option_may_take_the_formats_of_its_gemm(policy: str) -> None:
    problem, scores = build_problem(table_of(), SolveRequest(formats=FORMATS, policy=policy))
    own = {
        Gemm.FPROP: ["mxfp8", "nvfp4_46", "nvfp4"],
        Gemm.DGRAD: ["mxfp8", "nvfp4"],
        Gemm.WGRAD: ["mxfp8", "nvfp4_hadamard", "nvfp4"],
    }
    for item in problem.items:
        gemm = split_option_id(item.id)[1]
        assert gemm is not None
        assert [c.format.value for c in item.choices] == own[gemm]
        assert list(scores[item.id]) == own[gemm]
        assert [c.saving for c in item.choices] == [0.0] + [item.cost] * (len(own[gemm]) - 1)


def test_the_program_takes_a_variant_where_it_errs_less() -> None:
    problem, _ = build_problem(table_of(nvfp4_46=0.5, nvfp4_hadamard=2.0), SolveRequest(formats=FORMATS))
    choices = solve(problem).choices
    four_bit = {key: fmt for key, fmt in choices.items() if fmt.bits == 4}
    assert {split_option_id(key)[1] for key in four_bit} == set(Gemm)
    for key, fmt in four_bit.items():
        assert fmt is (Format.NVFP4_46 if key.endswith(":fprop") else Format.NVFP4)


def test_candidates_that_only_one_gemm_may_take_save_that_gemms_share() -> None:
    request = SolveRequest(formats=("mxfp8", "nvfp4_46"), budget=Budget("fp4", 0.3))
    rows = linear_rows(2)
    assert reachable_share(rows, request) == pytest.approx(1 / 3)
    check_reachable(rows, request)
    with pytest.raises(SnipError, match=r"the highest reachable target is 0.3333"):
        check_reachable(rows, dataclasses.replace(request, budget=Budget("fp4", 0.5)))
    solution = solve(build_problem(table_of(("mxfp8", "nvfp4_46")), request)[0])
    assert {fmt for key, fmt in solution.choices.items() if not key.endswith(":fprop")} == {Format.MXFP8}


def test_pins() -> None:
    names = [row.name for row in linear_rows(1)]
    pins = (("*linear_fc1:fprop", "nvfp4_46"),)
    assert pinned_formats(names, pins) == {"decoder.layers.0.mlp.linear_fc1:fprop": "nvfp4_46"}
    problem, _ = build_problem(table_of(), SolveRequest(formats=FORMATS, pins=pins))
    assert solve(problem).choices["decoder.layers.1.mlp.linear_fc1:fprop"] is Format.NVFP4_46
    with pytest.raises(SnipError, match=r"matches decoder.layers.0.mlp.linear_fc1:dgrad, and nvfp4_46 is a format of"):
        pinned_formats(names, (("*linear_fc1", "nvfp4_46"),))
