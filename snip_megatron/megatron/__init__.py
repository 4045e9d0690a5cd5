"""Everything that touches Megatron. Only ``compat`` names what is private or differs between its versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from snip_megatron.layers import LinearRegistry
    from snip_megatron.runtime.config import SnipConfig

__all__ = ["convert_model"]


def convert_model(model_chunks: Sequence[torch.nn.Module], config: SnipConfig) -> LinearRegistry:
    """Convert every decoder linear of this rank's model chunks in place, and return their registry.

    Parameters, their names and checkpoints do not change. Frozen linears and linears of other classes stay as they are,
    in bf16. Rank 0 prints which.

    Args:
        model_chunks: The chunks as Megatron built them, before or after Float16Module and DDP wrap them.
        config: SNIP's configuration.

    Raises:
        SnipError: If a chunk has no decoder.
    """
    from snip_megatron.megatron import conversion  # imports Megatron, which startup must precede

    return conversion.convert_model(model_chunks, config)
