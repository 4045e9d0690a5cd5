"""SNIP's state in Megatron's checkpoints: one small object, equal for every parallel layout.

Megatron without SNIP ignores the object. A checkpoint without it loads with a notice. In checkpoints of ``torch_dist``
a child module of the model contributes the object, so that Megatron's own code saves it (also asynchronously), loads
and reshards it. In the formats ``torch`` and ``fsdp_dtensor`` it is an entry beside the model.
"""

import argparse
import contextlib
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from megatron.training import checkpointing, get_args, training
from torch.distributed.checkpoint.filesystem import FileSystemReader

from snip_megatron.megatron.compat.versions import changed, check_names, check_signature

check_signature(checkpointing.get_checkpoint_name, "checkpoints_path", "iteration", "release")
check_names(checkpointing, "_NON_PERSISTENT_CKPT_SUBDIR")


def checkpoint_holds(args: argparse.Namespace, key: str) -> bool:
    """Whether the checkpoint that Megatron will load holds an object ``key``.

    Returns False if there is no distributed checkpoint: at the start of a run, or with an older format.
    """
    directory = _checkpoint_directory(args)
    if directory is None:
        return False
    try:
        names = FileSystemReader(directory).read_metadata().state_dict_metadata
    except (OSError, EOFError, pickle.UnpicklingError):
        return False
    return any(name.partition("/")[0] == key for name in names)  # torch_dist adds the number of the part


def _checkpoint_directory(args: argparse.Namespace) -> Path | None:
    """Return the folder of the iteration to load. Megatron's own lookup is a collective, this one is not.

    Megatron takes the latest non-persistent checkpoint, unless the persistent one is newer.
    """
    folder = args.load
    iteration, release = (args.ckpt_step, False) if args.ckpt_step else _tracked(folder)
    if getattr(args, "non_persistent_ckpt_type", None) == "global":
        subfolder = str(Path(folder) / checkpointing._NON_PERSISTENT_CKPT_SUBDIR)
        other = args.non_persistent_global_ckpt_dir or subfolder
        latest, _ = _tracked(other)
        if latest is not None and (iteration is None or latest >= iteration):
            folder, iteration, release = other, latest, False
    if iteration is None:
        return None
    return Path(checkpointing.get_checkpoint_name(folder, iteration, release, return_base_dir=True))


def _tracked(folder: str) -> tuple[int | None, bool]:
    """Return the iteration that the tracker file of ``folder`` names, and whether it is a release.

    The iteration is None if there is no tracker file, or if it holds no number. Megatron then loads nothing.
    """
    tracker = Path(checkpointing.get_checkpoint_tracker_filename(folder))
    text = tracker.read_text().strip() if tracker.is_file() else ""
    if text == "release":
        return 0, True
    return int(text) if text.isdecimal() else None, False


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
