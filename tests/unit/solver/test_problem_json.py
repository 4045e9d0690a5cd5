"""Reading problems: what is refused, and with which words."""

import json
from dataclasses import replace
from typing import Any

import pytest
from damage import changed
from hypothesis import given
from hypothesis import strategies as st
from refusal import refusal

from snip_megatron.precision import Format
from snip_megatron.precision.budget import Budget
from snip_megatron.precision.errors import SnipError
from snip_megatron.solver import Choice, Item, Phase, Problem, Spent

from .test_solve import problems, timed

NAMES = [f"decoder.layers.{i}.mlp.linear_fc1:fprop" for i in range(2)]


def body() -> dict[str, Any]:
    def choices() -> list[dict[str, Any]]:
        return [{"format": "fp8", "loss": 1e-4, "saving": 0.0}, {"format": "fp4", "loss": 2e-2, "saving": 1.0e12}]

    items = [{"id": name, "stage": 0, "cost": 1.0e12, "choices": choices()} for name in NAMES]
    return {"schema": "snip.problem/1", "budget": {"target": 0.75, "stage_tolerance": 0.02}, "items": items}


def phased_body() -> dict[str, Any]:
    result = body() | {"schema": "snip.problem/2", "budget": {"target": 0.9, "stage_tolerance": 0.02}}
    result |= {"phases": [{"steps": 250}, {"steps": 50, "target": 0.7}], "spent": {"steps": 100, "achieved": 0.8}}
    for item in result["items"]:
        for choice, losses in zip(item["choices"], ([0.0, 1e-4], [1e-3, 2e-2]), strict=True):
            del choice["loss"]
            choice["losses"] = losses
        item["keeps"] = [1]
    return result


def refused(text: str | bytes) -> str:
    message = refusal(Problem.from_json, text, where="p.json")
    assert message.startswith("p.json: ")
    return message.removeprefix("p.json: ")


def test_the_example_of_the_contract() -> None:
    problem = Problem.from_json(json.dumps(body()))
    assert problem.budget == Budget("fp4", 0.75)
    assert problem.stage_tolerance == 0.02
    first = problem.items[0]
    choices = Choice(Format.FP8, (1e-4,), 0.0), Choice(Format.FP4, (2e-2,), 1e12)
    assert first == Item(NAMES[0], 0, 1e12, choices)
    joint = changed(body(), "items[1].joint", {first.id: {"fp4": 2.0}})
    assert Problem.from_json(joint).items[1].joint == {first.id: {Format.FP4: 2.0}}
    assert Problem.from_json(changed(body(), "budget.stage_tolerance", None)).stage_tolerance is None


def test_the_example_of_phases() -> None:
    problem = Problem.from_json(json.dumps(phased_body()))
    assert problem.budget == Budget("fp4", 0.9)
    assert problem.phases == (Phase(250), Phase(50, 0.7))
    assert problem.spent == Spent(100, 0.8)
    assert problem.steps == 400
    choices = Choice(Format.FP8, (0.0, 1e-4), 0.0), Choice(Format.FP4, (1e-3, 2e-2), 1e12)
    assert problem.items[1] == Item(NAMES[1], 0, 1e12, choices, keeps=(1,))


@st.composite
def phased(draw: st.DrawFn) -> Problem:
    """A problem of one map over one to three phases."""
    problem, count = draw(problems() | timed()), draw(st.integers(1, 3))
    kind = problem.budget.kind
    items = [
        replace(
            item,
            choices=tuple(
                replace(c, losses=tuple(draw(st.floats(-1e3, 1e3)) for _ in range(count))) for c in item.choices
            ),
            keeps=tuple(p for p in range(1, count) if draw(st.booleans())),
        )
        for item in problem.items
    ]
    floor = draw(st.none() | st.floats(0, 1)) if kind == "fp4" else None
    spent = draw(st.none() | st.builds(Spent, st.integers(0, 10), st.floats(0.1, 1))) if kind != "loss" else None
    phases = tuple(Phase(draw(st.integers(1, 9)), floor) for _ in range(count))
    return replace(problem, items=tuple(items), phases=phases, spent=spent)


@given(problems() | timed() | phased())
def test_json_round_trip(problem: Problem) -> None:
    assert Problem.from_json(problem.to_json()) == problem


PATHS = ["schema", "budget.target", "budget.stage_tolerance", "items[1].cost", "items[1].choices[0].loss"]


@pytest.mark.parametrize("path", PATHS)
def test_a_missing_field_is_named(path: str) -> None:
    assert refused(changed(body(), path, ...)) == f"{path}: missing"


