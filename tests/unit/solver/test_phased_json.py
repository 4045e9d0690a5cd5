"""Reading ``snip.problem/2``: what is refused, and with which words."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snip_megatron.precision import Format
from snip_megatron.precision.budget import Budget
from snip_megatron.solver import Choice, Item, Phase, Problem, Spent

from .test_problem_json import refused

FINITE = st.floats(-1e3, 1e3)


def body() -> dict[str, Any]:
    return {
        "schema": "snip.problem/2",
        "budget": {"target": 0.9, "stage_tolerance": 0.02},
        "phases": [{"steps": 250}, {"steps": 50, "target": 0.7}],
        "spent": {"steps": 100, "achieved": 0.8},
        "items": [
            {
                "id": f"decoder.layers.{i}.mlp.linear_fc1:fprop",
                "stage": 0,
                "cost": 4.0,
                "choices": [
                    {"format": "fp8", "saving": 0.0, "losses": [0.0, 1e-4]},
                    {"format": "fp4", "saving": 4.0, "losses": [1e-3, 2e-2]},
                ],
                "keeps": [1],
            }
            for i in range(2)
        ],
    }


def test_the_example_of_the_format() -> None:
    problem = Problem.from_json(json.dumps(body()))
    assert problem.budget == Budget("fp4", 0.9)
    assert problem.phases == (Phase(250), Phase(50, 0.7))
    assert problem.spent == Spent(100, 0.8)
    assert problem.steps == 400
    assert problem.items[1] == Item(
        "decoder.layers.1.mlp.linear_fc1:fprop",
        0,
        4.0,
        (Choice(Format.FP8, (0.0, 1e-4), 0.0), Choice(Format.FP4, (1e-3, 2e-2), 4.0)),
        keeps=(1,),
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    phases = draw(st.integers(1, 3))
    formats = draw(st.lists(st.sampled_from(list(Format)), min_size=1, max_size=3, unique=True))
    kind = draw(st.sampled_from(("fp4", "speedup", "loss")))
    items = tuple(
        Item(
            f"i{i}",
            draw(st.integers(0, 2)),
            1e3,
            tuple(Choice(f, tuple(draw(FINITE) for _ in range(phases)), draw(FINITE)) for f in formats),
            formats[0] if draw(st.booleans()) else None,
            tuple(p for p in range(1, phases) if draw(st.booleans())),
        )
        for i in range(draw(st.integers(1, 4)))
    )
    floor = draw(st.none() | st.floats(0, 1)) if kind == "fp4" else None
    spent = draw(st.none() | st.builds(Spent, st.integers(0, 10), st.floats(0.1, 1))) if kind != "loss" else None
    return Problem(
        Budget(kind, {"fp4": 0.5, "speedup": 1.5, "loss": 1.0}[kind]),
        items,
        0.1 if kind == "fp4" else None,
        ((1, 2.5),) if kind == "speedup" else (),
        tuple(Phase(draw(st.integers(1, 9)), floor) for _ in range(phases)),
        spent,
    )


@given(problems())
def test_json_round_trip(problem: Problem) -> None:
    assert Problem.from_json(problem.to_json()) == problem


def at(*place: str | int, value: Any) -> str:
    root = body()
    owner: Any = root
    for key in place[:-1]:
        owner = owner[key]
    owner[place[-1]] = value
    return json.dumps(root)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (at("phases", value=[]), "phases: must hold 1 to 64 phases, got 0"),
        (at("phases", 1, "steps", value=0), "phases[1].steps: must be a number of steps from 1"),
        (at("phases", 1, "target", value=1.5), "phases[1].target: must be a share from 0 to 1, got 1.5"),
        (at("budget", value={"loss": 1.5}), "phases[1].target: has no meaning beside loss"),
        (at("budget", value={"speedup": 1.5}), "phases[1].target: must be a factor from 1 to 1e+06, got 0.7"),
        (at("spent", "achieved", value=1.5), "spent.achieved: must be a share from 0 to 1, got 1.5"),
        (at("items", 0, "keeps", value=[0]), "items[0].keeps: must hold distinct indices"),
        (at("items", 0, "choices", 1, "losses", value=[1.0]), "items[0].choices[1].losses: must hold 2 numbers"),
        (at("items", 0, "choices", 1, "losses", 0, value=1e101), "items[0].choices[1].losses[0]: must be a finite"),
        (
            at("items", 0, "choices", 1, value={"format": "fp4", "loss": 1.0, "saving": 0.0}),
            "items[0].choices[1]: unknown key 'loss'",
        ),
    ],
)
def test_refused(text: str, message: str) -> None:
    assert re.match(re.escape(message), refused(text)), refused(text)


def test_a_loss_budget_takes_nothing_spent_and_a_speedup_above_zero() -> None:
    root = json.loads(at("budget", value={"loss": 0.1}))
    root["phases"] = [{"steps": 1}, {"steps": 2}]
    assert refused(json.dumps(root)).startswith("spent: has no meaning beside loss")
    root = root | {"budget": {"speedup": 1.5}, "spent": {"steps": 1, "achieved": 0.0}}
    assert refused(json.dumps(root)) == "spent.achieved: must be a factor above 0, got 0.0"
