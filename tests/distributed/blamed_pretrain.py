"""The training entry under ``--snip-blame``, which blames one step again for each fault that is planted from outside.

``CASES`` names functions below, which plant a fault and return a function that takes it away. The verdicts are written
to ``<case>.json`` in the folder.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers, mappings
from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication

from benchmarks.quality import blame_bugs
from benchmarks.quality.blame_sites import Site, note_linears
from snip_megatron import pretrain_gpt
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.layers.weights import WeightCache
from snip_megatron.megatron import setup
from snip_megatron.megatron.state_check import _named, state_checked
from snip_megatron.numerics.products.backend import GemmBackend
from snip_megatron.precision import Format, Gemm, PrecisionMap, option_id
from snip_megatron.runtime.blame import blame_step
from snip_megatron.runtime.blame_passes import Passes

Changed = Iterator[None]
LINEAR = "decoder.layers.1.mlp.linear_fc1"


def main() -> int:
    setup.run_blame = run_cases
    return pretrain_gpt.main()


def planted() -> int:
    """Train with a fault of the benchmark's catalogue on the second rank: ``PLANT`` at ``LINEAR``."""
    note_linears()
    getattr(blame_bugs, os.environ["PLANT"])(Site(os.environ["LINEAR"], rank=1, expert=0))
    return pretrain_gpt.main()


def run_cases(
    config: Any, args: Any, host: Any, registry: LinearRegistry, call: Any, job: Any, step_of: Any
) -> NoReturn:
    for case in os.environ["CASES"].split(","):
        formats = {option_id(name, gemm): Format.FP8 for name in registry.names for gemm in Gemm}
        formats |= {key: Format.FP4 for key in formats if case in ("narrow", "cut") and key.startswith(LINEAR)}
        of_case = dataclasses.replace(job, formats=PrecisionMap(choices=formats))
        if case.startswith("stock"):  # Megatron's own code in bf16
            of_case = dataclasses.replace(job, formats=PrecisionMap(choices=dict.fromkeys(formats, Format.BF16)))
        registry.adopt(of_case.formats)
        with ExitStack() as stack:
            if plant := globals().get(case) or globals().get(case.removeprefix("stock_")):
                stack.enter_context(plant(registry, call.model))
            # An outlier is in the weights, which the optimizer's copies do not follow here.
            state: Any = functools.partial(state_checked, call.model, call.optimizer, registry, host.groups)
            checks = [] if case in ("outlier", "part") else [state]
            seconds = math.inf if case != "hurried" else 1e-3 if last_rank() else 1e6
            passes = Passes(of_case, host, registry, step_of(call), seconds=seconds)
            blame = blame_step(passes, of_case.unfinished(1), Path.cwd(), *checks)
        if dist.get_rank() == 0:
            Path(f"{case}.json").write_text(blame.to_json())
    dist.barrier()
    raise SystemExit(0)


@contextmanager
def replaced(owner: Any, name: str, faulty: Callable[..., Any]) -> Changed:
    """Call ``faulty`` with the function of the owner that it replaces and with what that function is given."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **named: faulty(original, *args, **named))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def restored(tensors: list[torch.Tensor]) -> Changed:
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, values in zip(tensors, before, strict=True):
            tensor.copy_(values)


@contextmanager
def reduce_scatters_replaced(faulty: Callable[..., Any]) -> Changed:
    with ExitStack() as stack:
        stack.enter_context(replaced(dist, "reduce_scatter_tensor", faulty))
        for module in (layers, mappings):  # Megatron's own names
            stack.enter_context(replaced(module, "dist_reduce_scatter_func", faulty))
        yield


def last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def cut(registry: LinearRegistry, model: Any) -> Any:
    """The time ends after all passes but those of the bisection."""
    times = iter((False, False))
    return mock.patch.object(Passes, "is_late", property(lambda _: next(times, True)))


def rows(registry: LinearRegistry, model: Any) -> Any:
    """A kernel leaves out the last rows of an input gradient, on one rank."""

    def faulty(multiply: Any, backend: Any, gemm: Gemm, *args: Any) -> Any:
        y = multiply(backend, gemm, *args)
        if gemm is Gemm.DGRAD and last_rank() and backend.name == "reference":
            y[-3:] = 0
        return y

    return replaced(GemmBackend, "multiply", faulty)


def stock_rows(registry: LinearRegistry, model: Any) -> Any:
    """Megatron's own product leaves out the last rows, on one rank."""

    def faulty(forward: Any, *args: Any) -> Any:
        y = forward(*args)
        if last_rank():
            y[-3:] = 0
        return y

    return replaced(LinearWithGradAccumulationAndAsyncCommunication, "forward", faulty)