BAD_VALUES = [
    ("schema", "snip.problem/3", '"snip.problem/1" or "snip.problem/2"'),
    ("budget", [], "object"),
    ("budget.target", 1.0000001, "between 0 and 1"),
    ("budget.target", float("nan"), "must be a finite number"),
    ("budget.stage_tolerance", -0.1, "null or a share"),
    ("budget.fixed_cost", {"0": 1.0}, "no meaning beside target"),
    ("items[1].joint", {"x": {"fp8": 1.0}}, "id of another item of the same stage"),
    ("items[1].joint", {"decoder.layers.0.mlp.linear_fc1:fprop": {"fp8": -1.0}}, "from 0 to 1e+18"),
    ("items[1].pin", "bf16", "not among the item's choices"),
    ("items[1].id", "decoder.layers.0.mlp.linear_fc1:fprop", "also the id of items[0]"),
    ("items[1].cost", 1.1e18, "from 0 to 1e+18"),
    ("items[1].choices[0].format", "fp5", "'fp5' is not one of bf16"),
    ("items[1].choices[1].format", "fp8", "twice"),
    ("items[1].choices[0].saving", 1.1e12, "item's cost"),
]


@pytest.mark.parametrize(("path", "value", "words"), BAD_VALUES)
def test_a_bad_value_is_named(path: str, value: Any, words: str) -> None:
    message = refused(changed(body(), path, value))
    assert message.startswith(f"{path}: ")
    assert words in message


PHASED = [
    ("phases", [], "phases: must hold 1 to 64 phases, got 0"),
    ("phases[1].steps", 0, "phases[1].steps: must be a number of steps, 1 or more"),
    ("budget", {"loss": 1.5}, "phases[1].target: has no meaning beside loss"),
    ("spent.achieved", 1.5, "spent.achieved: must be a share from 0 to 1, got 1.5"),
    ("items[0].keeps", [0], "items[0].keeps: must hold distinct indices"),
    ("items[0].choices[1].losses", [1.0], "items[0].choices[1].losses: must hold 2 numbers"),
    ("items[0].choices[1].losses[0]", 1e101, "items[0].choices[1].losses[0]: must be a finite"),
    ("items[0].choices[1]", {"format": "fp4", "loss": 1.0, "saving": 0.0}, "items[0].choices[1]: unknown key 'loss'"),
]


@pytest.mark.parametrize(("path", "value", "words"), PHASED)
def test_a_bad_value_of_phases_is_named(path: str, value: Any, words: str) -> None:
    assert refused(changed(phased_body(), path, value)).startswith(words)


def test_a_loss_budget_takes_nothing_spent_and_a_speedup_above_zero() -> None:
    root = phased_body() | {"budget": {"loss": 0.1}, "phases": [{"steps": 1}, {"steps": 2}]}
    assert refused(json.dumps(root)).startswith("spent: has no meaning beside loss")
    root |= {"budget": {"speedup": 1.5}, "spent": {"steps": 1, "achieved": 0.0}}
    assert refused(json.dumps(root)) == "spent.achieved: must be a factor above 0, got 0.0"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing", "must start with"),
        ('{"a":' * 100_000, "nested too deeply"),
        (b'{"a": "\xff"}', "not UTF-8 text (byte 7)"),
        ('{"a": ' + "9" * 5000 + "}", "digits"),
        ('{"budget": {"traget": 1}, "schema": "snip.problem/1"}', "budget.traget: unknown field"),
    ],
)
def test_other_texts(text: str | bytes, words: str) -> None:
    assert words in refused(text)


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ({"speedup": 0.9}, "budget.speedup: must be a factor from 1"),
        ({"speedup": 1.5, "loss": 1.0}, "budget: must have exactly one of target, speedup, loss, has speedup and loss"),
        ({"loss": 0.1, "stage_tolerance": 0.02}, "budget.stage_tolerance: has no meaning beside loss"),
        ({"speedup": 1.2, "fixed_cost": {"0": -1.0}}, "budget.fixed_cost.0: must be a finite number from 0"),
    ],
)
def test_budgets_of_time(budget: dict[str, Any], words: str) -> None:
    assert refused(json.dumps(body() | {"budget": budget})).startswith(words)


def test_problems_made_in_python_are_checked_too() -> None:
    with pytest.raises(SnipError, match=r"items\[0\].cost: must be a finite number"):
        Problem(Budget("fp4", 0.5), (Item("a", 0, -1.0, (Choice(Format.FP4, (0.0,), 0.0),)),))
