"""Prices of exchanges in budgets of time: exact where they can be, and what the solver makes of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timing.timing_tables import formula_table

from snip_megatron.planner.phases import PlannedRun
from snip_megatron.planner.plan import make_plan
from snip_megatron.planner.probes import Probes
from snip_megatron.planner.rates import Links
from snip_megatron.planner.request import build_problem
from snip_megatron.planner.step_time import StepModel
from snip_megatron.planner.variants import formats_of_map
from snip_megatron.precision import LINEAR_KINDS, Format, Gemm, LinearId, option_id
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.phases import AUTO
from snip_megatron.solver import Problem, Solution, solve
from snip_megatron.solver.items import Choice, Item
from snip_megatron.timing.collectives import Exchange
from snip_megatron.timing.cost_model import CostModel, FlopsModel, with_times
from snip_megatron.timing.models import load_model
from snip_megatron.timing.shapes import ALL_BF16, COLUMN_PARALLEL, Formats, LinearShape
from snip_megatron.timing.table_model import TimingModel

from .formula import SMALL, layout, with_blocks
from .test_plan import request

MODES = ("bf16", "gather", "all")
LINKS = Links(node_size=8, within=1e9, between=1e9)  # slow, so that exchanges count
BF16, FP8, FP4 = Format.BF16, Format.FP8, Format.FP4


@dataclass(frozen=True)
class EqualGemms(FlopsModel):
    """A cost model in which no format makes a GEMM faster."""

    def seconds(self, shape: LinearShape, gemm: Gemm, fmt: Format) -> float:
        return super().seconds(shape, gemm, BF16)


def step_of(communication: str, model: CostModel | None = None, blocks: int = 1, **sizes: Any) -> StepModel:
    chosen = layout(
        with_blocks(SMALL, blocks), communication=communication, **({"tp": 2, "sequence_parallel": True} | sizes)
    )
    return StepModel(chosen, EqualGemms() if model is None else model, LINKS)


def charged(step: StepModel, kind: str, formats: Formats) -> float:
    return math.fsum(step.charge(kind, gemm, fmt) for gemm, fmt in zip(Gemm, formats, strict=True))


def priced(step: StepModel, kind: str, formats: Formats) -> float:
    return step.layout.microbatches * step.exchanges.priced(kind, step.shapes[kind], formats)


# -- attribution ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("communication", MODES)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_charges_add_up_to_the_exchanges_that_formats_decide(communication: str, recompute: str) -> None:
    step = step_of(communication, recompute=recompute)
    inexact = 0
    for kind, fprop, dgrad, wgrad in itertools.product(LINEAR_KINDS, Format, Format, Format):
        found = charged(step, kind, (fprop, dgrad, wgrad))
        wanted = priced(step, kind, (fprop, dgrad, wgrad))
        if kind in COLUMN_PARALLEL or communication == "bf16" or dgrad is wgrad:
            assert found == pytest.approx(wanted, rel=1e-9)
            continue
        bf16 = priced(step, kind, (fprop, BF16, BF16))
        least = min(priced(step, kind, (fprop, fmt, fmt)) for fmt in (dgrad, wgrad))
        assert abs(found - wanted) <= (bf16 - least) / 2 + 1e-12
        inexact += not math.isclose(found, wanted)
    assert (inexact > 0) == (communication != "bf16")


@pytest.mark.parametrize("communication", MODES)
def test_what_no_format_decides_is_not_charged(communication: str) -> None:
    """In bf16 nothing is; with ``gather`` the sums are not; with ``all`` no exposed exchange is left."""
    step = step_of(communication)
    for kind in LINEAR_KINDS:
        whole = step.layout.microbatches * step.exchanges.seconds(kind, step.shapes[kind], ALL_BF16)
        kept = whole - charged(step, kind, ALL_BF16)
        one = 2 * step.layout.tokens * 512 / 2 / 1e9 * step.layout.microbatches
        sums = 0 if kind in COLUMN_PARALLEL else one
        assert kept == pytest.approx({"bf16": whole, "gather": sums, "all": 0.0}[communication], abs=1e-12)
    stage = step.step(lambda block, kind: ALL_BF16).stages[0]
    assert stage.exchanges == pytest.approx(math.fsum(charged(step, kind, ALL_BF16) for kind in LINEAR_KINDS))


def test_the_step_in_bf16_is_the_same_in_every_mode_and_its_fixed_part_is_not() -> None:
    """A budget's reference contains exchanges once: in the fixed part, or in the costs of options."""
    steps = {mode: step_of(mode, blocks=2) for mode in MODES}
    reference = {mode: step.step(lambda block, kind: ALL_BF16) for mode, step in steps.items()}
    assert len({time.total for time in reference.values()}) == 1
    fixed = {mode: step.fixed_seconds()[0] for mode, step in steps.items()}
    assert fixed["bf16"] > fixed["gather"] > fixed["all"]
    for mode, step in steps.items():
        costs = math.fsum(item.cost for item in _problem(step, "step=1", "layer").items)
        assert fixed[mode] + costs == pytest.approx(reference[mode].total)


