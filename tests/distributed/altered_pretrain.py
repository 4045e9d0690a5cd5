"""The training entry, altered as functions below say: ``ALTER=spike,…``. Its last line says whether groups are left.

Module of warm ranks, which have imported Megatron.
"""

import atexit
import functools
import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
import zlib
from collections import Counter
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timings import RATES

from snip_megatron import pretrain_gpt
from snip_megatron.precision import DENSE_LAYER, Format


def couple() -> None:
    """Adam whose weight decay is part of the gradient."""
    from megatron.core.optimizer import OptimizerConfig

    check = OptimizerConfig.__post_init__

    def coupled(config: Any) -> None:
        config.decoupled_weight_decay = False
        check(config)

    OptimizerConfig.__post_init__ = coupled  # type: ignore[method-assign]


def freeze() -> None:
    """Parameters whose name holds a part of ``FROZEN`` (a,b,…) are not trained."""

    def frozen(name: str, parameter: torch.nn.Parameter) -> None:
        if any(part in name for part in os.environ["FROZEN"].split(",")):
            parameter.requires_grad_(False)

    _change_parameters(frozen)


def one_expert() -> None:
    """Weights drawn by name, and an expert's names and numbers those of the dense MLP in its place.

    So a decoder of mixtures of one expert is the dense decoder, down to the random signs of the drift and of
    stochastic rounding.
    """
    from snip_megatron.layers.context import LinearHandle

    def draw_by_name(name: str, parameter: torch.nn.Parameter) -> None:
        if parameter.dim() > 1:  # norms keep theirs
            seed = zlib.crc32(name.replace("mlp.experts.local_experts.0.", "mlp.").encode())
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.data.copy_(0.02 * drawn)

    def dense_index(handle: Any) -> int:
        kinds = len(DENSE_LAYER)
        return int(handle.id.layer * kinds + DENSE_LAYER.index(handle.id.path.replace(".experts.", ".")))

    LinearHandle.index = property(dense_index)  # type: ignore[assignment,method-assign]
    _change_parameters(draw_by_name)


def _change_parameters(change: Any) -> None:
    """Of the built model, before SNIP sees it."""
    from snip_megatron.megatron import setup

    hook = setup.SnipRun.pre_wrap_hook

    def changed(snip_run: Any, chunks: list[Any]) -> list[Any]:
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                change(name, parameter)
        return hook(snip_run, chunks)

    setup.SnipRun.pre_wrap_hook = changed  # type: ignore[method-assign]


