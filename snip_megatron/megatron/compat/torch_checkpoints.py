"""SNIP's state in checkpoints of the formats ``torch`` and ``fsdp_dtensor``: an entry of its own beside the model.

Megatron without SNIP ignores the entry. In checkpoints of ``torch_dist`` the state is an object of the model, which
Megatron does not give to the model under ``--use-torch-fsdp2``.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.training import checkpointing, get_args, training

from snip_megatron.megatron.compat.checkpoints import checkpoint_holds
from snip_megatron.megatron.compat.versions import changed, check_names

_KEY, _OF_MODEL = "snip_state", "snip_state.state"
_FORMATS = ("torch", "fsdp_dtensor")
_FUNCTIONS = ("generate_state_dict", "_load_base_checkpoint")
_TYPES = (checkpointing.CheckpointType.LEGACY, checkpointing.CheckpointType.FSDP_DTENSOR)
check_names(checkpointing, *_FUNCTIONS)
check_names(training, "save_checkpoint")


@contextlib.contextmanager
def carry_state(save: Callable[[], bytes | None], load: Callable[[bytes | None], None]) -> Iterator[None]:
    """Let checkpoints of the formats ``torch`` and ``fsdp_dtensor`` hold SNIP's state inside this context.

    ``save`` is called on every rank when such a checkpoint is written, and returns the state, None if there is none.
    ``load`` is called with the state in the checkpoint that is loaded, None if it has none.
    """
    write = training.save_checkpoint
    make, read = (getattr(checkpointing, name) for name in _FUNCTIONS)
    content: bytes | None = None

    def write_with_state(*positional: Any, **named: Any) -> Any:
        nonlocal content
        content = save() if get_args().ckpt_format in _FORMATS else None
        try:
            return write(*positional, **named)
        finally:
            content = None

    def make_with_state(*positional: Any, **named: Any) -> Any:
        made = make(*positional, **named)
        args, loads = get_args(), content is None and get_args().load
        if args.ckpt_format == "fsdp_dtensor" and (not loads or checkpoint_holds(args, _KEY)):
            made[_KEY] = content  # in a load, torch puts what the checkpoint has in this place
        elif content is not None:
            made[_KEY] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return made

    def read_with_state(*positional: Any, **named: Any) -> Any:
        result = read(*positional, **named)
        by_torch = getattr(get_args(), "use_torch_fsdp2", False)
        if (result[3] in _TYPES or by_torch) and not named.get("rank0") and result[0]:
            state = result[0].get(_KEY, result[0].get("model", {}).get(_OF_MODEL))
            load(state.numpy().tobytes() if isinstance(state, torch.Tensor) else state)
        return result

    carrying = dict(zip(_FUNCTIONS, (make_with_state, read_with_state), strict=True))
    with changed(training, save_checkpoint=write_with_state), changed(checkpointing, **carrying):
        yield
