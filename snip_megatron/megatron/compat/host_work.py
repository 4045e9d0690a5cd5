"""Work that Megatron does for every parameter of a step, and that can be done once or left out.

**Updates** by Transformer Engine's FusedAdam clip gradients, update FP32 parameters and copy them into the model in one
launch. Megatron does the three one after the other, in 380 launches for four layers of 128 experts, and the GPU moves
42 bytes for every parameter instead of 30. The results are the same, bit for bit; gradients are not changed.

**Copies** between the distributed optimizer and the model run for all parameters in one launch. Megatron copies the
FP32 parameters into the model one by one, and takes a view of every gradient. With a thousand weights of experts this
takes the host 27 ms a step, longer than the GPU takes for Adam. The results are the same, bit for bit.

**The norm of gradients** counts the same tensors in every step. Megatron asks every parameter in every step whether
another parameter or rank counts it. Where it checks gradients for NaN, the GPU has nothing to do meanwhile.

**Buckets** that no other rank shares need no collectives. Where the experts of a layer stand on one data parallel rank
each, and on one GPU, Megatron still starts a gather and a reduction over one rank for every bucket, which change
nothing, and asks every parameter whether it is quantised.
"""

import functools
import inspect
import operator
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import megatron.core.distributed.param_and_grad_buffer as buffers
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as mixed_precision
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from snip_megatron.megatron.compat.versions import check_names, check_signature, nothing
from snip_megatron.numerics.quantize.kernels import has_kernels

_CLIP = "clip_grad_by_total_norm_fp32"
check_names(mixed_precision, _CLIP)
check_names(mixed_precision.MixedPrecisionOptimizer.clip_grad_norm, _CLIP)
check_names(inspect.unwrap(mixed_precision.ChainedOptimizer.step), _CLIP)
clip_gradients = getattr(mixed_precision, _CLIP)
to_local_if_dtensor = clip_grads.to_local_if_dtensor
check_signature(clip_gradients, "parameters", "max_norm", "total_norm", "use_decoupled_grad")
check_signature(DistributedOptimizer._copy_main_params_to_model_params, "self")
check_signature(DistributedOptimizer._copy_model_grads_to_main_grads, "self")
check_signature(DistributedOptimizer._get_model_param_range_map, "self", "param")
check_signature(inspect.unwrap(DistributedOptimizer.get_grads_for_grad_norm), "self", "grad_norm_group")
check_names(inspect.unwrap(clip_grads.get_grad_norm_fp32), "to_local_if_dtensor")
_COLLECTIVES = ("dist_all_gather_func", "dist_reduce_scatter_func")
check_names(buffers, "_coalescing_manager", "_param_uses_quantized_storage", *_COLLECTIVES)
check_names(_ParamAndGradBucketGroup.start_param_sync, "_coalescing_manager", _COLLECTIVES[0])
check_names(_ParamAndGradBucketGroup.start_grad_sync, "_coalescing_manager", _COLLECTIVES[1])
check_signature(_ParamAndGradBucketGroup._post_param_sync, "self")

_DONE = SimpleNamespace(wait=nothing)


