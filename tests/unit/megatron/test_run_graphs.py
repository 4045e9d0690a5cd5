"""Beside Megatron's CUDA graphs, and back: what can be seen without a GPU; the graphs themselves: ``tests/gpu``."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.transformer import cuda_graphs as core
from megatron.core.transformer.module import GraphableMegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from snip_megatron.errors import SnipError
from snip_megatron.gemm.backend import REFERENCE, GemmBackend
from snip_megatron.gemm.blackwell import BlackwellBackend
from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.megatron import compat, graphs
from snip_megatron.megatron.compat import graphs as compat_graphs
from snip_megatron.megatron.graphs import GraphedRun
from snip_megatron.precision import Format, LinearId, PrecisionMap


class Layer(GraphableMegatronModule):  # type: ignore[misc]
    """Megatron's own dispatch between graph and Python, over a weight."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Replays(torch.nn.Module):
    """In place of a manager, which needs a GPU: what runs when a layer is given to its graphs."""

    def forward(self, layer: Any, args: Any, kwargs: Any) -> str:
        return "replayed"


class Chunk(torch.nn.Module):
    def __init__(self, implementation: str) -> None:
        super().__init__()
        self.config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
        self.layer = Layer(self.config)
        self.config.cuda_graph_impl = implementation
        if implementation == "local":
            self.layer.cudagraph_manager = Replays()
        if implementation == "transformer_engine":
            self.layer.cuda_graphs = [lambda *args, **kwargs: "replayed"]
            self.layer.cuda_graph_manual_hooks = []


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    args = argparse.Namespace(cuda_graph_impl="full_iteration", cuda_graph_warmup_steps=3)
    monkeypatch.setattr(compat_graphs, "get_args", lambda: args)
    return args


# -- beside the graphs -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_layers_run_their_python_beside_their_graphs(args: argparse.Namespace, implementation: str) -> None:
    chunk = Chunk(implementation)
    x = torch.eye(4)
    assert chunk.layer(x) == "replayed"
    with compat.graphs_bypassed([chunk]):
        assert torch.equal(chunk.layer(x), chunk.layer.weight)
        assert args.cuda_graph_impl == chunk.config.cuda_graph_impl == "none"  # the schedule and evaluate() look there
    assert chunk.layer(x) == "replayed"
    assert (args.cuda_graph_impl, chunk.config.cuda_graph_impl) == ("full_iteration", implementation)


def test_marks_of_accumulated_gradients_survive_a_probe(args: argparse.Namespace) -> None:
    """Transformer Engine's graphs set them once, when they are captured."""
    chunk = Chunk("transformer_engine")
    weight: Any = chunk.layer.weight
    for mark in (True, False):
        weight.grad_added_to_main_grad = mark
        with compat.graphs_bypassed([chunk]):
            weight.grad_added_to_main_grad = not mark
        assert weight.grad_added_to_main_grad is mark


def test_a_probe_runs_the_schedule_inside_a_full_graph() -> None:
    def schedule(**named: Any) -> None: ...

    wrapper = FullCudaGraphWrapper.__new__(FullCudaGraphWrapper)  # its __init__ makes a CUDA stream
    wrapper.forward_backward_func = schedule
    assert compat.schedule_without_graph(wrapper) is schedule
    assert compat.schedule_without_graph(schedule) is schedule


# -- microbatches ------------------------------------------------------------------------------------------------
class Device:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def weights_are_current(self, chunk: int) -> None:
        self.told.append(chunk)

    def weights_changed(self) -> None:
        self.told.append("changed")

    def forget_weights(self, linears: Any) -> None:
        self.told.append(("forgotten", [linear.id.layer for linear in linears]))

    def start_step(self, seed: int, step: int) -> None:
        self.told.append(("step", step))


