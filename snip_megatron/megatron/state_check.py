"""What ``--snip-blame`` checks beside GEMMs: parameters, their replicas, reductions, and the rows of experts.

Everything is compared with something that the job did not compute: parameters with the optimizer's main parameters and
with other ranks', the output of a row-parallel linear with a sum of all ranks' products, and the rows that experts get
with the routers' choice.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import get_attr_wrapped_model

from snip_megatron.layers.context import LinearHandle
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.megatron import compat
from snip_megatron.numerics.products.backend import matrix
from snip_megatron.precision import Gemm
from snip_megatron.runtime.gemm_check import KernelCheck, difference
from snip_megatron.runtime.watched import of_ranks
from snip_megatron.sensitivity.reduction import ProbeGroups

_CAST_BOUND = 100.0  # least signal to noise ratio in dB of a cast, which is exact
_FIRST = -1  # before all products of a step
_CHUNK = 2**24  # elements of a parameter that are read at a time


@contextmanager
def state_checked(
    model: Sequence[torch.nn.Module], optimizer: Any, registry: LinearRegistry, groups: ProbeGroups, check: KernelCheck
) -> Iterator[None]:
    """Check parameters at once, and reductions and rows of experts in the passes inside this context. Collective."""
    parameters = _named(model)
    for order, (name, parameter) in enumerate(parameters):
        _check_cast(optimizer, name, parameter, order, check)
    _check_replicas(parameters, groups, check)
    with ExitStack() as stack:
        for handle in registry:
            if handle.parallel == "row" and handle.tp_group is not None and handle.expert is None:
                hook = handle.module.register_forward_hook(_reduction_hook(handle, check))
                stack.callback(hook.remove)
        for chunk in model:
            for layer in (module for module in chunk.modules() if isinstance(module, MoELayer)):
                for hook in _row_hooks(layer, registry, check):
                    stack.callback(hook.remove)
        yield


# -- parameters --------------------------------------------------------------------------------------------------------
def _named(model: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of this rank by their names with global numbers of layers."""
    named = []
    for chunk in model:
        gpt = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
        numbers = {str(i): str(layer.layer_number - 1) for i, layer in enumerate(gpt.decoder.layers)}
        for name, parameter in gpt.named_parameters():
            name = re.sub(r"^(decoder\.layers\.)(\d+)", lambda m: m[1] + numbers[m[2]], name)  # noqa: B023
            named.append((name.removesuffix(".weight"), parameter))
    return named


def _check_cast(optimizer: Any, name: str, parameter: torch.nn.Parameter, order: int, check: KernelCheck) -> None:
    """Compare a parameter with the cast of the optimizer's main parameter, where this rank has it."""
    shard = compat.main_parameter(optimizer, parameter)
    if shard is None:
        return
    main, start, end = shard
    shape = parameter.shape if end - start == parameter.numel() else (end - start, 1)
    model_shard = parameter.detach().reshape(-1)[start:end].view(shape)
    main = main.detach().reshape(-1).to(model_shard.dtype).view(shape)
    compared = difference(main.reshape(shape[0], -1), model_shard.reshape(shape[0], -1), _CAST_BOUND)
    if compared is not None and compared.is_fault:
        where = f"{compared.where} are not the main parameter's"
        check.note((_FIRST, 0, order), "parameter", name, where=where, sqnr=compared.sqnr, bound=compared.bound)


