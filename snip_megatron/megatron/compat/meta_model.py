"""Builds a model on torch's meta device, stage by stage, which needs no memory, no ranks and no GPU."""

import argparse
import contextlib
import copy
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.gated_delta_net import common, gdn
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch.testing._internal.distributed.fake_pg import FakeStore

from snip_megatron.megatron.compat.patches import token_prediction_repair
from snip_megatron.megatron.compat.versions import changed
from snip_megatron.precision.errors import SnipError, cut


class CannotBuildError(SnipError):
    """A part of the model needs a GPU, or a package that is not installed."""


def stages_on_meta(args: argparse.Namespace, model_config: Any) -> Iterator[list[torch.nn.Module]]:
    """Yield the model chunks of the first rank of each pipeline stage, as Megatron builds them.

    Process groups have the sizes that ``args`` implies for one data parallel rank, and exchange nothing. Raises
    SnipError if this process is a rank already, and CannotBuildError if the model cannot be built on this machine.
    """
    if dist.is_initialized():
        raise SnipError("a model is built on the meta device in a process without process groups")
    model_config = copy.copy(model_config)
    transformer = model_config  # a provider of Megatron Bridge has its fields itself
    if hasattr(model_config, "transformer"):
        transformer = model_config.transformer = copy.copy(model_config.transformer)
    transformer.use_cpu_initialization, transformer.perform_initialization = False, False
    transformer.init_model_with_meta_device = True
    # Transformer Engine and Megatron ask for the kernels, buffers and random states of these while they build.
    transformer.gradient_accumulation_fusion, transformer.tp_comm_overlap = False, False
    transformer.cuda_graph_impl = "none"
    model_config.vocab_size = model_config.vocab_size or model_config.make_vocab_size_divisible_by
    stages = args.pipeline_model_parallel_size
    inner = math.lcm(
        args.tensor_model_parallel_size * args.context_parallel_size,
        (args.expert_tensor_parallel_size or args.tensor_model_parallel_size) * args.expert_model_parallel_size,
    )
    for stage in range(stages):
        with _rank(args, stage * inner, stages * inner), _seeming_gpu():
            try:
                chunks = _build(model_config)
            except Exception as error:  # of any library that a part of the model needs
                message = " ".join(str(error).split()) or type(error).__name__
                raise CannotBuildError(f"the model cannot be built on this machine ({cut(message)})") from error
            yield chunks


def _build(model_config: Any) -> list[torch.nn.Module]:
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks = model_config.virtual_pipeline_model_parallel_size
    stages = [None] if chunks is None else range(chunks)
    with torch.device("meta"):
        if hasattr(model_config, "provide"):  # Megatron Bridge's
            model_config._pg_collection = groups
            return [model_config.provide(vp_stage=stage) for stage in stages]
        builder = model_config.get_builder_cls()(model_config)
        return [builder.build_model(groups, vp_stage=stage) for stage in stages]


@contextlib.contextmanager
def _rank(args: argparse.Namespace, rank: int, ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class _Norm(torch.nn.Module):
    """A norm's weight alone. It replaces norms whose classes come from packages for GPUs."""

    def __init__(self, size: int, **how: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size))


def _not_run(*arguments: Any, **named: Any) -> None: ...


# Module → stand-ins for its names from packages for GPUs. A model can be built with them, but not run.
_KERNELS: dict[Any, dict[str, Any]] = {
    mamba_mixer: {
        "HAVE_MAMBA_SSM": True,
        "HAVE_EINOPS": True,
        "ExtendedRMSNorm": _Norm,
        "get_cuda_rng_tracker": lambda: SimpleNamespace(fork=contextlib.nullcontext),  # a meta tensor has no values
    },
    common: {"HAVE_FLA": True, "chunk_gated_delta_rule": _not_run},
    gdn: {"chunk_gated_delta_rule": _not_run},
    WrappedTorchNorm: {"__new__": lambda cls, config, hidden_size, *how, **named: _Norm(hidden_size)},
    DotProductAttention: {"__init__": lambda self, *how, **named: torch.nn.Module.__init__(self)},
    token_dispatcher: dict.fromkeys(
        ("hybrid_ep_dispatch", "fused_dispatch", "set_deepep_num_sms", "nccl_ep_dispatch"), _not_run
    ),
}
"""The stand-ins of Megatron's norm and attention take all options. Attention has no weights."""


@contextlib.contextmanager
def _seeming_gpu() -> Iterator[None]:
    """Satisfy modules that ask for a CUDA device or for packages while they are built."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torch.cuda.is_available", return_value=True))
        stack.enter_context(mock.patch("torch.cuda.current_device", return_value="meta"))
        for module, names in _KERNELS.items():
            stack.enter_context(mock.patch.multiple(module, **names))
        stack.enter_context(changed(multi_token_prediction, **token_prediction_repair()))
        yield
