"""Replaces the all-gather of updated parameters by the distributed optimizer (``--snip-parameter-gather``).

After its step the optimizer calls ``start_param_sync`` of each bucket group. That method is replaced on the groups of
the model. Under a map that quantises weights, it gathers them quantised. The bf16 weights are then those of the last
gather in bf16, except for what this rank updates. :meth:`ParameterGathers.complete` gathers them in bf16 before
something reads them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import megatron.core.distributed.param_and_grad_buffer as buffers
import torch

from snip_megatron.errors import SnipError
from snip_megatron.layers.context import LinearHandle
from snip_megatron.layers.parameter_gather import BufferedParameter, ParameterGather, formats_to_gather
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.megatron.compat.graphs import graph_implementation
from snip_megatron.megatron.compat.versions import check_signature
from snip_megatron.precision import Format

_GROUP, _METHOD = "_ParamAndGradBucketGroup", "start_param_sync"
_HERE = "--snip-parameter-gather quantized"
_HASHES = "check_weight_hash_across_dp_replicas_interval"


def check_parameter_gather(args: argparse.Namespace) -> None:
    """Raise SnipError if parameters cannot be gathered quantised with these arguments of Megatron."""
    if not hasattr(args, _HASHES) or not hasattr(getattr(buffers, _GROUP, None), _METHOD):
        raise SnipError(f"{_HERE}: needs Megatron's own training loop; leave it out")
    if not args.use_distributed_optimizer or getattr(args, "use_layer_wise_distributed_optimizer", False):
        raise SnipError(f"{_HERE}: only the distributed optimizer gathers parameters; add --use-distributed-optimizer")
    if args.data_parallel_size * args.context_parallel_size == 1:
        raise SnipError(f"{_HERE}: there is one data parallel rank, so that nothing is gathered; leave it out")
    if not args.bf16:
        raise SnipError(f"{_HERE}: parameters are gathered in FP32 without --bf16; add --bf16")
    _refuse(args, "overlap_param_gather", "a quantised gather is not overlapped with the forward so far")
    _refuse(args, "num_experts", "experts are not supported so far")
    _refuse(args, _HASHES, "it compares bf16 weights, which ranks do not hold")
    if (implementation := graph_implementation(args)) is not None:
        raise SnipError(
            f"{_HERE} cannot be combined with --cuda-graph-impl {implementation}: graphs read weights that are"
            " quantised in place; leave one out"
        )
    if args.ckpt_format != "torch_dist":
        raise SnipError(
            f"{_HERE} cannot be combined with --ckpt-format {args.ckpt_format}: weights are completed when a"
            " distributed checkpoint is written; use --ckpt-format torch_dist"
        )


def _refuse(args: argparse.Namespace, attribute: str, why: str) -> None:
    if value := getattr(args, attribute, None):
        shown = f"--{attribute.replace('_', '-')}" + ("" if value is True else f" {value}")
        raise SnipError(f"{_HERE} cannot be combined with {shown}: {why}; leave one out")


class ParameterGathers:
    """The gathers of parameters of this rank.

    Args:
        models: model chunks that DistributedDataParallel wraps.
        registry: this rank's linears.

    Raises:
        SnipError: Megatron's gather is not the one that is replaced.
    """

    def __init__(self, models: Sequence[Any], registry: LinearRegistry) -> None:
        check_signature(getattr(getattr(buffers, _GROUP), _METHOD), ("self", "force_sync"), f"Megatron's {_METHOD}")
        linears = {handle.weight: handle for handle in registry}
        self._registry = registry
        self._generation = registry.generation
        self._buckets: list[_Bucket] = []
        for model in models:
            for group in getattr(model, "bucket_groups", ()):
                self._replace(group, linears)
        if not self._buckets:
            raise SnipError(f"{_HERE}: the model is not wrapped by Megatron's DistributedDataParallel")

    def _replace(self, group: Any, linears: dict[torch.nn.Parameter, LinearHandle]) -> None:
        genuine = getattr(group, _METHOD)
        ranks = group.intra_distributed_optimizer_instance_group
        buckets = [_Bucket(bucket, ranks, linears) for bucket in group.buckets]

        def start_param_sync(force_sync: bool = False) -> None:
            if force_sync or not any(bucket.quantises for bucket in buckets):
                genuine(force_sync=force_sync)
                for bucket in buckets:
                    bucket.completed()
                return
            for bucket in buckets:
                bucket.gather()

        setattr(group, _METHOD, start_param_sync)
        self._buckets += buckets

    def complete(self) -> None:
        """Bring the bf16 weights of this rank up to date. Every rank must call it, between two steps."""
        for bucket in self._buckets:
            bucket.complete()

    def adopted(self) -> None:
        """Likewise if the map has changed since the last call. Must be called before the first forward under it."""
        if self._generation != self._registry.generation:
            self._generation = self._registry.generation
            self.complete()


class _Bucket:
    """A bucket, and what is known of its weights.

    Args:
        bucket: Megatron's bucket.
        group: the ranks that share it.
        linears: the linears by weight.
    """

    def __init__(self, bucket: Any, group: Any, linears: dict[torch.nn.Parameter, LinearHandle]) -> None:
        self._buffer: torch.Tensor = bucket.param_data
        self._group = group
        self._linears = {p: linears[p] for p in bucket.params_list if p in linears}
        self._parameters = sorted(bucket.params_list, key=torch.Tensor.data_ptr)
        self._plan: _Plan | None = None
        self._complete = True

    @property
    def quantises(self) -> bool:
        """Whether the map in force lets a weight of the bucket be gathered quantised."""
        return any(map(_formats, self._linears.values()))

    def gather(self) -> None:
        """Gather the bucket under the map in force."""
        formats = [handle.formats for handle in self._linears.values()]
        if self._plan is None or formats != self._plan.formats:
            assert self._complete, "another map, and weights that were not completed before it"
            self._plan = self._planned()
        found = self._plan.gather.gather()
        for handle, parameter in self._plan.quantised:
            handle.weights.gathered = found[parameter]
        if self._complete:
            self._plan.gather.forget_others()
        self._complete = False

    def complete(self) -> None:
        """Gather in bf16 what this rank does not hold in bf16."""
        if not self._complete:
            assert self._plan is not None
            self._plan.gather.gather_unquantised()
            self.completed()

    def completed(self) -> None:
        """Note that the buffer holds all parameters."""
        self._complete = True
        for handle in self._linears.values():
            handle.weights.gathered = None

    def _planned(self) -> _Plan:
        parameters, quantised, sharing = [], [], None
        for p in self._parameters:
            start = (p.data_ptr() - self._buffer.data_ptr()) // self._buffer.element_size()  # its data is a view
            parameter = BufferedParameter(start, tuple(p.shape))
            handle = self._linears.get(p)
            if handle is not None and (formats := _formats(handle)):
                parameter, sharing = replace(parameter, formats=formats), handle.tp_group
                quantised.append((handle, parameter))
            parameters.append(parameter)
        gather = ParameterGather(self._buffer, self._group, parameters, sharing)
        return _Plan([handle.formats for handle in self._linears.values()], gather, quantised)


def _formats(handle: LinearHandle) -> tuple[Format, ...]:
    fprop, dgrad, _ = handle.formats
    return formats_to_gather(fprop, dgrad)


@dataclass(frozen=True)
class _Plan:
    """The gather of a bucket under a map.

    Attributes:
        formats: the formats of the bucket's linears.
        gather: the gather.
        quantised: the linears whose weights it quantises, and these weights.
    """

    formats: list[tuple[Format, Format, Format]]
    gather: ParameterGather
    quantised: list[tuple[LinearHandle, BufferedParameter]]
