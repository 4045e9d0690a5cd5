"""The result of blame, bisection by halves, and the errors that are above those of peers."""

import itertools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from snip_megatron.numerics.products.host_recipe import HostRecipe
from snip_megatron.precision.errors import SnipError
from snip_megatron.sensitivity.blame import (
    LIMIT,
    Blame,
    Culprit,
    Fault,
    Harm,
    PassFigures,
    Remedy,
    Trial,
    outliers,
    smallest_set,
    worst_part,
)

Key = tuple[str, str]

BLAME = Blame(
    37, None, "snip", "3 GEMMs in fp8", "bug", "it is",
    {"bf16": PassFigures(2.5, True), "kernels": PassFigures(None, False)},
    Fault(
        "gemm", "decoder.layers.3.mlp.linear_fc1", 1, "node", "rows 96-127", "fprop", None, "cuBLASLt", (4, 5, 6), 3.1,
        36.0,
    ),
    (Culprit("a", "fprop", 5, None, "fp4", 0.1, 0.2, 0.9, None, confirmed=True),), (Trial(12, 0.97),),
    (Harm("a", "fprop", "fp4", 0.5, None, 0.1, 0.2),), Remedy(("--snip-pin", "a:fprop=bf16")),
)  # fmt: skip


def test_a_verdict_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(BLAME.to_json())
    assert '"format": "snip.blame/1"' in BLAME.to_json()
    assert Blame.load(tmp_path / "b.json") == BLAME
    text = BLAME.text()
    assert "step 37: a bug" in text
    assert "rank 1 on node, cuBLASLt, 4 x 5 x 6: rows 96-127" in text
    assert "not finite" in text
    (tmp_path / "c.json").write_text(BLAME.to_json().replace('"step"', '"stop"'))
    with pytest.raises(SnipError, match=r"c.json: blame: unknown key 'stop'"):
        Blame.load(tmp_path / "c.json")


@pytest.mark.parametrize("worst", [(0,), (7,), (3, 30), (0, 1, 2), (39,)])
def test_the_smallest_set_is_found_by_halves(worst: tuple[int, ...]) -> None:
    calls = list[int]()

    def explained(restored: object) -> float:
        assert isinstance(restored, list)
        calls.append(len(restored))
        return len(set(worst).intersection(restored)) / len(worst) - 1e-3 * len(restored)

    assert sorted(smallest_set(list(range(40)), explained)) == list(worst)
    assert len(calls) <= 4 * math.log2(40) * len(worst)


def harmed(
    errors: Mapping[Key, float], operands: float | Mapping[Key, float], *, in_four: Iterable[Key] = ()
) -> dict[Key, float]:
    """The outliers among GEMMs in fp8, and in fp4, with these errors of results and squared errors of operands."""
    harms = []
    for key, error in errors.items():
        fmt, operand = "fp4" if key in in_four else "fp8", operands[key] if isinstance(operands, Mapping) else operands
        harms.append(Harm(*key, fmt, 0.0, None, operand, 0.0, error=error))
    return {(harm.linear, harm.gemm): score for harm, score in outliers(harms).items()}


def test_a_gemm_is_harmed_where_it_is_worse_than_its_peers() -> None:
    linears = [f"decoder.layers.{layer}.mlp.linear_fc1" for layer in range(16)]
    keys = list(itertools.product(linears, ("fprop", "wgrad")))
    errors = {key: 0.015 + 0.0005 * i for i, key in enumerate(keys)}
    assert harmed(errors, 0.0013) == {}
    assert list(harmed(errors | {keys[4]: 0.2}, 0.0013)) == [keys[4]]
    assert list(harmed(errors | {keys[4]: math.inf, keys[5]: 1e3}, 0.0013)) == [keys[4], keys[5]]
    # One linear in four bits is an outlier of a run in eight bits, eight linears are not.
    operands = dict.fromkeys(keys, 0.0013)
    assert list(harmed(errors, operands | {keys[4]: 0.02}, in_four=keys[4:5])) == [keys[4]]
    half = keys[:16]
    worse, operands = errors | {key: 0.1 + 0.01 * i for i, key in enumerate(half)}, operands | dict.fromkeys(half, 0.02)
    assert harmed(worse, operands, in_four=half) == {}
    assert list(harmed(worse | {keys[4]: 0.3}, operands, in_four=half)) == [keys[4]]
    every = dict.fromkeys(keys, 2 * LIMIT[8])
    scores = harmed(every, 0.5)  # beside operands that are all as bad
    assert scores.keys() == every.keys()
    assert all(score == pytest.approx(4.0) for score in scores.values())


