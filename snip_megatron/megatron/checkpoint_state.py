"""Stores SNIP's state in Megatron's distributed checkpoint as one small object, equal for every parallel layout.

A child module of the model contributes the object, so that Megatron's own code saves (also asynchronously), loads and
reshards it. Megatron without SNIP ignores the object. A checkpoint without it loads with a notice.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

KEY = "snip.state"
_NAME = "state"


class SnipState(torch.nn.Module):
    """A module without parameters that saves and loads bytes.

    ``save`` returns the bytes to store when a checkpoint is written, or None before training has begun. Those that were
    loaded are then stored again, as for a finished job that is started once more. ``expected`` returns whether a
    checkpoint that is loaded holds the object.
    """

    def __init__(self, save: Callable[[], bytes | None], expected: Callable[[], bool]) -> None:
        super().__init__()
        self._save = save
        self._expected = expected
        self.loaded: bytes | None = None

    def content(self) -> bytes | None:
        return self._save() or self.loaded

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedObject]:
        """Return the object to write, or the placeholder to load into.

        Returns an empty dictionary if there is nothing to write and the checkpoint being loaded lacks the object.
        """
        content = self.content()
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
