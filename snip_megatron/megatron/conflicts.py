"""Arguments of Megatron that cannot be combined with SNIP, and why. One entry refuses one argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Conflict:
    """One argument of Megatron that SNIP refuses.

    Attributes:
        argument: Name on the command line.
        attribute: Name in Megatron's parsed arguments.
        present: Returns whether a value of the attribute conflicts with SNIP.
        why: The reason and what to do, printed after "cannot be combined with --snip: ".
        derived: Whether Megatron computes the attribute from the argument. Its value is then not printed.
    """

    argument: str
    attribute: str
    present: Callable[[Any], bool]
    why: str
    derived: bool = False


def _given(value: Any) -> bool:
    return bool(value)


def _more_than_one(value: Any) -> bool:
    return value is not None and int(value) > 1


def _scales(value: Any) -> bool:
    return value not in (None, 0, 1)


def _equals(refused: str) -> Callable[[Any], bool]:
    return lambda value: bool(value == refused)


_OWN_PRECISION = "SNIP chooses the precision of the linears itself; leave it out"
_SHARDED = "its parameters have no FP32 main_grad of DDP to accumulate into; use --use-distributed-optimizer"
_WIDTH = "experts of another width than the decoder are not supported; leave it out"
_DENSE = "not supported so far"

CONFLICTS: tuple[Conflict, ...] = (
    Conflict("--fp8-format", "fp8", _given, _OWN_PRECISION),
    Conflict("--fp4-format", "fp4", _given, _OWN_PRECISION),
    Conflict("--fp8-param-gather", "fp8_param_gather", _given, _OWN_PRECISION),
    Conflict("--fp4-param-gather", "fp4_param_gather", _given, _OWN_PRECISION),
    Conflict("--te-precision-config-file", "te_precision_config_file", _given, _OWN_PRECISION),
    Conflict("--kitchen-config-file", "kitchen_config_file", _given, _OWN_PRECISION),
    Conflict("--use-kitchen", "use_kitchen", _given, _OWN_PRECISION),
    Conflict(
        "--reuse-grad-buf-for-mxfp8-param-ag",
        "reuse_grad_buf_for_mxfp8_param_ag",
        _given,
        "probes use the gradient buffer before it holds parameters; leave it out",
    ),
    Conflict(
        "--optimizer-cuda-graph",
        "optimizer_cuda_graph",
        _given,
        "a captured optimizer step would not see the gradient buffers as probes leave them; leave it out",
    ),
    Conflict("--use-megatron-fsdp", "use_megatron_fsdp", _given, _SHARDED),
    Conflict("--use-torch-fsdp2", "use_torch_fsdp2", _given, _SHARDED),
    Conflict("--tp-comm-overlap", "tp_comm_overlap", _given, "it replaces the linears' GEMMs by its own; leave it out"),
    Conflict(
        "--overlap-moe-expert-parallel-comm",
        "overlap_moe_expert_parallel_comm",
        _given,
        "it splits a layer's backward, which quantised linears do in one piece; leave it out",
    ),
    Conflict(
        "--delay-wgrad-compute",
        "delay_wgrad_compute",
        _given,
        "quantised wgrad runs in the backward of its linear; leave it out",
    ),
    Conflict(
        "--use-transformer-engine-op-fuser",
        "use_transformer_engine_op_fuser",
        _given,
        "it replaces the linears by fused operations; leave it out",
    ),
    Conflict(
        "--defer-embedding-wgrad-compute",
        "defer_embedding_wgrad_compute",
        _given,
        "Megatron implements it for Transformer Engine's linears only; leave it out",
    ),
    Conflict(
        "--tensor-parallel-num-weight-shards",
        "gtp_weight_remat_size",
        _more_than_one,
        "quantised linears hold their whole shard of the weight; leave it out",
        derived=True,
    ),
    Conflict(
        "--num-distributed-optimizer-instances",
        "num_distributed_optimizer_instances",
        _more_than_one,
        "not supported yet: probes take the optimizer's state to be sharded once; use 1",
    ),
    Conflict(
        "--mlp-chunks-for-training",
        "mlp_chunks_for_training",
        _more_than_one,
        "statistics would count each chunk as a microbatch; use 1",
    ),
    Conflict("--moe-latent-size", "moe_latent_size", _given, _WIDTH),
    Conflict(
        "--moe-router-fusion",
        "moe_router_fusion",
        _given,
        "probes route a batch as they did at first, which a fused router cannot; leave it out",
    ),
    Conflict("--mtp-num-layers", "mtp_num_layers", _given, _DENSE),
    Conflict("--multi-latent-attention", "multi_latent_attention", _given, _DENSE),
    Conflict("--experimental-attention-variant", "experimental_attention_variant", _given, _DENSE),
    Conflict("--heterogeneous-layers-config-path", "heterogeneous_layers_config_path", _given, _DENSE),
    Conflict("--fp16", "fp16", _given, "loss scaling would scale the statistics; use --bf16"),
    Conflict(
        "--loss-scale", "loss_scale", _scales, "loss scaling, in bf16 as well, would scale the statistics; leave it out"
    ),
    Conflict(
        "--non-persistent-ckpt-type",
        "non_persistent_ckpt_type",
        _equals("local"),
        "SNIP cannot tell whether such a checkpoint holds its state; use global",
    ),
    Conflict(
        "--optimizer-cpu-offload", "optimizer_cpu_offload", _given, "probes read the optimizer's state on the device"
    ),
)