# -- copies ----------------------------------------------------------------------------------------------------
def fuse_copies(optimizer: Any) -> None:
    """Replace the copies of the distributed optimizers in ``optimizer``, where they have Megatron's plain form.

    Parameters in FP8, Megatron-FSDP, and optimizers that hold the main parameters themselves have copies of their own.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, DistributedOptimizer) and _is_plain(part):
            copies = _Copies(part)
            part._copy_main_params_to_model_params = copies.update_model
            part._copy_model_grads_to_main_grads = copies.take_gradients
            part.get_grads_for_grad_norm = copies.gradients_of_norm
            clip_grads.to_local_if_dtensor = _to_local
            if _has_fused_update(part):
                _Update(part, copies)


def _is_plain(optimizer: Any) -> bool:
    ddp, config = optimizer.ddp_config, optimizer.config
    quantized = getattr(ddp, "fp8_param_gather", False) or getattr(ddp, "fp4_param_gather", False)
    has_copies = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 or config.optimizer_cpu_offload
    return not (optimizer.is_stub_optimizer or ddp.use_megatron_fsdp or quantized or has_copies)


class _Copies:
    """The copies of one optimizer. Megatron's own functions run where tensors are not as they are expected.

    The views that are copied are made once, and again when a tensor that they depend on is another one.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._copy_params = optimizer._copy_main_params_to_model_params
        self._copy_grads = optimizer._copy_model_grads_to_main_grads
        self._choose_grads = optimizer.get_grads_for_grad_norm
        self._params: tuple[list[Any], list[tuple[Tensor, Tensor]]] = ([], [])
        self._grads: tuple[list[Any], list[Tensor]] = ([], [])
        self._norm_grads: list[Tensor] | None = None  # the shards of `_grads` that the norm counts
        self.is_current = False  # whether the update has written the model

    @torch.no_grad()
    def update_model(self) -> None:
        """Copy this rank's shard of the FP32 parameters into the buffers of the model."""
        if self.is_current:
            self.is_current = False
            return
        pairs = self.shards()
        if pairs is None:
            self._copy_params()
            return
        groups: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for main, shard in pairs:
            groups.setdefault(shard.dtype, []).append((main, shard))
        for group in groups.values():
            mains, shards = zip(*group, strict=True)
            torch._foreach_copy_(shards, mains)

    def take_gradients(self) -> None:
        """Let the FP32 parameters have this rank's shard of ``main_grad`` as their gradients."""
        pairs = self._pairs()
        grads: list[Any] = [getattr(param, "main_grad", None) for _, param in pairs]
        if not _same(grads, self._grads[0]):
            if any(grad is None or grad.dtype is not torch.float32 for grad in grads):
                self._copy_grads()
                return
            shards = [self._shard(grad, param, "param") for grad, (_, param) in zip(grads, pairs, strict=True)]
            self._grads, self._norm_grads = (grads, shards), None
        for (main, _), shard in zip(pairs, self._grads[1], strict=True):
            main.grad = shard

    def gradients_of_norm(self, grad_norm_group: str | None = None) -> list[Tensor]:
        """Return the gradients that the norm counts, or a group of them that has a norm of its own.

        Which ones depends on nothing that changes in a run but the gradients' tensors.
        """
        if grad_norm_group is not None or not _same([main.grad for main, _ in self._pairs()], self._grads[1]):
            chosen: list[Tensor] = self._choose_grads(grad_norm_group)
            return chosen
        if self._norm_grads is None:
            self._norm_grads = self._choose_grads()
        return list(self._norm_grads)

    def _pairs(self) -> list[tuple[Any, Any]]:
        """Return this rank's shards of the FP32 parameters, each with its parameter of the model."""
        optimizer = self._optimizer
        kinds = (
            (optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups),
            (optimizer.shard_fp32_groups, optimizer.model_fp32_groups),
        )
        return [pair for kind in kinds for groups in zip(*kind, strict=True) for pair in zip(*groups, strict=True)]

    def shards(self) -> list[tuple[Tensor, Tensor]] | None:
        """Return this rank's shards of the FP32 parameters, each with its range of the model's buffers.

        None if a parameter is not on the device of the buffers.
        """
        pairs = self._pairs()
        mains = [main for main, _ in pairs]
        buffers = [bucket.param_data for buffer in self._optimizer.buffers for bucket in buffer.buckets]
        if any(main.device != buffers[0].device for main in mains):
            return None
        sources = [*mains, *buffers]
        if not _same(sources, self._params[0]):
            self._params = sources, [(main, self._model_shard(param)) for main, param in pairs]
        return self._params[1]

    def _model_shard(self, param: Any) -> Tensor:
        index, _, bucket = self._optimizer.model_param_gbuf_map[param]
        return self._shard(self._optimizer.buffers[index].buckets[bucket].param_data, param, "gbuf_world_in_bucket")

    def _shard(self, tensor: Tensor, param: Any, name: str) -> Tensor:
        """Return this rank's range of a tensor. Ranges of the name ``name`` count from its first element."""
        bounds = self._optimizer._get_model_param_range_map(param)[name]
        return tensor.view(-1)[bounds.start : bounds.end]


def _same(tensors: list[Any], before: list[Any]) -> bool:
    return len(tensors) == len(before) and all(map(operator.is_, tensors, before))


