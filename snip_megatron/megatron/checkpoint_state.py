"""SNIP's state inside Megatron's distributed checkpoint: one small object, the same for every parallel layout.

A child module of the model contributes it: saving (asynchronous too), loading and resharding are Megatron's own. Plain
Megatron ignores the object; a checkpoint without it loads with a notice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

KEY = "snip.state"
_NAME = "state"


class SnipState(torch.nn.Module):
    """Carries bytes through a checkpoint.

    Args:
        save: the state to store, asked for when a checkpoint is written; None before training has begun.
        expected: whether the checkpoint being loaded holds the object; asked once, at loading.
    """

    def __init__(self, save: Callable[[], bytes | None], expected: Callable[[], bool]) -> None:
        super().__init__()
        self._save = save
        self._expected = expected
        self.loaded: bytes | None = None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedObject]:
        """The object to write, or the placeholder to read into; empty where the checkpoint has none."""
        content = self._save()
        if content is None and not self._expected():
            return {}
        data = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
        replica = (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
        )
        return {f"{prefix}{_NAME}": make_sharded_object_for_checkpoint(data, KEY, replica_id=replica)}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        value = state_dict.get(f"{prefix}{_NAME}")
        if isinstance(value, torch.Tensor) and value.dtype == torch.uint8:
            self.loaded = value.cpu().numpy().tobytes()
