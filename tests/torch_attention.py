"""Attention by torch, for models of Megatron on a CPU."""

from typing import Any

import torch


class TorchAttention(torch.nn.Module):
    """Causal attention. Megatron's own allocates on a CUDA device, has heads of one size and no packed documents."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        packed = kwargs.get("packed_seq_params")
        if packed is not None:  # [t, heads, d], of which each document attends to itself
            query, key, value = (t[:, None] for t in (query, key, value))
            place = torch.arange(query.shape[0])
            document = torch.bucketize(place, packed.cu_seqlens_q[1:], right=True)
            kwargs = {"attn_mask": (document[:, None] == document) & (place[:, None] >= place)}
        else:
            kwargs = {"is_causal": True}
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [s, b, heads, d] -> [b, heads, s, d]
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **kwargs)
        return out.permute(2, 0, 1, 3).flatten(2)