# -- the solver ----------------------------------------------------------------------------------------------------
def _problem(step: StepModel, budget: str, granularity: str, formats: str = "bf16,fp8,fp4") -> Problem:
    return build_problem(request(budget, formats, granularity=granularity), step)


def _problem_of(
    step: StepModel,
    losses: Mapping[str, Mapping[Format, float]],
    budget: Budget,
    fixed: Mapping[int, float] | None = None,
) -> Problem:
    items = tuple(
        Item(key, 0, 1.0, tuple(Choice(fmt, (loss,), 0.0) for fmt, loss in by_format.items()))
        for key, by_format in losses.items()
    )
    return with_times(Problem(Budget("fp4", 0.0), items), step.shapes, step.model, budget, step.charge, fixed)


def _options(granularity: str) -> list[str]:
    gemms: Sequence[Gemm | None] = tuple(Gemm) if granularity == "gemm" else (None,)
    return [option_id(str(LinearId(0, kind)), gemm) for kind in LINEAR_KINDS for gemm in gemms]


def _seconds(step: StepModel, solution: Solution) -> float:
    formats_of = formats_of_map(step.layout.model, solution.to_precision_map())
    return step.step(formats_of).total


@pytest.mark.parametrize("granularity", ["gemm", "layer"])
@pytest.mark.parametrize("communication", MODES)
def test_where_gemms_take_equally_long_the_cheapest_exchange_is_chosen(communication: str, granularity: str) -> None:
    """All losses are equal, so that the fastest map has the fewest bytes wherever an exchange is exposed."""
    step = step_of(communication)
    losses = {key: {BF16: 0.0, FP8: 0.0, FP4: 0.0} for key in _options(granularity)}
    found = solve(_problem_of(step, losses, Budget("loss", 1.0)))
    if communication == "bf16":
        assert found.speedup == pytest.approx(1.0)
        return
    chosen = found.to_precision_map()
    for kind in LINEAR_KINDS:
        fprop, dgrad, wgrad = (chosen.format_of(str(LinearId(0, kind)), gemm) for gemm in Gemm)
        if kind in COLUMN_PARALLEL:
            assert fprop is FP4
            if granularity == "gemm" and communication == "all":
                assert dgrad is BF16  # the kernels of its sum take time, and its exchange none
        else:
            assert (dgrad, wgrad) == (FP4, FP4)
            assert fprop is not BF16 or communication == "gather"
    assert _seconds(step, found) < step.step(lambda block, kind: ALL_BF16).total


def test_a_gather_in_two_parts_that_takes_longer_is_not_chosen() -> None:
    """Small collectives take equally long whatever their bytes, and an fp4 operand needs one for its scales, too."""
    kinds = (("all_gather", "bf16"), ("all_gather", "uint8"), ("reduce_scatter", "bf16"), ("all_to_all", "uint8"))
    same = {Exchange(*kind, 2, 1 << 26): 1e-4 for kind in kinds}
    table = replace(formula_table(), collectives=same)
    step = step_of("gather", _EqualTable(table))
    losses = {key: dict.fromkeys((BF16, FP8, FP4, Format.FP8_TENSOR), 0.0) for key in _options("gemm")}
    problem = _problem_of(step, losses, Budget("loss", 1.0))
    chosen = solve(problem).to_precision_map()
    for kind in LINEAR_KINDS:
        gather = Gemm.FPROP if kind in COLUMN_PARALLEL else Gemm.DGRAD
        assert chosen.format_of(str(LinearId(0, kind)), gather) in (BF16, Format.FP8_TENSOR)
    (qkv,) = (item for item in problem.items if item.id == f"decoder.layers.0.{LINEAR_KINDS[0]}:fprop")
    assert [choice.saving * 1e4 / 8 for choice in qkv.choices] == pytest.approx([0.0, -1.0, -1.0, 0.0], abs=1e-9)


class _EqualTable(TimingModel):
    """The collectives of a table, and GEMMs that take equally long in every format."""

    def seconds(self, shape: LinearShape, gemm: Gemm, fmt: Format) -> float:
        return FlopsModel().seconds(shape, gemm, BF16)

    def linear_seconds(self, shape: LinearShape, formats: Formats) -> float:
        return math.fsum(self.seconds(shape, gemm, BF16) for gemm in Gemm)


