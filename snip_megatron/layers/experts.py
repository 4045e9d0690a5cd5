"""The mixture-of-experts layers of a decoder, read from Megatron's arguments or a model's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from snip_megatron.errors import SnipError


@dataclass(frozen=True)
class ExpertLayers:
    """The mixture-of-experts layers of a decoder.

    Attributes:
        layers: global 0-based indices of the layers whose MLP is a mixture of experts.
        experts: number of experts per layer, over all ranks.
        active: number of experts per token (top-k).
        ffn: hidden size of an expert; of each half if the MLP is gated.
        shared_ffn: hidden size of the shared expert, which every token passes through; 0 if there is none. A shared
            expert always stays in bf16.
    """

    layers: frozenset[int]
    experts: int
    active: int
    ffn: int
    shared_ffn: int = 0

    @classmethod
    def of(cls, config: Any) -> ExpertLayers | None:
        """Read Megatron's parsed arguments or a TransformerConfig. The two name the number of experts differently.

        Returns None for a dense decoder.

        Raises:
            SnipError: ``moe_layer_freq`` is below 1, or a list whose length is not the number of layers.
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
        )

    def bf16_elements(self, hidden: int, *, gated: bool) -> int:
        """Return the sum of N·K over the bf16 linears of experts that a token passes through in one layer."""
        return hidden * self.shared_ffn * (3 if gated else 2)

    @property
    def mixture(self) -> tuple[int, int]:
        """(experts, active), as in :class:`snip_megatron.statistics.table.LinearRow`."""
        return self.experts, self.active


def _expert_layers(pattern: Any, num_layers: int) -> frozenset[int]:
    """Read ``--moe-layer-freq``: an int n means every n-th layer from the first on; a list has a flag per layer."""
    if isinstance(pattern, int):
        if pattern < 1:
            raise SnipError(f"--moe-layer-freq {pattern}: give 1 or more, or a list with a 0 or a 1 for each layer")
        return frozenset(range(0, num_layers, pattern))
    if len(pattern) != num_layers:
        raise SnipError(f"--moe-layer-freq names {len(pattern)} layers, the decoder has {num_layers}")
    return frozenset(layer for layer, flag in enumerate(pattern) if flag)
