"""Norms of gradients: every element is reported once, whoever holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.layers.experts import ExpertLayers
from snip_megatron.layers.registry import LinearRegistry, decoder_linear_names
from snip_megatron.megatron.probing import gradient_norms
from snip_megatron.megatron.probing.gradient_norms import GradientNorms
from snip_megatron.precision import LinearId

NAMES = decoder_linear_names(2)
PRESENT = ("decoder.layers.1.self_attention.linear_proj", "decoder.layers.1.mlp.linear_fc2")


@dataclass(frozen=True)
class Groups:
    dp_rank: int
    expert_dp_rank: int = 0

    def of(self, handle: LinearHandle) -> Groups:
        return self if handle.expert is None else Groups(self.expert_dp_rank)


@dataclass(frozen=True)
class Held:
    start: int
    end: int


def registry() -> LinearRegistry:
    """A pipeline stage with two of the model's eight linears."""
    found = LinearRegistry(NAMES, StepContext())
    for i, name in enumerate(PRESENT):
        module = torch.nn.Linear(5, 4, bias=False)
        module.weight.main_grad = torch.arange(20.0).view(4, 5) + i
        features = torch.arange(4), torch.arange(5)
        found.add(LinearHandle(LinearId.parse(name), "column", 4, 5, 0, 0, 1, *features, found.context, module))
    return found


def expected() -> list[float]:
    squares = {name: float((torch.arange(20.0) + i).square().sum()) for i, name in enumerate(PRESENT)}
    return [squares.get(name, 0.0) for name in NAMES]


def test_copies_of_a_gradient_count_once() -> None:
    shares = [GradientNorms(registry(), Groups(rank), optimizer_sharded=False).share(None) for rank in range(3)]  # type: ignore[arg-type]
    assert shares[0].dtype == torch.float64
    assert shares[0].tolist() == expected()
    assert not shares[1].any()
    assert not shares[2].any()


def test_experts_of_a_layer_add_up() -> None:
    """Two of them on this rank, of which another data parallel rank holds no copy."""
    names = decoder_linear_names(1, ExpertLayers(frozenset({0}), experts=4, active=2, ffn=5))
    found = LinearRegistry(names, StepContext())
    for expert in (2, 3):
        module = torch.nn.Linear(5, 4, bias=False)
        module.weight.main_grad = torch.full((4, 5), float(expert))
        features = torch.arange(4), torch.arange(5)
        linear = LinearId(0, "mlp.experts.linear_fc2")
        found.add(LinearHandle(linear, "row", 4, 5, 0, 0, 1, *features, found.context, module, expert=expert))
    share = GradientNorms(found, Groups(1, expert_dp_rank=0), optimizer_sharded=False).share(None)  # type: ignore[arg-type]
    assert share.tolist() == [0.0, 0.0, 0.0, 20 * (4.0 + 9.0)]
    assert not GradientNorms(found, Groups(0, expert_dp_rank=1), optimizer_sharded=False).share(None).any()  # type: ignore[arg-type]


def test_shards_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of a distributed optimizer, and whole matrices of a layer-wise one."""
    ranges: list[dict[int, Held | None]] = [{0: Held(0, 13), 1: None}, {0: Held(13, 20), 1: Held(0, 20)}]
    total = torch.zeros(len(NAMES), dtype=torch.float64)
    for rank in range(2):
        linears = registry()
        order = {id(handle.weight): i for i, handle in enumerate(linears)}

        def held_state(optimizer: Any, weight: Any, rank: int = rank, order: dict[int, int] = order) -> Held | None:
            assert optimizer == "the optimizer"
            return ranges[rank][order[id(weight)]]

        monkeypatch.setattr(gradient_norms.compat, "held_state", held_state)
        norms = GradientNorms(linears, Groups(rank), optimizer_sharded=True)  # type: ignore[arg-type]
        first = norms.share("the optimizer")
        assert torch.equal(norms.share("the optimizer"), first)
        total += first
    assert total.tolist() == expected()
