"""Norms of gradients: every element is reported once, whoever holds it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.precision import (
    LinearId,
    LinearRow,
    dense_names,
)
from snip_megatron.runtime.probing.gradient_norms import GradientNorms

NAMES = dense_names(2)
PRESENT = ("decoder.layers.1.self_attention.linear_proj", "decoder.layers.1.mlp.linear_fc2")


@dataclass(frozen=True)
class Groups:
    dp_rank: int
    expert_dp_rank: int = 0

    def of(self, handle: LinearHandle) -> Groups:
        return self if handle.expert is None else Groups(self.expert_dp_rank)


@dataclass(frozen=True)
class Loop:
    """What of a host is read."""

    groups: Groups
    sharded: bool = False


def whole(weight: torch.nn.Parameter) -> None:
    raise AssertionError("no rank holds a part")


def share_of(linears: LinearRegistry, rank: int, expert_rank: int = 0) -> torch.Tensor:
    return GradientNorms(linears, Loop(Groups(rank, expert_rank)), whole).share()  # type: ignore[arg-type]


def registry() -> LinearRegistry:
    """A pipeline stage with two of the model's eight linears."""
    found = LinearRegistry([LinearRow(name, 0, 1, 1) for name in NAMES], StepContext())
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
    shares = [share_of(registry(), rank) for rank in range(3)]
    assert shares[0].dtype == torch.float64
    assert shares[0].tolist() == expected()
    assert not shares[1].any()
    assert not shares[2].any()


def test_experts_of_a_layer_add_up() -> None:
    """Two of them on this rank, of which another data parallel rank holds no copy."""
    names = [name.replace("mlp.", "mlp.experts.") for name in dense_names(1)]
    found = LinearRegistry([LinearRow(name, 0, 1, 1) for name in names], StepContext())
    for expert in (2, 3):
        module = torch.nn.Linear(5, 4, bias=False)
        module.weight.main_grad = torch.full((4, 5), float(expert))
        features = torch.arange(4), torch.arange(5)
        linear = LinearId("decoder", 0, "mlp.experts.linear_fc2")
        found.add(LinearHandle(linear, "row", 4, 5, 0, 0, 1, *features, found.context, module, expert=expert))
    assert share_of(found, 1, 0).tolist() == [0.0, 0.0, 0.0, 20 * (4.0 + 9.0)]
    assert not share_of(found, 0, 1).any()


def test_shards_add_up() -> None:
    """Ranges of a distributed optimizer, and whole matrices of a layer-wise one."""
    ranges: list[dict[int, tuple[int, int] | None]] = [{0: (0, 13), 1: None}, {0: (13, 20), 1: (0, 20)}]
    total = torch.zeros(len(NAMES), dtype=torch.float64)
    for rank in range(2):
        linears = registry()
        own = {id(handle.weight): ranges[rank][i] for i, handle in enumerate(linears)}
        norms = GradientNorms(linears, Loop(Groups(rank), sharded=True), lambda w, own=own: own[id(w)])  # type: ignore[arg-type,misc]
        first = norms.share()
        assert torch.equal(norms.share(), first)
        total += first
    assert total.tolist() == expected()