def stale(registry: LinearRegistry, model: Any) -> Any:
    """The cache of quantised weights returns those before a step."""
    handle = next(handle for handle in registry if handle.name == LINEAR)

    def faulty(get: Any, cache: Any, backend: Any, weights: Any, formats: Any, quantize: Any) -> Any:
        if cache is not handle.state.weights or backend.name != "reference":
            return get(cache, backend, weights, formats, quantize)
        current = weights[0].data
        with restored([current]):
            current.add_(torch.randn(current.shape, generator=torch.Generator().manual_seed(1)).to(current) * 2e-3)
            pair = get(cache, backend, [weights[0].detach().clone()], formats, quantize)
            return tuple(each._replace(tensor=each.tensor.clone()) for each in pair)

    return replaced(WeightCache, "get", faulty)


def lost(registry: LinearRegistry, model: Any) -> Any:
    """The part of one rank is missing in the sums of row-parallel linears."""

    def faulty(collective: Any, out: torch.Tensor, tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
        return collective(out, torch.zeros_like(tensor) if last_rank() else tensor, *args, **named)

    return reduce_scatters_replaced(faulty)


@contextmanager
def lost_gradient(registry: LinearRegistry, model: Any) -> Changed:
    """The part of one rank is missing in the sums of input gradients."""

    def is_lost(part: torch.Tensor) -> bool:
        return torch._C._current_graph_task_id() != -1 and last_rank() and part.dtype is torch.bfloat16

    def scatter(collective: Any, out: torch.Tensor, tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
        return collective(out, torch.zeros_like(tensor) if is_lost(tensor) else tensor, *args, **named)

    def reduce(collective: Any, tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
        return collective(tensor.zero_() if is_lost(tensor) else tensor, *args, **named)

    with reduce_scatters_replaced(scatter), replaced(dist, "all_reduce", reduce):
        yield


def raced(registry: LinearRegistry, model: Any) -> Any:
    """One rank reads gathered tokens before the last of them have arrived."""

    def faulty(collective: Any, out: torch.Tensor, *args: Any, **named: Any) -> Any:
        work = collective(out, *args, **named)
        if last_rank() and out.dim() == 3:
            if work is not None:
                work.wait()
            out[-2:] = 0
        return work

    return replaced(dist, "all_gather_into_tensor", faulty)


@contextmanager
def _changed(name: str, model: Any, change: Callable[[torch.Tensor], Any]) -> Changed:
    result = [parameter.data for each, parameter in _named(model) if each == name]
    with restored(result):
        for parameter in result if last_rank() else ():
            change(parameter)
        yield


def late(registry: LinearRegistry, model: Any) -> Any:
    """Some rows of a weight are those of the step before."""
    return _changed(LINEAR, model, lambda weight: weight[5:9].mul_(0.9))


def unequal(registry: LinearRegistry, model: Any) -> Any:
    """A norm differs on one rank."""
    return _changed("decoder.layers.2.input_layernorm", model, lambda weight: weight.mul_(1.25))


@contextmanager
def outlier(registry: LinearRegistry, model: Any) -> Changed:
    """One channel of a norm is so large that the others of its tile vanish in 8 bits."""
    norm = dict(_named(model))["decoder.layers.1.pre_mlp_layernorm"].data
    weight = next(handle for handle in registry if handle.name == LINEAR).weight.data
    with restored([norm, weight]):
        norm[7] *= 2.0**20
        weight[:, 7] /= 2.0**20
        yield


@contextmanager
def part(registry: LinearRegistry, model: Any) -> Changed:
    """On one rank, one input channel of a shard, or of one expert, is so large that the others vanish in 8 bits."""
    mlps = [handle for handle in registry if ".1.mlp." in handle.name]
    first, second = (
        next(handle.weight.data for handle in mlps if handle.name.endswith(path))
        for path in ("linear_fc1", "linear_fc2")
    )
    with restored([first, second]):
        if last_rank():
            first[len(first) // 2 + 7].mul_(2.0**20)
            second[:, 7].mul_(2.0**-20)
        yield


@contextmanager
def offset(registry: LinearRegistry, model: Any) -> Changed:
    """The first rows of an expert are given to the one before it, on one rank."""

    def shift(module: Any, inputs: Any) -> Any:
        hidden, counts, *remainder = inputs
        if last_rank() and int(counts[1]) > 1:
            counts = counts + torch.tensor([2, -2] + [0] * (len(counts) - 2))
        return (hidden, counts, *remainder)

    modules = [each for chunk in model for each in chunk.named_modules()]
    hooks = [each.register_forward_pre_hook(shift) for name, each in modules if name.endswith("layers.1.mlp.experts")]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