def _to_local(tensor: Any) -> Any:
    """Do what Megatron's function does, which enters a context for every tensor."""
    return tensor if type(tensor) is Tensor else to_local_if_dtensor(tensor)


# -- updates ---------------------------------------------------------------------------------------------------
_updates: "weakref.WeakValueDictionary[int, _Update]" = weakref.WeakValueDictionary()
"""The updates of this process, by the identities of their first parameters."""


def _has_fused_update(optimizer: Any) -> bool:
    """Return whether an optimizer is Transformer Engine's AdamW of FP32 states, whose bits :class:`AdamW` has here."""
    inner, parameters = optimizer.optimizer, optimizer.get_parameters()
    plain = {"adam_w_mode": 1, "capturable": False, "master_weights": False, "use_decoupled_grad": False}
    return (
        type(inner).__name__ == "FusedAdam"
        and type(inner).__module__.startswith("transformer_engine")
        and all(getattr(inner, name, None) == value for name, value in plain.items())
        and bool(parameters)
        and all(has_kernels(each) and each.dtype is torch.float32 for each in parameters)
        and {buffer.param_dtype for buffer in optimizer.buffers} <= {torch.bfloat16, torch.float32}
        and {buffer.grad_dtype for buffer in optimizer.buffers} == {torch.float32}
        and same_update(inner.multi_tensor_adam, parameters[0].device)
    )


def same_update(multi_tensor_adam: Any, device: torch.device) -> bool:
    """Return whether Transformer Engine's kernel updates parameters to the bits of :class:`AdamW`, on a sample."""
    from snip_megatron.numerics.adamw import AdamW

    generator = torch.Generator().manual_seed(1)  # the generators of the training must not move
    sample = torch.randn(4, 10_000, generator=generator) * torch.randn(4, 10_000, generator=generator).mul(8).exp()
    g, p, m, v = sample.to(device).unbind(0)
    v = v.abs()
    state = [each.clone() for each in (p, m, v)]
    no_overflow, one = torch.zeros(1, dtype=torch.int, device=device), torch.ones(1, device=device)
    adamw = AdamW([g], state[:1], state[1:2], state[2:], [None])
    lr, betas, eps, decay = 1e-3, (0.9, 0.95), 1e-8, 0.1
    for step in (1, 2, 1000):
        multi_tensor_adam(65536, no_overflow, [[g], [p], [m], [v]], lr, *betas, eps, step, 1, 1, decay)
        adamw.step(one, step, lr, betas, eps, decay, corrects=True)
    return all(map(torch.equal, state, (p, m, v)))


