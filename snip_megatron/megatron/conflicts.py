"""Arguments of Megatron that cannot be combined with SNIP."""

from collections.abc import Callable
from typing import Any


def _more_than_one(value: Any) -> bool:
    return value is not None and int(value) > 1


_OWN_PRECISION = "SNIP chooses the precision of the linears itself; leave it out"

CONFLICTS: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    "--te-precision-config-file": ("te_precision_config_file", bool, _OWN_PRECISION),
    "--kitchen-config-file": ("kitchen_config_file", bool, _OWN_PRECISION),
    "--use-kitchen": ("use_kitchen", bool, _OWN_PRECISION),
    "--optimizer-cuda-graph": (
        "optimizer_cuda_graph",
        bool,
        "a captured optimizer step would not see the gradient buffers as probes leave them; leave it out",
    ),
    "--tensor-parallel-num-weight-shards": (
        "gtp_weight_remat_size",
        _more_than_one,
        "quantised linears hold their whole shard of the weight; leave it out",
    ),
    "--mlp-chunks-for-training": (
        "mlp_chunks_for_training",
        _more_than_one,
        "statistics would count each chunk as a microbatch; use 1",
    ),
    "--overlap-dispatch-backward-with-experts-wgrad": (
        "overlap_dispatch_backward_with_experts_wgrad",
        bool,
        "quantised wgrad of experts runs in the backward of its linear; leave it out",
    ),
    "--non-persistent-ckpt-type local": (
        "non_persistent_ckpt_type",
        lambda value: bool(value == "local"),
        "SNIP cannot tell whether such a checkpoint holds its state; use global",
    ),
}
"""Argument → the attribute that has its value, whether a value conflicts, and why, with what to do."""
