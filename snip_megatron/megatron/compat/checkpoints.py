"""Looks up what a distributed checkpoint holds before it is loaded."""

import argparse
import pickle
from pathlib import Path

from megatron.training import checkpointing
from torch.distributed.checkpoint.filesystem import FileSystemReader

from snip_megatron.megatron.compat.versions import check_names, check_signature

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