class Captured:
    """Graphs that are there."""

    captured = True

    def __init__(self) -> None:
        self.renewed = 0
        self.seconds = 0.0
        self.changed: list[torch.nn.Module] = []
        self.chosen: list[torch.nn.Module] | None = None

    def choose(self, changed: Any) -> Any:
        self.changed = changed
        return self.chosen

    def renew(self, model: Any, args: Any, layers: Any = None) -> None:
        assert layers is self.chosen
        self.renewed += 1
        self.seconds += 1.5
        self.weights()  # as at every capture

    def accumulating(self, weights: Any) -> None:
        self.weights = weights

    def watched(self, schedule: Any) -> Any:
        return schedule

    def take(self) -> tuple[float, dict[str, int]]:
        seconds, self.seconds = self.seconds, 0.0
        return seconds, {"layers": 2}

    def close(self) -> None: ...


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[GraphedRun, LinearRegistry, Captured, list[torch.nn.Module]]]:
    found = Captured()
    monkeypatch.setattr(graphs.compat, "graphs_of", lambda name: found)
    run = GraphedRun(argparse.Namespace(cuda_graph_impl="local"))
    model: list[torch.nn.Module] = [torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)]
    context = StepContext(seed=9)
    names = [f"decoder.layers.{layer}.mlp.linear_fc1" for layer in range(2)]
    registry = LinearRegistry(names, context)
    for layer, module in enumerate(model):
        registry.add(
            LinearHandle(
                id=LinearId(layer, "mlp.linear_fc1"),
                parallel="column",
                n=4,
                k=4,
                stage=0,
                tp_rank=0,
                tp_size=1,
                out_features=torch.arange(4),
                in_features=torch.arange(4),
                context=context,
                module=module,
            )
        )
    run.attach(registry, model)
    yield run, registry, found, model
    run.close()


def test_weights_are_current_from_a_chunk_s_second_microbatch_on(run: Any) -> None:
    graphed, registry, _, model = run
    registry.device = device = Device()
    counted, _ = graphed.training(lambda iterator, chunk: chunk, None)
    for chunk in (0, 1, 0, 0, 1):
        assert counted(None, model[chunk]) is model[chunk]
    assert device.told == [0, 0, 1]
    counted, _ = graphed.training(lambda iterator, chunk: None, None)  # the next step
    counted(None, model[0])
    assert device.told == [0, 0, 1]


def test_a_validation_quantises_what_it_finds(run: Any) -> None:
    graphed, registry, _, model = run
    registry.device = device = Device()
    counted = graphed.evaluating(lambda iterator, chunk: None)
    counted(None, model[1])
    counted(None, model[1])
    assert device.told == ["changed", 1]


# -- another map -------------------------------------------------------------------------------------------------
def test_graphs_are_captured_anew_where_a_format_changed(run: Any) -> None:
    graphed, registry, found, _ = run
    registry.device = device = Device()
    graphed.renew(3)
    registry.adopt(PrecisionMap.uniform(registry.names, Format.BF16))
    graphed.renew(4)
    assert (found.renewed, device.told) == (0, [])
    registry.adopt(PrecisionMap.uniform(registry.names, Format.FP8))
    graphed.renew(5)
    graphed.renew(6)
    assert found.renewed == 1
    assert device.told == [("forgotten", [0, 1]), ("step", 5)]
    assert [handle.weight for handle in registry] == found.weights()
    registry.adopt(PrecisionMap.uniform(registry.names, Format.BF16))
    assert found.weights() == []


def test_only_what_changed_since_the_capture_is_forgotten_and_captured(run: Any) -> None:
    graphed, registry, found, model = run
    registry.device = device = Device()
    found.weights()  # the first capture: all in bf16
    found.chosen = [model[1]]
    first = registry.names[0]
    both = PrecisionMap.uniform(registry.names, Format.FP8)
    registry.adopt(PrecisionMap(choices=both.choices | PrecisionMap.uniform([first], Format.BF16).choices))
    graphed.renew(5)
    assert found.changed == [model[1]]
    assert device.told == [("forgotten", [1]), ("step", 5)]
    registry.adopt(both)
    graphed.renew(6)
    assert found.changed == [model[0]]


def test_nothing_is_dropped_where_nothing_was_captured(run: Any) -> None:
    graphed, registry, found, _ = run
    found.captured = False
    registry.adopt(PrecisionMap.uniform(registry.names, Format.FP8))
    graphed.renew(0)
    assert found.renewed == 0