def test_a_gemm_whose_operands_lose_a_bit_is_harmed_though_its_result_hides_it() -> None:
    """Errors of results vary from GEMM to GEMM; those of operands in one format hardly do."""
    keys = [(f"decoder.layers.{layer}.mlp.linear_fc1", "fprop") for layer in range(8)]
    errors, operands = dict.fromkeys(keys, 0.03), dict.fromkeys(keys, 0.0013)
    assert harmed(errors, operands) == {}
    assert list(harmed(errors, operands | {keys[3]: 0.0045})) == [keys[3]]
    # One GEMM in four bits of a run in eight loses more than that. Where it is one of many, it is as they are.
    four = keys[3:4]
    assert list(harmed(errors, operands | dict.fromkeys(four, 0.02), in_four=four)) == four
    four = keys[::2]
    assert harmed(errors, operands | dict.fromkeys(four, 0.02), in_four=four) == {}


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ({(None, None): 0.5}, (None, None)),
        ({(None, 0): 0.001, (None, 1): 0.5}, (None, 1)),
        ({(None, 0): 0.4, (None, 1): 0.5}, (None, None)),
        ({(0, None): 0.001, (1, None): 0.0011, (5, None): math.inf}, (5, None)),
        ({(2, 1): 0.5, **{(expert, 0): 1e-3 for expert in range(4)}}, (2, 1)),
        ({(expert, rank): 0.5 if expert == 2 else 1e-3 for expert in range(4) for rank in range(2)}, (2, None)),
        ({(expert, rank): 0.5 if rank else 1e-3 for expert in range(4) for rank in range(2)}, (None, 1)),
        ({}, (None, None)),
    ],
)  # fmt: skip
def test_a_part_is_named_if_it_alone_has_the_error(errors: dict[Any, float], expected: tuple[Any, Any]) -> None:
    assert worst_part(errors) == expected


def test_a_result_that_is_small_beside_its_products_is_healthy() -> None:
    """Its products cancel, or those of its peers add up. Operands are rounded as everywhere else."""
    keys = [(f"decoder.layers.{layer}.mlp.linear_fc1", "wgrad") for layer in range(22)]
    errors = dict.fromkeys(keys, 0.02) | {keys[21]: 0.07}
    operands = dict.fromkeys(keys, 0.0376**2)
    assert harmed(errors, operands) == {}
    assert list(harmed(errors | {keys[21]: 0.1}, operands)) == [keys[21]]
    assert list(harmed(errors, operands | {keys[21]: 0.005})) == [keys[21]]


RECIPES = {"hybrid": HostRecipe("delayed", hybrid=True), "e4m3": HostRecipe("tensorwise")}


def wgrads(recipe: HostRecipe, seed: int, stale: float = 1.0) -> tuple[dict[Key, float], dict[Key, float]]:
    """The errors of results and operands of eight wgrads. The tokens of the first alone have no mean in common, and the
    scale of its gradients is too large by ``stale``."""
    torch.manual_seed(seed)
    errors, operands = dict[Key, float](), dict[Key, float]()
    for layer in range(8):
        x, g = (torch.randn(256, width) + bool(layer) * 2 * torch.randn(width) for width in (64, 96))
        mse, numbers = 0.0, []
        for operand, tensor in (("x", x), ("g", g)):
            factor = stale if (layer, operand) == (0, "g") else 1.0
            scale = factor * recipe.element(operand).maximum / tensor.abs().max()
            numbers.append(recipe.quantize(tensor, operand, 0, scale=scale).dequantize().float())
            mse += float((numbers[-1] - tensor).square().sum() / tensor.square().sum())
        exact = g.t() @ x
        error, signal = float((numbers[1].t() @ numbers[0] - exact).square().sum()), float(exact.square().sum())
        key = f"decoder.layers.{layer}.mlp.linear_fc1", "wgrad"
        errors[key], operands[key] = math.sqrt(error / signal), mse
    return errors, operands


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gradient_whose_products_do_not_add_up_is_healthy(recipe: str) -> None:
    """Its errors then show as they are, beside peers whose results hide theirs."""
    first = ("decoder.layers.0.mlp.linear_fc1", "wgrad")
    for seed in range(40):
        errors, operands = wgrads(RECIPES[recipe], seed)
        assert errors[first] > 2 * max(error for key, error in errors.items() if key != first)
        assert harmed(errors, operands) == {}
        stale = wgrads(RECIPES["hybrid"], seed, stale=4.0)  # a history whose amax is too small
        assert list(harmed(*stale)) == [first]