def offload() -> None:
    """Megatron's optimizer on the host, for which the parameters' shards are a GPU's."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    split, on_cpu = HybridDeviceOptimizer._get_sub_optimizer_param_groups, torch.Tensor.is_cuda

    def split_as_on_a_gpu(self: Any, fraction: float) -> Any:
        shards = {id(shard) for group in self.param_groups for shard in group["params"]}
        torch.Tensor.is_cuda = property(lambda tensor: id(tensor) in shards)  # type: ignore[assignment,method-assign]
        try:
            return split(self, fraction)
        finally:
            torch.Tensor.is_cuda = on_cpu  # type: ignore[method-assign]

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = split_as_on_a_gpu


def mask() -> None:
    """A loss mask that leaves out the first three quarters of every sequence, as of a prompt."""
    from snip_megatron.megatron import entry

    genuine = entry.loss_function

    def masked(loss_mask: torch.Tensor, output: torch.Tensor) -> Any:
        counted = torch.arange(loss_mask.shape[1]) >= 3 * loss_mask.shape[1] // 4
        return genuine(loss_mask * counted, output)

    entry.loss_function = masked


def spike() -> None:
    """A loss that is eight times too large in the steps of ``SPIKES=<first>,<beyond>`` (from 0)."""
    from megatron.training import get_args

    from snip_megatron.megatron import entry

    first, beyond = (int(step) for step in os.environ["SPIKES"].split(","))
    genuine = entry.loss_function

    def spiking(*args: Any) -> Any:
        loss, tokens, reported = genuine(*args)
        factor = 8.0 if first <= get_args().curr_iteration < beyond else 1.0
        return loss * factor, tokens, {name: v * v.new_tensor([factor, 1.0]) for name, v in reported.items()}

    entry.loss_function = spiking


def tight() -> None:
    """A rank whose device tells how much memory is free: ``TIGHT=<rank>,<bytes>,<bytes>,…``.

    That rank has so much at its first probe, its second and so on, and all others have plenty.
    """
    from snip_megatron.runtime import probe_memory as memory

    rank, *free = (int(number) for number in os.environ["TIGHT"].split(","))

    def device_memory(device: torch.device) -> memory.FreeMemory:
        return memory.FreeMemory(free.pop(0) if dist.get_rank() == rank else 2.0**40, 0.0, 2.0**24)

    memory.device_memory = device_memory


def fail() -> None:
    """Functions that raise an exception once: ``FAIL=[[step, rank, "module:Class.name", "RuntimeError"], …]``."""
    from snip_megatron.runtime.controller import Controller

    begin, now, errors = Controller.before_step, [-1], {"OutOfMemoryError": torch.OutOfMemoryError}

    def before_step(controller: Controller, step: int, *args: Any) -> None:
        now[0] = step
        begin(controller, step, *args)

    def install(target: str, planned: dict[int, str]) -> None:
        module, _, path = target.partition(":")
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        genuine = getattr(owner, name)

        @functools.wraps(genuine)
        def failing(*args: Any, **named: Any) -> Any:
            error = planned.pop(now[0], None)
            if error is not None:
                raise errors.get(error, RuntimeError)(f"injected into {name}")
            return genuine(*args, **named)

        setattr(owner, name, failing)

    Controller.before_step = before_step  # type: ignore[method-assign]
    targets: dict[str, dict[int, str]] = {}
    for step, rank, target, error in json.loads(os.environ["FAIL"]):
        if rank == int(os.environ["RANK"]):
            targets.setdefault(target, {})[step] = error
    for target, planned in targets.items():
        install(target, planned)


def replicas() -> None:
    """Each rank writes ``OUT/rank<k>.pt`` after every step: gradients by name of what tensor parallel ranks share."""
    from snip_megatron.megatron.setup import SnipRun

    around_step = SnipRun.around_step

    def around_step_and_write(self: SnipRun, train_step: Any, call: Any) -> Any:
        result = around_step(self, train_step, call)
        parameters = call.model[0].named_parameters()
        found = {name: p.main_grad for name, p in parameters if not getattr(p, "tensor_model_parallel", False)}
        torch.save(found, Path(os.environ["OUT"]) / f"rank{dist.get_rank()}.pt")
        return result

    SnipRun.around_step = around_step_and_write  # type: ignore[method-assign]


def count() -> None:
    """Rank 0 writes to ``SENT`` how many bytes each training step reduces and scatters, or exchanges by all-to-all."""
    from snip_megatron.megatron import compat

    sent: Counter[str] = Counter()
    steps: list[dict[str, int]] = []

    def size(tensors: Any) -> int:
        return tensors.nbytes if isinstance(tensors, torch.Tensor) else sum(map(size, tensors))

    def counted(method: str, kind: str, place: int) -> Any:
        original = getattr(dist.ProcessGroup, method)

        def call(group: dist.ProcessGroup, *args: Any, **named: Any) -> Any:
            sent[kind] += size(args[place]) * (group.size() if place == 0 else 1)  # place 0 is this rank's part
            return original(group, *args, **named)

        return call

    for method, kind, place in (
        ("_reduce_scatter_base", "reduce_scatter", 0),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter", 0),
        ("alltoall_base", "all_to_all", 1),
    ):
        setattr(dist.ProcessGroup, method, counted(method, kind, place))

    def wrap(train_step: Any) -> Any:
        def step(*args: Any, **named: Any) -> Any:
            sent.clear()
            result = train_step(*args, **named)
            steps.append(dict(sent))
            return result

        return step

    compat.wrap_train_step(wrap)
    if os.environ["RANK"] == "0":
        atexit.register(lambda: Path(os.environ["SENT"]).write_text(json.dumps(steps)))


def rates() -> None:
    """GEMMs timed by a clock that knows the rate of every format."""
    from snip_megatron.megatron import setup, times, validate

    times.clock_for = lambda device: RateClock(RATES)
    for module in (setup, validate):
        module.check_measurable = lambda config, backend: None


class RateClock:
    """Runs each call once. It takes as long as the rate of its format says."""

    device = torch.device("cpu")

    def __init__(self, rates: Mapping[Format, float]) -> None:
        self.rates = rates

    def seconds[Key: Hashable](self, calls: Mapping[Key, Any]) -> dict[Key, float]:
        def of(key: Any) -> Format:
            return next(part for part in key if isinstance(part, Format))

        for call in calls.values():
            call(0)
        return {k: 1e-3 / self.rates[of(k)] if isinstance(k, tuple) and len(k) == 2 else 1e-5 for k in calls}


def blackwell() -> None:
    """A Blackwell card, whose Transformer Engine is emulated: its GEMMs by torch, its linears by SNIP's own."""
    from snip_megatron.megatron import attachment, conversion, setup, times, validate
    from snip_megatron.numerics.products import selection
    from tests.unit.numerics.products.emulated_te import gemms

    torch.cuda.get_device_capability = lambda *_: (10, 0)
    torch.cuda.get_device_name = lambda *_: "Some Blackwell"
    selection.on_blackwell = lambda: True
    selection.why_not_transformer_engine = selection._te_fault = lambda formats: None
    resolve, native = selection.resolve_gemm, selection.native_backend
    conversion.resolve_gemm = lambda name, formats, te_linears: resolve(name, formats, te_linears=True)
    attachment.native_backend = lambda name, te_linears: native(name, te_linears=True)
    conversion.ColumnParallelLinear = conversion.RowParallelLinear = type("NotOfMegatron", (), {})
    validate.check_measurable = lambda config, backend: None  # it refuses a CPU
    setup.transformer_engine_gemms = gemms
    times.clock_for = lambda device: RateClock({Format.BF16: 1.0, Format.MXFP8: 1.6, Format.NVFP4: 2.4})


