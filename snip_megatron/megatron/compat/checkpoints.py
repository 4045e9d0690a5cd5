"""What a distributed checkpoint holds, asked before it is loaded."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.training import checkpointing

from snip_megatron.megatron.compat.checkpoint_fallback import chosen_iteration
from snip_megatron.megatron.compat.versions import check_signature

check_signature(checkpointing.get_checkpoint_name, ("checkpoints_path", "iteration", "release"), "get_checkpoint_name")


def checkpoint_holds(args: argparse.Namespace, key: str) -> bool:
    """Whether the checkpoint that Megatron's arguments name for loading has an object ``key``.

    Without a distributed checkpoint there (a run that starts fresh, an old format) the answer is no.
    """
    directory = _checkpoint_directory(args)
    if directory is None:
        return False
    try:
        metadata = load_sharded_metadata(str(directory))
    except (CheckpointingException, OSError):
        return False
    return any(getattr(entry, "key", name) == key for name, entry in metadata.items())


def _checkpoint_directory(args: argparse.Namespace) -> Path | None:
    """The folder of the checkpoint's iteration, without the collective that Megatron's own lookup does."""
    iteration, release = args.ckpt_step or chosen_iteration(args.load), False
    if iteration is None:
        try:
            text = Path(checkpointing.get_checkpoint_tracker_filename(args.load)).read_text(encoding="ascii").strip()
            release = text == "release"
            iteration = 0 if release else int(text)
        except (OSError, ValueError):
            return None
    return Path(checkpointing.get_checkpoint_name(args.load, iteration, release, return_base_dir=True))
