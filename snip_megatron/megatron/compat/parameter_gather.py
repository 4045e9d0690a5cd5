"""Replaces the all-gather of updated parameters by the distributed optimizer (``--snip-parameter-gather``).

After its step the optimizer calls ``start_param_sync`` of each bucket group; with ``--overlap-param-gather`` the next
forward does. That method is replaced on the groups of the model. Under a map that quantises weights, it gathers them
quantised, and this rank has a bf16 weight only as far as it updates it. :meth:`ParameterGathers.complete` gathers the
rest before something reads it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import megatron.core.distributed.param_and_grad_buffer as buffers
import torch

from snip_megatron.errors import SnipError
from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.layers.parameter_gather import BufferedParameter, ParameterGather
from snip_megatron.layers.registry import LinearRegistry
from snip_megatron.megatron.compat.graphs import graph_implementation
from snip_megatron.megatron.compat.versions import check_signature
from snip_megatron.precision import Format
from snip_megatron.quantization.ranges import formats_to_gather

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
    _refuse(args, "overlap_param_gather_with_optimizer_step", "it gathers before a new map is known")
    _refuse(args, "num_experts", "experts are not supported so far")
    _refuse(args, "qk_clip", "it scales bf16 weights after the optimizer's step, and quantised ones stay as they are")
    _refuse(args, _HASHES, "it compares bf16 weights, which ranks do not hold")
    if (implementation := graph_implementation(args)) is not None:
        raise SnipError(
            f"{_HERE} cannot be combined with --cuda-graph-impl {implementation}: graphs read weights that are"
            " quantised in place; leave one out"
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
        self._groups: list[_Group] = []
        for model in models:
            if not getattr(getattr(model, "ddp_config", None), "use_distributed_optimizer", False):
                raise SnipError(
                    f"{_HERE}: the model is not wrapped by Megatron's DistributedDataParallel with the distributed"
                    " optimizer; wrap it so, or leave it out"
                )
            for group in model.bucket_groups:
                self._replace(group, linears)

    def _replace(self, group: Any, linears: dict[torch.nn.Parameter, LinearHandle]) -> None:
        found = _Group(group, linears, self._registry.context)
        setattr(group, _METHOD, found.start_param_sync)
        self._groups.append(found)

    def complete(self) -> None:
        """Bring the bf16 weights of this rank up to date. Every rank must call it, between two steps."""
        for group in self._groups:
            group.complete()

    def adopted(self) -> None:
        """Do the same if the map has changed since the last call. Must precede the first forward under it.

        With ``--overlap-param-gather`` that forward begins with a gather under this map.
        """
        if self._generation == self._registry.generation:
            return
        self._generation = self._registry.generation
        for group in self._groups:
            if not group.is_due:
                group.complete()


class _Group:
    """A bucket group of Megatron's, whose buckets are gathered together.

    Args:
        group: the bucket group.
        linears: the linears by weight.
        context: the state of the step.
    """

    def __init__(self, group: Any, linears: dict[torch.nn.Parameter, LinearHandle], context: StepContext) -> None:
        self._group, self._context = group, context
        self._genuine = getattr(group, _METHOD)
        ranks = group.intra_distributed_optimizer_instance_group
        self._buckets = [_Bucket(bucket, ranks, linears) for bucket in group.buckets]

    @property
    def is_due(self) -> bool:
        """Whether the next forward begins with a gather."""
        return bool(self._group.ddp_config.overlap_param_gather and not self._group.param_gather_dispatched)

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Replace Megatron's method: gather the parameters that the optimizer has updated.

        Args:
            force_sync: gather all in bf16, and wait.
        """
        trains = not self._context.probing and self._context.forcing is None
        if trains and not force_sync and any(bucket.quantises for bucket in self._buckets):
            assert self._group.param_gather_handle is None
            handle = _Handle([bucket.start() for bucket in self._buckets])
            self._group.param_gather_dispatched = True
            if self._group.ddp_config.overlap_param_gather:
                self._group.param_gather_handle = handle
            else:
                handle.wait()
            return
        if isinstance(self._group.param_gather_handle, _Handle):
            self._group.param_gather_handle.wait()
            self._group.param_gather_handle = None
        self._genuine(force_sync=force_sync)
        for bucket in self._buckets:
            bucket.completed()

    def complete(self) -> None:
        """Gather in bf16 what this rank does not hold in bf16."""
        if not all(bucket.complete for bucket in self._buckets):
            self.start_param_sync(force_sync=True)


class _Handle:
    """What Megatron waits for.

    Args:
        finishes: functions that wait for a gather and finish it.
    """

    def __init__(self, finishes: Sequence[Callable[[], None]]) -> None:
        self._finishes = finishes

    def wait(self) -> None:
        """Finish the gathers."""
        for finish in self._finishes:
            finish()


class _Bucket:
    """A bucket, and what is known of its weights.

    Args:
        bucket: Megatron's bucket.
        group: the ranks that share it.
        linears: the linears by weight.

    Attributes:
        complete: whether the buffer holds all parameters in bf16, as far as Megatron has gathered them.
    """

    def __init__(self, bucket: Any, group: Any, linears: dict[torch.nn.Parameter, LinearHandle]) -> None:
        self._buffer: torch.Tensor = bucket.param_data
        self._group = group
        self._linears = {p: linears[p] for p in bucket.params_list if p in linears}
        self._parameters = sorted(bucket.params_list, key=torch.Tensor.data_ptr)
        self._plan: _Plan | None = None
        self.complete = True

    @property
    def quantises(self) -> bool:
        """Whether the map in force lets a weight of the bucket be gathered quantised."""
        return any(map(_formats, self._linears.values()))

    def start(self) -> Callable[[], None]:
        """Start the gather of the bucket under the map in force. Returns a function that finishes it."""
        formats = [handle.formats for handle in self._linears.values()]
        if self._plan is None or formats != self._plan.formats:
            self.completed()  # what the map before had gathered is of no use, and what others hold is forgotten anew
            self._plan = self._planned()
        plan = self._plan
        started = plan.gather.start()
        if self.complete:
            plan.gather.forget_others()
        self.complete = False

        def finish() -> None:
            found = started.result()
            for handle, parameter in plan.quantised:
                handle.weights.gathered = found[parameter]

        return finish

    def completed(self) -> None:
        """Note that the buffer holds all parameters, or will when Megatron's gather is done."""
        self.complete = True
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
