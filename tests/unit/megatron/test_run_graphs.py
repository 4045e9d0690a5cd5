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
from megatron.core.transformer.transformer_layer import TransformerLayer

from snip_megatron.errors import SnipError
from snip_megatron.gemm.backend import REFERENCE, GemmBackend
from snip_megatron.gemm.blackwell import BlackwellBackend
from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.megatron import compat, graphs
from snip_megatron.megatron.compat import graphs as compat_graphs
from snip_megatron.megatron.compat import te_graphs
from snip_megatron.megatron.compat.te_graphs import layers_of
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
    flags = [handle.held._current for handle in registry]
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


def test_the_helper_of_transformer_engine_s_graphs_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    weight: Any = torch.nn.Parameter(torch.ones(1))
    seen = []
    monkeypatch.setattr(core.TECudaGraphHelper, "__init__", lambda self, model: None)
    monkeypatch.setattr(
        core.TECudaGraphHelper, "create_cudagraphs", lambda self: seen.append(weight.skip_backward_post_hook)
    )
    monkeypatch.setattr(core.TECudaGraphHelper, "graphs_created", lambda self: bool(seen))
    found = compat.graphs_of("transformer_engine")
    assert not found.captured
    helper = core.TECudaGraphHelper(model=[])
    helper.flattened_callables = []
    found.accumulating(lambda: [weight])
    helper.create_cudagraphs()
    assert found.captured
    assert seen == [True]
    assert not hasattr(weight, "skip_backward_post_hook")
    assert found.take()[0] > 0
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


def test_a_new_capture_is_timed_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    helper_class = core.TECudaGraphHelper
    order: list[str] = []

    def make(*, post_warmup_hook: Any = None) -> None:
        order.append("warm-up")
        post_warmup_hook()
        order.append("capture")

    def create(helper: Any) -> None:
        helper._start_capturing()
        helper._get_cuda_graph_input_data()
        core.make_graphed_callables(post_warmup_hook=lambda: order.append("offloading on"))
        helper._finish_capturing(0.0)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("waited"))
    monkeypatch.setattr(core, "make_graphed_callables", make, raising=False)
    monkeypatch.setattr(helper_class, "__init__", lambda self: None)
    monkeypatch.setattr(helper_class, "create_cudagraphs", create)
    for name in ("_start_capturing", "_get_cuda_graph_input_data"):
        monkeypatch.setattr(helper_class, name, lambda self: None)
    monkeypatch.setattr(helper_class, "_finish_capturing", lambda self, started: None)
    found = compat.graphs_of("transformer_engine")
    helper = helper_class()
    helper.flattened_callables = [1, 2, 3]
    helper.create_cudagraphs()
    seconds, fields = found.take()
    parts = fields["parts"]
    assert fields["layers"] == 3
    assert list(parts) == ["release", "inputs", "warm_up", "capture", "reset"]
    assert 0 < sum(parts.values()) <= seconds
    assert order == ["warm-up", "offloading on", "waited", "capture"]
    assert found.take() == (0.0, {"layers": 0, "parts": {}})
    found.close()
    assert core.make_graphed_callables is make


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
        self.released = 0
        self.all = layers

    def graphs_created(self) -> bool:
        return True

    def delete_cuda_graphs(self) -> None:
        self.deleted = [self.all.index(layer) for layer in self.callables_per_chunk[0]]

    def create_cudagraphs(self) -> None:
        torch.cuda.empty_cache()
        (layers,) = self.callables_per_chunk
        assert self.num_layers_per_chunk == [len(layers)]
        assert len(self.flattened_callables_is_mtp) == len(self.callables_per_chunk_is_mtp[0]) == len(layers)
        self.captured = [self.all.index(layer) for layer in self.flattened_callables]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Helper]]:
    """Graphs of six layers of 100 bytes each, all captured once, on a device with 1,000 free bytes."""
    helper = Helper([torch.nn.Sequential(torch.nn.Linear(1, 1)) for _ in range(6)])

    def release() -> None:
        helper.released += 1

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 10_000))
    monkeypatch.setattr(torch.cuda, "empty_cache", release)
    monkeypatch.setattr(te_graphs, "rng_state", lambda: None)
    monkeypatch.setattr(te_graphs, "set_rng_state", lambda states: None)
    monkeypatch.setattr(te_graphs.training, "should_disable_forward_pre_hook", lambda args: False)
    graphs = te_graphs.TransformerEngineGraphs()
    graphs._helper = helper
    for part, reserved, allocated in (("release", 4000, 3900), ("reset", 4600, 3960)):
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda reserved=reserved: reserved)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda allocated=allocated: allocated)
        graphs._measure(helper, part)
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
    assert helper.released == 0, "what steps and probes have cached stays"
    assert helper.flattened_callables == helper.callables_per_chunk[0] == helper.all
    assert helper.num_layers_per_chunk == [6]
    assert helper.config.cuda_graph_warmup_steps == 3
    assert graphs.choose(linears(helper, *range(6))) is None
    graphs.renew(helper.all, None)
    assert helper.deleted == helper.captured == list(range(6))
    assert helper.released == 1, "1,500 bytes would be needed to keep it"


def test_memory_is_released_for_a_capture_of_all_layers_where_it_is_short(
    engine: tuple[Any, Helper], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, helper = engine
    release = torch.cuda.empty_cache
    for free, released in ((1499, 1), (1500, 1), (1499, 2)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 10_000))
        graphs.renew(helper.all, None)
        assert helper.released == released
        assert torch.cuda.empty_cache is release


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
