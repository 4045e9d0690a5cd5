"""Attention by torch, for models of Megatron on a CPU."""

from __future__ import annotations

from typing import Any

import torch


class TorchAttention(torch.nn.Module):
    """Causal attention. Megatron's own allocates on a CUDA device, and has heads of one size only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [s, b, heads, d] -> [b, heads, s, d]
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)