class _Update:
    """The update of one optimizer in one launch for each of its groups.

    Megatron's clipping and Transformer Engine's step run where tensors are not as they are expected, and in the first
    step, which creates the moments.
    """

    def __init__(self, optimizer: Any, copies: _Copies) -> None:
        self._inner, self._copies = optimizer.optimizer, copies
        self._step = self._inner.step
        self.parameters = optimizer.get_parameters()
        self._clip: tuple[float, Any] | None = None  # the largest norm and the norm of this step
        self._addresses: list[list[int]] = []
        self._groups: list[Any] = []
        self._inner.step = self.step
        if not optimizer.config.log_num_zeros_in_grad:  # which clipped gradients have more of
            _updates[id(self.parameters[0])] = self
            setattr(mixed_precision, _CLIP, _clip)

    def clip(self, max_norm: float, total_norm: Any) -> None:
        """Let the next step clip the gradients."""
        self._clip = max_norm, total_norm

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:
        """Do what FusedAdam's step does, and clip gradients and update the model as well."""
        clip, self._clip = self._clip, None
        self._copies.is_current = False
        if closure is not None or grad_scaler is not None or not self._is_ready():
            if clip is not None:
                clip_gradients(self.parameters, *clip)
            return self._step(closure, grad_scaler)
        coefficient = self._coefficient(*clip or (1.0, 0.0))
        for group, adamw in zip(self._inner.param_groups, self._groups, strict=True):
            group["step"] += 1
            adamw.step(
                coefficient, group["step"], group["lr"], group["betas"], group["eps"], group["weight_decay"],
                corrects=bool(group["bias_correction"]),
            )  # fmt: skip
        self._copies.is_current = True
        return None

    def _coefficient(self, max_norm: float, total_norm: Any) -> Tensor:
        """Return what gradients are multiplied by, as Megatron computes it."""
        coefficient = max_norm / (total_norm + 1.0e-6)
        if isinstance(coefficient, Tensor):
            return coefficient.clamp_max_(1.0)
        return torch.full((1,), coefficient if coefficient < 1.0 else 1.0, device=self.parameters[0].device)

    def _is_ready(self) -> bool:
        """Return whether parameters, gradients and moments are as the launches take them. Build these if need be."""
        inner, pairs = self._inner, self._copies.shards()
        hooks = inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks
        if hooks or pairs is None or not all(group["params"] and "step" in group for group in inner.param_groups):
            return False
        models = {id(main): shard for main, shard in pairs}
        parameters = [each for group in inner.param_groups for each in group["params"]]
        states = [inner.state.get(each, {}) for each in parameters]
        means, squares = ([state.get(name) for state in states] for name in ("exp_avg", "exp_avg_sq"))
        columns: list[list[Any]] = [[each.grad for each in parameters], parameters, means, squares]
        if any(each is None for column in columns for each in column) or len(models) != len(parameters):
            return False
        columns.append([models.get(id(each)) for each in parameters])
        addresses = [[0 if each is None else each.data_ptr() for each in column] for column in columns]
        if addresses != self._addresses:
            device = parameters[0].device
            if not all(_is_vector(each, device) for column in columns[:4] for each in column):
                return False
            self._addresses, self._groups = addresses, self._launches(columns)
        return True

    def _launches(self, columns: list[list[Any]]) -> list[Any]:
        """Return the launch of every group. FP32 parameters of the model are those of the optimizer."""
        from snip_megatron.numerics.adamw import AdamW

        columns[4] = [each if each.dtype is torch.bfloat16 else None for each in columns[4]]
        ends = [0]
        for group in self._inner.param_groups:
            ends.append(ends[-1] + len(group["params"]))
        g, p, m, v, models = columns
        return [AdamW(g[a:b], p[a:b], m[a:b], v[a:b], models[a:b]) for a, b in pairwise(ends)]


def _is_vector(tensor: Tensor, device: torch.device) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_contiguous() and tensor.device == device


def _clip(parameters: Any, max_norm: Any, total_norm: Any, use_decoupled_grad: bool = False) -> None:
    """Let the update of the parameters clip their gradients, if there is one of all of them."""
    update = _updates.get(id(parameters[0]))
    whole = update is not None and len(update.parameters) == len(parameters)
    if update is None or not whole or update.parameters[0] is not parameters[0] or use_decoupled_grad:
        clip_gradients(parameters, max_norm, total_norm, use_decoupled_grad)
    else:
        update.clip(max_norm, total_norm)


# -- buckets ---------------------------------------------------------------------------------------------------
def lighten_buckets(chunks: Sequence[torch.nn.Module]) -> None:
    """Leave out collectives over one rank, and what follows a gather of parameters that are not quantised."""
    _skip_collectives_of_one()
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and not chunk.ddp_config.reuse_grad_buf_for_mxfp8_param_ag:
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                if not any(map(buffers._param_uses_quantized_storage, group.params)):
                    group._post_param_sync = nothing


@functools.cache
def _skip_collectives_of_one() -> None:
    coalesce = buffers._coalescing_manager

    @contextmanager
    def coalescing_manager(group: Any = None, *arguments: Any, **named: Any) -> Iterator[Any]:
        if dist.get_world_size(group) == 1:
            yield _DONE
        else:
            with coalesce(group, *arguments, **named) as manager:
                yield manager

    buffers._coalescing_manager = coalescing_manager
    for name in _COLLECTIVES:
        setattr(buffers, name, _unless_alone(getattr(buffers, name)))


def _unless_alone(collective: Any) -> Any:
    """Return a collective from or into a shard, which over one rank is the whole tensor itself."""

    def run(output: torch.Tensor, shard: torch.Tensor, *arguments: Any, group: Any = None, **named: Any) -> Any:
        if dist.get_world_size(group) == 1 and output.data_ptr() == shard.data_ptr():
            return _DONE
        return collective(output, shard, *arguments, group=group, **named)

    return run