LOSS = st.integers(0, 9).map(float)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(("gather", "all")),
    st.sampled_from((FlopsModel(), EqualGemms())),
    st.lists(st.tuples(LOSS, LOSS), min_size=4, max_size=4),
    st.integers(0, 36),
)
def test_whole_linears_are_chosen_as_by_brute_force_over_planned_steps(
    communication: str, model: CostModel, losses: list[tuple[float, float]], bound: int
) -> None:
    """At granularity ``layer`` every price is exact: no map within the bound has a shorter planned step."""
    step = step_of(communication, model)
    given_losses = {
        key: {BF16: 0.0, FP8: min(pair), FP4: max(pair)} for key, pair in zip(_options("layer"), losses, strict=True)
    }
    found = solve(_problem_of(step, given_losses, Budget("loss", float(bound))))
    best = math.inf
    for formats in itertools.product((BF16, FP8, FP4), repeat=4):
        if math.fsum(by[f] for by, f in zip(given_losses.values(), formats, strict=True)) <= bound:
            chosen = dict(zip(LINEAR_KINDS, formats, strict=True))
            best = min(best, step.step(lambda block, kind, of=chosen: (of[kind],) * 3).total)
    assert _seconds(step, found) == pytest.approx(best, rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(("gather", "all")), st.lists(LOSS, min_size=12, max_size=12), st.sampled_from((1.05, 1.15, 1.25))
)
def test_single_gemms_are_chosen_as_by_brute_force_within_the_shared_gather(
    communication: str, losses: list[float], speedup: float
) -> None:
    """Where only exchanges differ between fp8 and fp4. The gather of G may be charged too much, so that a map that is
    fast enough can be missed. No map is promised to be faster than its planned step.
    """
    step = step_of(communication)
    of = dict(zip(_options("gemm"), losses, strict=True))
    given_losses = {key: {FP8: 0.0, FP4: loss} for key, loss in of.items()}
    fixed = step.fixed_seconds()
    problem = _problem_of(step, given_losses, Budget("speedup", speedup), fixed)
    found = solve(problem)
    reference = step.step(lambda block, kind: ALL_BF16).total
    if found.fault is not None:
        fastest = step.step(lambda block, kind: (FP4,) * 3).total
        assert reference / fastest < speedup
        return
    assert found.speedup is not None
    assert reference / _seconds(step, found) >= found.speedup * (1 - 1e-9) >= speedup * (1 - 1e-8)
    # By brute force over linears: seconds and loss of each combination of three formats.
    triples = list(itertools.product((FP8, FP4), repeat=3))
    rows = [
        [
            (
                step.linear(kind, triple) + priced(step, kind, triple),
                charged(step, kind, triple) - priced(step, kind, triple),
                math.fsum(
                    given_losses[option_id(str(LinearId(0, kind)), g)][f] for g, f in zip(Gemm, triple, strict=True)
                ),
            )
            for triple in triples
        ]
        for kind in LINEAR_KINDS
    ]
    least, least_charged = math.inf, math.inf
    for combination in itertools.product(*rows):
        seconds = fixed[0] + math.fsum(row[0] for row in combination)
        loss = math.fsum(row[2] for row in combination)
        if reference / seconds >= speedup:
            least = min(least, loss)
        if reference / (seconds + math.fsum(row[1] for row in combination)) >= speedup:
            least_charged = min(least_charged, loss)
    assert found.loss == pytest.approx(least_charged)
    assert found.loss >= least - 1e-9


@pytest.mark.parametrize("communication", MODES)
@pytest.mark.parametrize("budget", ["step=1.1", "speedup=1.5"])
def test_what_a_budget_promises_is_what_is_planned(communication: str, budget: str) -> None:
    sizes = {"tp": 2, "pp": 2, "sequence_parallel": True}
    step = StepModel(layout(with_blocks(load_model("8b"), 8), communication=communication, **sizes), FlopsModel())
    found = solve(_problem(step, budget, "layer"))
    formats_of = formats_of_map(step.layout.model, found.to_precision_map())
    bf16, planned = step.step(lambda block, kind: ALL_BF16), step.step(formats_of)
    if budget.startswith("step"):
        ratio = bf16.total / planned.total
    else:
        ratio = max(s.priced for s in bf16.stages) / max(s.priced for s in planned.stages)
    assert found.speedup == pytest.approx(ratio, rel=1e-9)
    assert ratio >= float(budget.partition("=")[2])


@pytest.mark.parametrize("communication", MODES)
def test_the_speedup_of_linears_in_a_plan_is_that_of_its_budget(communication: str) -> None:
    """Of one map, and as an average over phases. Between bf16 and fp8 the prices of single GEMMs are exact."""
    sizes = {"tp": 2, "sequence_parallel": True, "communication": communication}
    step = StepModel(layout(with_blocks(load_model("8b"), 4), **sizes), FlopsModel())
    asked = request("speedup=1.4", "bf16,fp8")
    promised = solve(build_problem(asked, step)).speedup
    plan = make_plan(step, asked, Probes(), PlannedRun(AUTO, "auto", 400))
    assert plan["steps"]["map"]["linears_speedup"] == pytest.approx(promised, rel=1e-9)
    assert plan["phases"]["average_linears_speedup"] == pytest.approx(plan["phases"]["achieved"], rel=1e-9)
    assert plan["phases"]["achieved"] >= 1.4 * (1 - 1e-9)
