"""The models of the evaluation as Megatron arguments: Llamas (RMSNorm, SwiGLU, RoPE, untied), and mixtures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from snip_megatron.errors import SnipError, quoted


@dataclass(frozen=True)
class Model:
    """The sizes of a Llama. ``groups`` is the number of key-value heads; ``groups == heads`` is plain attention.

    ``more`` are Megatron's arguments that make another model of it.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    more: str = ""

    def arguments(self, sequence: int) -> list[str]:
        """Return Megatron's arguments for sequences of ``sequence`` tokens, in bf16 with local (torch) layers."""
        shape = {
            "--num-layers": self.layers,
            "--hidden-size": self.hidden,
            "--ffn-hidden-size": self.ffn,
            "--num-attention-heads": self.heads,
            "--seq-length": sequence,
            "--max-position-embeddings": sequence,
            "--position-embedding-type": "rope",
            "--normalization": "RMSNorm",
            "--attention-dropout": 0,
            "--hidden-dropout": 0,
            "--transformer-impl": "local",
        }
        arguments = [text for pair in shape.items() for text in (pair[0], str(pair[1]))]
        arguments += ["--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--bf16"]
        # In short runs, compiling the fused kernels takes longer than they save.
        arguments.append("--disable-jit-fuser")
        if self.groups != self.heads:
            arguments += ["--group-query-attention", "--num-query-groups", str(self.groups)]
        return [*arguments, *self.more.split()]


_EXPERTS = (
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001"
    " --num-experts"
)
_LATENT = (
    "--multi-latent-attention --rope-type rope --no-rope-fusion --q-lora-rank 256 --kv-lora-rank 128 --qk-head-dim 64"
    " --qk-pos-emb-head-dim 32 --v-head-dim 64"
)
MODELS: Mapping[str, Model] = {
    "nano": Model(layers=2, hidden=64, ffn=128, heads=4, groups=2),  # for tests: trains in seconds on a CPU
    "tiny": Model(layers=4, hidden=256, ffn=512, heads=4, groups=2),
    "26m": Model(layers=8, hidden=512, ffn=1408, heads=8, groups=8),
    "125m": Model(layers=12, hidden=768, ffn=2048, heads=12, groups=12),
    # Qwen3-MoE-like, 26 M active of 157 M: every MLP a mixture, 4 of 32 experts.
    "moe": Model(8, 512, 1536, 8, 4, f"--qk-layernorm --moe-ffn-hidden-size 384 --moe-router-topk 4 {_EXPERTS} 32"),
    # DeepSeek-like: latent attention, one dense block, then a shared expert beside 4 of 16.
    "mla": Model(
        *(6, 512, 1408, 8, 8),
        f"{_LATENT} --moe-layer-freq [0]*1+[1]*5 --moe-shared-expert-intermediate-size 384 --moe-ffn-hidden-size 384"
        f" --moe-router-topk 4 {_EXPERTS} 16",
    ),
    "1b": Model(layers=22, hidden=2048, ffn=5632, heads=32, groups=4),
    "3b": Model(layers=26, hidden=3200, ffn=8640, heads=32, groups=32),
    "7b": Model(layers=32, hidden=4096, ffn=11008, heads=32, groups=32),
    "70b": Model(layers=80, hidden=8192, ffn=28672, heads=64, groups=8),
}
"""The models by name. They use grouped-query attention if the published model does."""


def model(name: str) -> Model:
    if name not in MODELS:
        raise SnipError(f"model {quoted(name)}: unknown; choose one of {', '.join(MODELS)}")
    return MODELS[name]
