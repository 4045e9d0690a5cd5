"""The contenders of :mod:`benchmarks.job`: models, and ways to train them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from benchmarks.jobs.multi_gpu_runs import sizes
from snip_megatron.precision import Format


@dataclass(frozen=True)
class Model:
    """A model.

    Attributes:
        arguments: its sizes as Megatron's arguments.
        transformer_engine: arguments in addition where Transformer Engine is installed.
        graphed: arguments in addition with CUDA graphs, which are Transformer Engine's then. Empty: the whole layer is
            captured.
    """

    arguments: list[str]
    transformer_engine: tuple[str, ...] = ()
    graphed: tuple[str, ...] = ()


def _model(layers: int, *shape: int, vocab: int = 32000) -> Model:
    return Model([*sizes(layers, *shape), "--vocab-size", str(vocab)])


NO_CHECKS = ("--no-check-for-nan-in-loss-and-grad", "--rerun-mode", "disabled")
"""Megatron's arguments against its checks for NaN, for which the host waits in every step."""


def _experts(layers: int, *shape: int, experts: str, vocab: int = 32000) -> Model:
    """Return a model with experts: grouped GEMMs, and Megatron's fusions of router and permutation.

    Without the checks the host prepares the optimizer's step, of a thousand weights, while the GPU still computes.
    """
    more = f"""
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall
    {shlex.join(NO_CHECKS)} --cross-entropy-loss-fusion
    """
    return Model(
        [*_model(layers, *shape, vocab=vocab).arguments, *shlex.split(experts), *shlex.split(more)],
        ("--moe-grouped-gemm", "--moe-router-fusion", "--moe-permute-fusion"),
        ("--cuda-graph-modules", "attn", "moe_router", "moe_preprocess"),
    )


QWEN3 = "--kv-channels 128 --qk-layernorm --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768"
"""Of Qwen3-30B-A3B."""
DEEPSEEK = """
--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
--v-head-dim 128 --rope-type rope --no-rope-fusion --num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 2048
--moe-shared-expert-intermediate-size 2048 --moe-router-score-function sigmoid
"""
"""Like DeepSeek-V3 with the hidden size of V2-Lite, which fits on one GPU."""
# Layers; hidden, ffn, heads, groups; sequence, sequences a microbatch and a step.
MODELS = {
    "1b": _model(22, 2048, 5632, 32, 4, 2048, 8, 16),
    "8b-blocks": _model(4, 4096, 14336, 32, 8, 8192, 1, 4),
    "8b-blocks-4k": _model(4, 4096, 14336, 32, 8, 4096, 1, 8),
    "qwen3-moe": _experts(4, 2048, 6144, 32, 4, 4096, 2, 4, experts=QWEN3),
    "deepseek-moe": _experts(4, 2048, 10944, 16, 16, 4096, 1, 4, experts=DEEPSEEK),
    "tiny": _model(2, 64, 192, 4, 2, 64, 2, 4, vocab=255),
    "tiny-moe": _experts(
        2, 64, 192, 4, 2, 64, 2, 4, vocab=255, experts="--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64"
    ),
}


@dataclass(frozen=True)
class Contender:
    """A way to train.

    Attributes:
        arguments: arguments in addition to the model's.
        graphs: implementations of CUDA graphs to try, of which the fastest counts; empty for none.
        transformer_engine: whether its formats are Transformer Engine's.
        map: the format of all GEMMs of its map; None without a map.
        updates: the arguments of a budget for which it solves its own maps; empty for the budget of
            ``--snip`` alone. None if it keeps one map or has none.
    """

    arguments: tuple[str, ...] = ()
    graphs: tuple[str, ...] = ()
    transformer_engine: bool = False
    map: Format | None = None
    updates: str | None = None


_BOTH = ("transformer_engine", "local")
_FP4 = "--snip-budget fp4=0.75"
_TE_TENSOR = ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise")
ROUTER_PADS = "--moe-router-padding-for-quantization"
"""The router makes the numbers of rows multiples, and not the experts. Its fusion is left out: Megatron 0.19 fails with
both, because the padding writes to a tensor that the fused router saves for its backward."""
_TE_BLOCK = ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise")
_GROUPED = "--moe-use-grouped-tensor"
"""Transformer Engine's grouped tensors, of Megatron 0.20, with a cuBLASLt that has them (13.4; FP8 13.5 and 13.6). One
weight of all experts also needs $NVTE_GROUPED_LINEAR_SINGLE_PARAM; Megatron refuses it with FP8 on Hopper."""
CONTENDERS = {
    "bf16": Contender(),
    "bf16_graphs": Contender(graphs=_BOTH),
    "te_fp8_tensor": Contender(_TE_TENSOR, transformer_engine=True),
    "te_fp8_tensor_graphs": Contender(_TE_TENSOR, ("transformer_engine",), transformer_engine=True),
    "te_fp8_tensor_routed": Contender((*_TE_TENSOR, ROUTER_PADS), transformer_engine=True),
    "te_fp8_block": Contender(_TE_BLOCK, transformer_engine=True),
    "te_fp8_block_routed": Contender((*_TE_BLOCK, ROUTER_PADS), transformer_engine=True),
    "te_fp8_block_graphs": Contender(_TE_BLOCK, ("transformer_engine",), transformer_engine=True),
    "te_grouped_bf16_graphs": Contender(
        (_GROUPED, "--moe-single-grouped-weight"), ("transformer_engine",), transformer_engine=True
    ),
    "te_grouped_tensor_graphs": Contender((*_TE_TENSOR, _GROUPED), ("transformer_engine",), transformer_engine=True),
    "te_grouped_tensor_routed": Contender((*_TE_TENSOR, _GROUPED, ROUTER_PADS), transformer_engine=True),
    "te_grouped_block_graphs": Contender((*_TE_BLOCK, _GROUPED), ("transformer_engine",), transformer_engine=True),
    "te_grouped_block_routed": Contender((*_TE_BLOCK, _GROUPED, ROUTER_PADS), transformer_engine=True),
    "snip_default": Contender(updates=""),
    "snip_default_graphs": Contender(graphs=_BOTH, updates=""),
    "snip_fp8_tensor": Contender(map=Format.FP8_TENSOR),
    "snip_fp8_tensor_graphs": Contender(graphs=_BOTH, map=Format.FP8_TENSOR),
    "snip_fp8_tensor_unfused_graphs": Contender(("--snip-fusions", "none"), graphs=_BOTH, map=Format.FP8_TENSOR),
    "snip_fp8": Contender(map=Format.FP8),
    "snip_fp8_graphs": Contender(graphs=_BOTH, map=Format.FP8),
    "snip_fp8_unfused_graphs": Contender(("--snip-fusions", "none"), graphs=_BOTH, map=Format.FP8),
    "snip_fp4_75": Contender(updates=_FP4),
    "snip_fp4_75_graphs": Contender(graphs=_BOTH, updates=_FP4),
    "snip_bf16_graphs": Contender(graphs=_BOTH, map=Format.BF16),
}
EXTRA = (
    "te_fp8_tensor_routed",
    "te_fp8_block_routed",
    "te_grouped_bf16_graphs",
    "te_grouped_tensor_graphs",
    "te_grouped_tensor_routed",
    "te_grouped_block_graphs",
    "te_grouped_block_routed",
    "snip_fp8_tensor_unfused_graphs",
    "snip_fp8_unfused_graphs",
    "snip_fp4_75",
)
"""The contenders that are in a table only if they are asked for by name."""
