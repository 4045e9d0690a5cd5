"""SNIP's state in Megatron's checkpoints: one small object, equal for every parallel layout.

Megatron without SNIP ignores the object. A checkpoint without it loads with a notice. In checkpoints of ``torch_dist``
a child module of the model contributes the object, so that Megatron's own code saves it (also asynchronously), loads
and reshards it. In the formats ``torch`` and ``fsdp_dtensor`` it is an entry beside the model. Under
``--use-torch-fsdp2`` it is written with the model, and read from what Megatron has loaded.
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

KEY = "snip.state"
_NAME = "state"
_ENTRY, _ENTRY_OF_MODEL = "snip_state", "snip_state.state"
_FORMATS = ("torch", "fsdp_dtensor")
_TYPES = (checkpointing.CheckpointType.LEGACY, checkpointing.CheckpointType.FSDP_DTENSOR)
check_signature(checkpointing.get_checkpoint_name, "checkpoints_path", "iteration", "release")
check_names(checkpointing, "_NON_PERSISTENT_CKPT_SUBDIR", "generate_state_dict", "_load_base_checkpoint")
check_names(training, "save_checkpoint")


class SnipState(torch.nn.Module):
    """A module without parameters that saves and loads bytes.

    Args:
        save: Returns the bytes to write into a checkpoint. It returns None before training has begun. The loaded bytes
            are then written again, as for a finished job that is started once more.
        expected: Returns whether the checkpoint that is loaded has the object.
    """

    def __init__(self, save: Callable[[], bytes | None], expected: Callable[[], bool]) -> None:
        super().__init__()
        self._save = save
        self._expected = expected
        self.loaded: bytes | None = None

    def content(self) -> bytes | None:
        """Return the bytes to write. None if there are none."""
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


@contextlib.contextmanager
def state_beside_model(save: Callable[[], bytes | None], load: Callable[[bytes | None], None]) -> Iterator[None]:
    """Let checkpoints of the formats ``torch`` and ``fsdp_dtensor`` have SNIP's state inside this context.

    Args:
        save: Called on every rank when such a checkpoint is written. Returns the state, or None if there is none.
        load: Called with the state in the checkpoint that is loaded, or with None if it has none.
    """
    save_checkpoint = training.save_checkpoint
    generate, read = checkpointing.generate_state_dict, checkpointing._load_base_checkpoint
    content: bytes | None = None

    def save_with_state(*positional: Any, **named: Any) -> Any:
        nonlocal content
        content = save() if get_args().ckpt_format in _FORMATS else None
        try:
            return save_checkpoint(*positional, **named)
        finally:
            content = None

    def generate_with_state(*positional: Any, **named: Any) -> Any:
        state_dict = generate(*positional, **named)
        args, loads = get_args(), content is None and get_args().load
        if args.ckpt_format == "fsdp_dtensor" and (not loads or checkpoint_has(args, _ENTRY)):
            state_dict[_ENTRY] = content  # in a load, torch replaces it by the entry of the checkpoint
        elif content is not None:
            state_dict[_ENTRY] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return state_dict

    def read_with_state(*positional: Any, **named: Any) -> Any:
        result = read(*positional, **named)
        torch_fsdp = getattr(get_args(), "use_torch_fsdp2", False)
        if (result[3] in _TYPES or torch_fsdp) and not named.get("rank0") and result[0]:
            state = result[0].get(_ENTRY, result[0].get("model", {}).get(_ENTRY_OF_MODEL))
            load(state.numpy().tobytes() if isinstance(state, torch.Tensor) else state)
        return result

    with (
        changed(training, save_checkpoint=save_with_state),
        changed(checkpointing, generate_state_dict=generate_with_state, _load_base_checkpoint=read_with_state),
    ):
        yield


# -- before a load ---------------------------------------------------------------------------------------------
def checkpoint_has(args: argparse.Namespace, key: str) -> bool:
    """Return whether the checkpoint that Megatron will load has an object ``key``.

    Returns False if there is no distributed checkpoint: at the start of a run, or with an older format.
    """
    directory = _checkpoint_directory(args)
    try:
        names = [] if directory is None else FileSystemReader(directory).read_metadata().state_dict_metadata
    except (OSError, EOFError, pickle.UnpicklingError):
        return False
    return any(name.partition("/")[0] == key for name in names)  # torch_dist adds the number of the part


def checkpoint_arguments(args: argparse.Namespace) -> tuple[argparse.Namespace, float] | None:
    """Return the arguments of the job that saved the checkpoint to load, and when it did, in seconds since 1970.

    None unless its format is ``torch_dist``.
    """
    directory = _checkpoint_directory(args)
    path = None if directory is None else directory / "common.pt"
    if path is None or not path.is_file():
        return None
    saved = torch.load(path, map_location="cpu", weights_only=False).get("args")
    return None if saved is None else (saved, path.stat().st_mtime)


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
