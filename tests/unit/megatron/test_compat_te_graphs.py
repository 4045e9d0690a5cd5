"""Transformer Engine's CUDA graphs, as far as they can be seen without a GPU; the graphs themselves: ``tests/gpu``."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import cuda_graphs as core
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from snip_megatron.megatron import compat
from snip_megatron.megatron.compat import te_graphs
from snip_megatron.megatron.compat.te_graphs import layers_of


# -- a capture ---------------------------------------------------------------------------------------------------
def test_the_helper_of_transformer_engine_s_graphs_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    weight: Any = torch.nn.Parameter(torch.ones(1))
    seen = []
    monkeypatch.setattr(core.TECudaGraphHelper, "__init__", lambda self, model: None)
    monkeypatch.setattr(
        core.TECudaGraphHelper, "create_cudagraphs", lambda self: seen.append(weight.skip_backward_post_hook)
    )
    monkeypatch.setattr(core.TECudaGraphHelper, "graphs_created", lambda self: bool(seen))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    found = compat.graphs_of("transformer_engine")
    assert not found.captured
    helper = core.TECudaGraphHelper(model=[])
    helper.flattened_callables = [torch.nn.Linear(1, 1)] * 3
    found.accumulating(lambda: [weight])
    helper.create_cudagraphs()
    assert found.captured
    assert seen == [True]
    assert not hasattr(weight, "skip_backward_post_hook")
    seconds, fields = found.take()
    assert seconds > 0
    assert fields == {"layers": 3}
    assert found.take() == (0.0, {"layers": 0})
    found.close()


class MaskedLayer(TransformerLayer):  # type: ignore[misc]
    """A layer of Megatron's sample inputs; ``get_layer_static_inputs`` is Megatron's own."""

    def __init__(self, device: str) -> None:
        torch.nn.Module.__init__(self)
        self.config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
        self.self_attention = torch.nn.Linear(1, 1, device=device)


def test_sample_masks_are_made_where_the_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron makes them on the CPU for every layer, and a capture waits for it."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    made: dict[str, torch.Tensor] = {}
    devices = []
    whole = torch.tril
    monkeypatch.setattr(torch, "tril", lambda ones: devices.append(ones.device.type) or whole(ones))

    def capture(helper: Any) -> None:
        helper.layer.get_layer_static_inputs(8, 2)
        made.update(MaskedLayer("cpu").get_layer_static_inputs(8, 2))

    monkeypatch.setattr(core.TECudaGraphHelper, "__init__", lambda self: None)
    monkeypatch.setattr(core.TECudaGraphHelper, "create_cudagraphs", capture)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    plain = MaskedLayer("cpu").get_layer_static_inputs(8, 2)["attention_mask"]
    found = compat.graphs_of("transformer_engine")
    helper = core.TECudaGraphHelper()
    helper.layer, helper.flattened_callables = MaskedLayer("meta"), []
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *device: tensor)
    helper.create_cudagraphs()
    found.close()
    MaskedLayer("meta").get_layer_static_inputs(8, 2)
    assert devices == ["cpu", "meta", "cpu", "cpu"]
    assert torch.equal(made["attention_mask"], plain)


# -- some layers -------------------------------------------------------------------------------------------------
def test_layers_of_changed_linears() -> None:
    layers = [torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.Linear(1, 1))) for _ in range(4)]
    nested = layers[3][1][0]
    assert layers_of(layers, [nested, layers[1][0], layers[1][1][0]]) == [layers[1], layers[3]]
    assert layers_of(layers, []) is None
    assert layers_of(layers, [layers[0][0], torch.nn.Linear(1, 1)]) is None, "a linear in no captured layer"


class Helper:
    """Megatron's helper, with what a capture reads and does."""

    def __init__(self, layers: list[torch.nn.Module], stages: int = 1) -> None:
        self.pp_group = SimpleNamespace(size=lambda: stages)
        self.config = SimpleNamespace(cuda_graph_warmup_steps=3)
        self.flattened_callables, self.callables_per_chunk = layers, [layers]
        self.num_layers_per_chunk = [len(layers)]
        self.flattened_callables_is_mtp = [False] * len(layers)
        self.callables_per_chunk_is_mtp = [self.flattened_callables_is_mtp]
        self.deleted: list[int] = []
        self.captured: list[int] = []
        self.all = layers

    def graphs_created(self) -> bool:
        return True

    def delete_cuda_graphs(self) -> None:
        self.deleted = [self.all.index(layer) for layer in self.callables_per_chunk[0]]

    def create_cudagraphs(self) -> None:
        (layers,) = self.callables_per_chunk
        assert self.num_layers_per_chunk == [len(layers)]
        assert len(self.flattened_callables_is_mtp) == len(self.callables_per_chunk_is_mtp[0]) == len(layers)
        self.captured = [self.all.index(layer) for layer in self.flattened_callables]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Helper]]:
    """Graphs of six layers of 100 bytes each, all captured once, on a device with 1,000 free bytes."""
    helper = Helper([torch.nn.Sequential(torch.nn.Linear(1, 1)) for _ in range(6)])

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 10_000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(te_graphs, "rng_state", lambda: None)
    monkeypatch.setattr(te_graphs, "set_rng_state", lambda states: None)
    monkeypatch.setattr(te_graphs.training, "should_disable_forward_pre_hook", lambda args: False)
    graphs = te_graphs.TransformerEngineGraphs()
    graphs._helper = helper
    reserved, allocated = iter((4000, 4600)), iter((3900, 3960))
    with monkeypatch.context() as memory:
        memory.setattr(torch.cuda, "memory_reserved", lambda: next(reserved))
        memory.setattr(torch.cuda, "memory_allocated", lambda: next(allocated))
        graphs._create(helper, lambda helper: None)
    yield graphs, helper
    graphs.close()