def _check_replicas(
    parameters: Sequence[tuple[str, torch.nn.Parameter]], groups: ProbeGroups, check: KernelCheck
) -> None:
    """Compare parameters with those of the ranks that have the same. Collective."""
    sums = torch.stack([checksum(parameter) for _, parameter in parameters])
    is_expert = [not getattr(parameter, "allreduce", True) for _, parameter in parameters]
    sharded = [getattr(parameter, "tensor_model_parallel", False) for _, parameter in parameters]
    of_experts = groups.experts or groups
    for group, is_replica in (
        (groups.dp, [not expert for expert in is_expert]),
        (of_experts.dp, is_expert),
        (groups.tp, [not expert and not shard for expert, shard in zip(is_expert, sharded, strict=True)]),
    ):
        if not dist.is_initialized() or dist.get_world_size(group) == 1 or not any(is_replica):
            continue
        for order, differs in enumerate(_differs(torch.stack(of_ranks(sums, group)), dist.get_rank(group))):
            if differs and is_replica[order]:
                where = "differs from other ranks' copies"
                check.note((_FIRST, 1, order), "replica", parameters[order][0], where=where)


def checksum(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a sum over the bits of a parameter that depends on their order, int64 and 0-dim."""
    local = parameter.detach().reshape(-1)
    bits = local.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in torch.split(bits, _CHUNK):
        total = total * 31 + (part.long() * torch.arange(1, 2 * len(part), 2, device=bits.device)).sum()
    return total  # sums overflow alike on all ranks


def _differs(sums: torch.Tensor, rank_in_group: int) -> list[bool]:
    """Return which parameters of a rank of the group differ from those of most ranks. ``sums`` is [ranks, parameters].

    If the ranks are in two halves, that of the first rank counts as right.
    """
    usual = torch.where(2 * (sums == sums[0]).sum(0) >= len(sums), sums[0], sums.mode(0).values)
    return (sums[rank_in_group] != usual).tolist()


# -- reductions --------------------------------------------------------------------------------------------------------
def _reduction_hook(handle: LinearHandle, check: KernelCheck) -> Any:
    def compare(module: Any, arguments: Any, output: Any) -> None:
        """Compare the output of a row-parallel linear with the sum of all ranks' products. Collective."""
        y = output[0] if isinstance(output, tuple) else output
        returns_bias = getattr(module, "skip_bias_add", getattr(module, "te_return_bias", False))
        if module.bias is None or len(module.bias) == 0 or returns_bias:
            check.on_sum(handle, Gemm.FPROP, matrix(y.detach()))

    return compare


# -- rows of experts ---------------------------------------------------------------------------------------------------
def _row_hooks(layer: Any, registry: LinearRegistry, check: KernelCheck) -> list[Any]:
    """Return hooks that compare the numbers of rows that experts get with the router's choice."""
    config, dispatcher = layer.config, layer.token_dispatcher
    if config.moe_expert_capacity_factor is not None or config.moe_router_padding_for_quantization:
        return []
    group = getattr(dispatcher, "tp_ep_group", None)
    several = group is not None and dist.get_world_size(group) > 1
    modules = set(layer.modules())
    handle = next((each for each in registry if each.expert is not None and each.module in modules), None)
    if handle is None:
        return []
    position, name = handle.state.position, handle.name.rpartition(".")[0]
    local = list(layer.local_expert_indices)
    routed: list[torch.Tensor] = []

    def choose(module: Any, arguments: Any, output: Any) -> None:
        counts = output[1].bool().reshape(-1, output[1].shape[-1]).sum(0)
        if several:
            counts = torch.stack(of_ranks(counts, group)).sum(0)
        routed[:] = [counts]

    def compare(module: Any, arguments: Any) -> None:
        if not routed:
            return
        counts = arguments[1]
        rows = [int(each) for each in (counts.tolist() if isinstance(counts, torch.Tensor) else counts)]
        expected = [int(routed[0][index]) for index in local]
        if len(rows) == len(expected) and rows != expected:
            first = next(i for i, (a, b) in enumerate(zip(rows, expected, strict=True)) if a != b)
            where = f"expert {local[first]} gets {rows[first]} rows, and the router chose it {expected[first]} times"
            check.note((0, 0, position - 1), "experts", name, where=where, expert=local[first])

    return [layer.router.register_forward_hook(choose), layer.experts.register_forward_pre_hook(compare)]