def test_captures_are_told_with_their_time(run: Any) -> None:
    graphed, _, found, _ = run
    assert graphed.captures() is None
    found.seconds = 2.0
    assert graphed.captures() == ("capture", 2.0, {"layers": 2})
    assert graphed.captures() is None
    found.seconds = 0.5
    assert graphed.captures() == ("recapture", 0.5, {"layers": 2})


def test_linears_learn_their_chunk_and_their_place(run: Any) -> None:
    _, registry, _, _ = run
    flags = [handle.state.graphed.weight._current for handle in registry]
    registry.device.weights_are_current(1)
    assert [int(flag) for flag in flags] == [0, 1]
    registry.start_step(0)
    assert [int(flag) for flag in flags] == [0, 0]


def test_captures_collect_no_objects_of_imported_modules(run: Any) -> None:
    graphed, _, _, _ = run
    assert gc.get_freeze_count() > 10_000
    graphed.close()
    assert gc.get_freeze_count() == 0


# -- without, and what cannot be ---------------------------------------------------------------------------------
def test_a_run_without_graphs_is_left_alone() -> None:
    run = GraphedRun(argparse.Namespace(cuda_graph_impl="none"))

    def schedule(**named: Any) -> None: ...

    assert run.training(schedule, schedule) == (schedule, schedule)
    assert run.captures() is None
    assert gc.get_freeze_count() == 0
    with run.beside([]):
        run.check_backend(blackwell())


def blackwell() -> GemmBackend:
    return BlackwellBackend(None, None)  # type: ignore[arg-type]  # asked nothing but whether it can be captured


def test_a_backend_that_the_host_seeds_is_refused(run: Any) -> None:
    with pytest.raises(SnipError, match="--cuda-graph-impl cannot be combined with the blackwell GEMMs"):
        run[0].check_backend(blackwell())
    run[0].check_backend(REFERENCE)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"cuda_graph_impl": "none"}, None),
        ({"cuda_graph_impl": "full_iteration"}, "full_iteration"),
        ({"enable_cuda_graph": True}, "local"),
        ({"external_cuda_graph": True, "cuda_graph_impl": None}, "transformer_engine"),
    ],
)
def test_which_implementation_is_asked_for(given: dict[str, Any], expected: str | None) -> None:
    assert compat.graph_implementation(SimpleNamespace(**given)) == expected


# -- Megatron's own state ----------------------------------------------------------------------------------------
def test_captures_are_timed_and_megatron_is_as_it_was_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    record = core._CudagraphGlobalRecord
    monkeypatch.setattr(record, "_create_cudagraphs", classmethod(lambda cls: {"time": 0.25}))
    before = record.__dict__["_create_cudagraphs"]
    local = compat.graphs_of("local")
    assert record._create_cudagraphs() == {"time": 0.25}
    assert record._create_cudagraphs() == {"time": 0.25}
    assert local.take() == (0.5, {})
    assert local.take() == (0.0, {})
    local.close()
    assert record.__dict__["_create_cudagraphs"] is before


def test_what_a_recording_noted_at_a_tensor_that_outlives_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as rotary embeddings, which would count as inputs of the deleted graphs."""
    for name in ("synchronize", "empty_cache", "graph_pool_handle", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(core.CudaGraphManager, "global_mempool", None)
    before = core._apply_cudagraph_buffer_metadata
    local, kept = compat.graphs_of("local"), torch.ones(2)
    noted = core._apply_cudagraph_buffer_metadata(kept)
    noted.input_use_count, noted.fwd_cudagraph_buffer = 3, torch.ones(1)
    core._apply_cudagraph_buffer_metadata(torch.ones(2))  # gone by then
    local.renew([], None)
    assert kept.cg_buffer_metadata == core.CudagraphBufferMetadata()  # type: ignore[attr-defined]
    core._CudagraphGlobalRecord._disable_saved_tensors_observer()
    local.close()
    assert core._apply_cudagraph_buffer_metadata is before
