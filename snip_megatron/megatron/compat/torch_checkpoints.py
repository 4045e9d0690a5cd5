"""SNIP's state in checkpoints of ``--ckpt-format torch``: an entry of its own beside the model in every file.

Megatron without SNIP ignores the entry. In distributed checkpoints the state is an object of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.training import checkpointing, get_args, training

from snip_megatron.megatron.compat.versions import check_names

_KEY = "snip_state"
_FUNCTIONS = ("generate_state_dict", "_load_base_checkpoint")
check_names(checkpointing, *_FUNCTIONS)
check_names(training, "save_checkpoint")


def carry_state(save: Callable[[], bytes | None], load: Callable[[bytes | None], None]) -> Callable[[], None]:
    """Let checkpoints of the format ``torch`` hold SNIP's state.

    Args:
        save: Called on every rank when such a checkpoint is written. Returns the state; None if there is none.
        load: Called with the state in the checkpoint that is loaded; None if it has none.

    Returns:
        A function that ends it.
    """
    write = training.save_checkpoint
    make, read = (getattr(checkpointing, name) for name in _FUNCTIONS)
    content: bytes | None = None

    def write_with_state(*positional: Any, **named: Any) -> Any:
        nonlocal content
        content = save() if get_args().ckpt_format == "torch" else None
        try:
            return write(*positional, **named)
        finally:
            content = None

    def make_with_state(*positional: Any, **named: Any) -> Any:
        made = make(*positional, **named)
        if content is not None:
            made[_KEY] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return made

    def read_with_state(*positional: Any, **named: Any) -> Any:
        result = read(*positional, **named)
        if result[3] == checkpointing.CheckpointType.LEGACY and not named.get("rank0"):
            state = result[0].get(_KEY)
            load(None if state is None else state.numpy().tobytes())
        return result

    def put(functions: tuple[Any, Any, Any]) -> None:
        training.save_checkpoint, checkpointing.generate_state_dict, checkpointing._load_base_checkpoint = functions

    put((write_with_state, make_with_state, read_with_state))
    return lambda: put((write, make, read))
