"""Whether main values are those of the weights: what rounds differently is not misplaced, what was exchanged is."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from snip_megatron.megatron import compat
from snip_megatron.megatron.compat import optimizer_state

SHAPES = {"linear.weight": (48, 40), "norm.weight": (40,)}


def trained(seed: int = 3) -> dict[str, torch.Tensor]:
    """Main values of a model: a matrix, and a norm whose weights are near 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.02 + (name == "norm.weight") for name, shape in SHAPES.items()
    }


def of(mains: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> tuple[list[torch.nn.Module], Any]:
    """A model with these bf16 weights, and Megatron's wrapper, whose construction asks for a GPU, with these mains."""
    model = torch.nn.Module()
    for name, weight in weights.items():
        module, _, last = name.partition(".")
        model.add_module(module, torch.nn.Module())
        param: Any = torch.nn.Parameter(weight.bfloat16())
        param.main_param = mains[name]
        getattr(model, module).register_parameter(last, param)
    optimizer = object.__new__(Float16OptimizerWithFloat16Params)
    optimizer.optimizer = torch.optim.SGD(list(mains.values()))
    return [model], optimizer


def in_fp16(main: torch.Tensor) -> torch.Tensor:
    """FP32 of a main value in FP16 with a scale for the parameter, so that its largest is half of what FP16 has."""
    scale = main.abs().amax() / (torch.finfo(torch.float16).max / 2)
    return (main / scale).half().float() * scale


def test_what_weights_are_rounded_from_is_in_place() -> None:
    mains = trained()
    mains["linear.weight"][0, :4] = torch.tensor([torch.nan, torch.inf, -0.0, 1e-30])
    assert compat.misplaced_parameters(*of(mains, mains)) == []


def test_main_values_in_fp16_are_in_place() -> None:
    mains = trained()
    mains["linear.weight"][0, :2] = torch.tensor([1e-12, 0.0])
    half = {name: in_fp16(main) for name, main in mains.items()}
    assert any(not torch.equal(half[name].bfloat16(), mains[name].bfloat16()) for name in mains)
    assert compat.misplaced_parameters(*of(half, mains)) == []


def test_main_values_of_weights_that_were_fp16_are_in_place() -> None:
    mains = trained()
    mains["linear.weight"][0] = torch.arange(40) * 2.0**-26
    weights = {name: main.half().float() for name, main in mains.items()}
    assert any(not torch.equal(weights[name].bfloat16(), mains[name].bfloat16()) for name in mains)
    assert compat.misplaced_parameters(*of(mains, weights)) == []


def test_main_values_that_were_scaled_apart_are_in_place() -> None:
    """As ``--qk-clip`` does: a bf16 weight is scaled and rounded, and so is its main value."""
    mains, factor = trained(), 0.837
    clipped = {name: main * factor for name, main in mains.items()}
    weights = {name: (main.bfloat16() * factor).float() for name, main in mains.items()}
    assert any(not torch.equal(clipped[name].bfloat16(), weights[name].bfloat16()) for name in mains)
    assert compat.misplaced_parameters(*of(clipped, weights)) == []


@pytest.mark.parametrize("name", list(SHAPES))
def test_another_parameter_s_main_values_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_state, "_PIECE", 16)
    mains = trained()
    assert compat.misplaced_parameters(*of(mains, mains)) == []
    last = mains[name].clone()
    last.view(-1)[-1] *= 1.02  # in the last piece, which is a shorter one
    for found in (mains[name].flip(0), last):
        assert compat.misplaced_parameters(*of(mains | {name: found}, mains)) == [name]


def test_the_state_of_one_parameter_is_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the optimizer keeps reduced precision, Megatron's accessor copies all of a parameter's state to FP32."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def copied(optimizer: Any, param: Any) -> optimizer_state.HeldState:
        nonlocal most
        main = param.main_param.clone()
        alive.add(main)
        most = max(most, len(alive))
        return optimizer_state.HeldState(0, main.numel(), optimizer.optimizer, {}, main, main, {})

    monkeypatch.setattr(optimizer_state, "held_state", copied)
    mains = {f"linear{i}.weight": main for i in range(8) for main in [trained()["linear.weight"]]}
    assert compat.misplaced_parameters(*of(mains, mains)) == []
    assert 1 <= most <= 2
