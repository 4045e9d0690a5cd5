"""Which MLPs of a decoder are mixtures of experts, from Megatron's arguments or a model's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from snip_megatron.errors import SnipError


@dataclass(frozen=True)
class ExpertLayers:
    """The mixtures of experts of a decoder.

    Attributes:
        layers: global 0-based indices of the layers whose MLP is one.
        experts: of a layer, on all ranks.
        active: of them that a token goes through (top-k).
        ffn: their hidden size (of each half where gated).
        shared_ffn: hidden size of the expert that every token goes through; 0: there is none.
        grouped: their GEMMs are one (``--moe-grouped-gemm``), which stays bf16; else they are linears like others. A
            shared expert stays bf16 in any case.
    """

    layers: frozenset[int]
    experts: int
    active: int
    ffn: int
    shared_ffn: int = 0
    grouped: bool = False

    @classmethod
    def of(cls, config: Any) -> ExpertLayers | None:
        """Of Megatron's parsed arguments or a TransformerConfig, which name the number of experts differently.

        None for a dense decoder. Raises SnipError where ``moe_layer_freq`` does not name every layer.
        """
        experts = getattr(config, "num_experts", None) or getattr(config, "num_moe_experts", None)
        if not experts:
            return None
        return cls(
            layers=_expert_layers(config.moe_layer_freq, config.num_layers),
            experts=int(experts),
            active=int(config.moe_router_topk),
            ffn=int(config.moe_ffn_hidden_size or config.ffn_hidden_size),
            shared_ffn=int(config.moe_shared_expert_intermediate_size or 0),
            grouped=bool(config.moe_grouped_gemm),
        )

    def bf16_elements(self, hidden: int, *, gated: bool) -> int:
        """Elements of the bf16 weights that a token meets in one layer's experts, N·K summed over fc1 and fc2."""
        routed = self.active * self.ffn if self.grouped else 0
        return hidden * (routed + self.shared_ffn) * (3 if gated else 2)

    @property
    def mixture(self) -> tuple[int, int]:
        """(experts, active) as :class:`snip_megatron.statistics.table.LinearRow` has them."""
        return self.experts, self.active


def _expert_layers(pattern: Any, num_layers: int) -> frozenset[int]:
    """Megatron's ``--moe-layer-freq``: every how many layers there are experts, from the first on, or one flag each."""
    if isinstance(pattern, int):
        return frozenset(range(0, num_layers, pattern))
    if len(pattern) != num_layers:
        raise SnipError(f"--moe-layer-freq names {len(pattern)} layers, the decoder has {num_layers}")
    return frozenset(layer for layer, flag in enumerate(pattern) if flag)