def graphs() -> None:
    """Megatron's own helper of Transformer Engine's graphs, over graphs that run their layer's Python.

    Rank 0 writes to ``CAPTURES`` the layers of each capture, the linears that each graph holds, and the steps at which
    one ran. A graph asserts that the formats of its linears are still those of its capture.
    """
    from megatron.core import tensor_parallel
    from megatron.core.transformer import cuda_graphs as core
    from megatron.core.transformer import transformer_layer

    from snip_megatron.megatron import validate

    calls: list[dict[str, Any]] = []
    replayed: set[int] = set()

    class Graph:
        def __init__(self, layer: Any, args: Any, kwargs: Any) -> None:
            self.layer, self.held, self.live = layer, {}, True
            hooks = [each.register_forward_hook(self.hold) for each in layer.modules() if hasattr(each, "snip")]
            outputs = layer(*args, **kwargs)
            for hook in hooks:
                hook.remove()
            trained = [each for each in outputs if each is not None and each.requires_grad]
            torch.autograd.backward(trained, [torch.ones_like(each) for each in trained])

        def hold(self, module: Any, *_: Any) -> None:
            self.held[module.snip] = module.snip.formats

        def __call__(self, *args: Any, is_first_microbatch: bool, **kwargs: Any) -> Any:
            assert self.live
            assert all(linear.formats == formats for linear, formats in self.held.items())
            replayed.update(linear.context.step for linear in self.held)
            self.layer.cuda_graphs, graphs = [], self.layer.cuda_graphs
            core._set_capture_start()
            try:
                return self.layer(*args, **kwargs | {"attention_mask": None})  # a replay masks nothing
            finally:
                core._set_capture_end()
                self.layer.cuda_graphs = graphs

        def reset(self) -> None:
            self.live = False

    def make(layers: Any, samples: Any, *, sample_kwargs: Any, **_: Any) -> tuple[Graph, ...]:
        made = tuple(map(Graph, layers, samples, sample_kwargs))
        held = [sorted(linear.name for linear in graph.held) for graph in made]
        calls.append({"layers": [each.layer_number - 1 for each in layers], "held": held})
        return made

    if importlib.util.find_spec("transformer_engine") is None:  # a replay imports it, and takes nothing from it
        for name in ("transformer_engine", "transformer_engine.pytorch"):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    seed = tensor_parallel.model_parallel_cuda_manual_seed
    tensor_parallel.model_parallel_cuda_manual_seed = lambda number, *_, **__: seed(number)  # states that CPUs have
    core.HAVE_TE_GRAPHS, core.make_graphed_callables = True, make
    core.is_te_min_version = transformer_layer.is_te_min_version = lambda *version: True
    validate._check_graphs = lambda config, args: None
    torch.cuda.mem_get_info = lambda *_: (1 << 40, 1 << 40)
    torch.cuda.memory_reserved = lambda *_: len(calls) << 20
    if os.environ["RANK"] == "0":
        atexit.register(lambda: Path(os.environ["CAPTURES"]).write_text(json.dumps([calls, sorted(replayed)])))


def main() -> int:
    for name in filter(None, os.environ.get("ALTER", "").split(",")):
        globals()[name]()
    code = pretrain_gpt.main()
    print("process groups left:", dist.is_initialized())
    return code


if __name__ == "__main__":
    sys.exit(main())