def linears(helper: Helper, *layers: int) -> list[torch.nn.Module]:
    return [helper.all[layer][0] for layer in layers]  # type: ignore[index]


def test_layers_that_changed_are_captured_alone(engine: tuple[Any, Helper]) -> None:
    graphs, helper = engine
    marks: list[Any] = [next(layer.parameters()) for layer in helper.all]
    for mark in marks:
        mark.grad_added_to_main_grad = True
    layers = graphs.choose(linears(helper, 4, 1))
    assert graphs.idle_bytes == 6 * 90
    graphs.renew(helper.all, None, layers)
    assert graphs.idle_bytes == 8 * 90
    assert helper.deleted == helper.captured == [1, 4]
    assert [mark.grad_added_to_main_grad for mark in marks] == [layer not in (1, 4) for layer in range(6)]
    assert helper.flattened_callables == helper.callables_per_chunk[0] == helper.all
    assert helper.num_layers_per_chunk == [6]
    assert helper.config.cuda_graph_warmup_steps == 3
    assert graphs.choose(linears(helper, *range(6))) is None
    graphs.renew(helper.all, None)
    assert helper.deleted == helper.captured == list(range(6))


def test_all_layers_are_captured_where_memory_or_the_layout_demand_it(
    engine: tuple[Any, Helper], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, helper = engine
    assert graphs.choose(linears(helper, 0, 1, 2, 3)) == helper.all[:4]  # 2.5 times 400 of 1,000 bytes
    assert graphs.choose(linears(helper, 0, 1, 2, 3, 4)) is None
    assert graphs.choose([]) is None
    graphs.renew(helper.all, None, helper.all[:4])
    assert graphs.choose(linears(helper, 1, 5)) == [helper.all[1], helper.all[5]]
    assert graphs.choose(linears(helper, 1, 2, 5)) is None, "graphs would take more than twice the memory of all"
    graphs.renew(helper.all, None)
    assert graphs.choose(linears(helper, 1, 2, 5)) is not None
    helper.pp_group = SimpleNamespace(size=lambda: 2)
    assert graphs.choose(linears(helper, 0)) is None
    helper.pp_group = SimpleNamespace(size=lambda: 1)
    monkeypatch.setattr(graphs, "_everywhere", lambda own: False)
    assert graphs.choose(linears(helper, 0)) is None, "another rank has no room"
