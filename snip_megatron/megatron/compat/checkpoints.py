"""Looks up what a distributed checkpoint holds before it is loaded."""

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
    """Whether the checkpoint that Megatron will load holds an object ``key``.

    Returns False if there is no distributed checkpoint: at the start of a run, or with an older format.
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
    """Return the folder of the iteration to load. Megatron's own lookup is a collective, this one is not."""
    iteration, release = args.ckpt_step or chosen_iteration(args.load), False
    if iteration is None:
        try:
            text = Path(checkpointing.get_checkpoint_tracker_filename(args.load)).read_text(encoding="ascii").strip()
            release = text == "release"
            iteration = 0 if release else int(text)
        except (OSError, ValueError):
            return None
    return Path(checkpointing.get_checkpoint_name(args.load, iteration, release, return_base_dir=True))
