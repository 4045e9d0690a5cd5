"""``checkpoint-fallback``: resumes a job that was killed while saving from the newest complete checkpoint.

Megatron writes the parts of a checkpoint, then ``metadata.json``, then truncates and rewrites the tracker file. A kill
in between can leave an empty tracker, at which Megatron exits with code 0 without training. A host failure can leave
truncated files. This set checks the checkpoint that the tracker names before it is loaded. If it is incomplete, the
newest complete checkpoint before it is loaded instead.
"""

import contextlib
import re
from pathlib import Path

import megatron.training.checkpointing as checkpointing
import torch.distributed as dist
from megatron.training import get_args
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from snip_megatron.megatron.compat.versions import check_names, check_signature
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.records.storage import write_atomically

check_signature(checkpointing.read_metadata, "tracker_filename")
check_names(checkpointing._load_base_checkpoint, "read_metadata")

RELEASE = -1
"""Stands for the checkpoint of a release, which has no iteration."""


def install() -> str:
    """Replace Megatron's reader of the tracker file. Returns a description for the list printed at start."""
    checkpointing.read_metadata = read_tracker
    return "a checkpoint that was not written to its end is passed over for the newest one that was"


def read_tracker(tracker_filename: str) -> tuple[int, bool]:
    """Return (iteration to load, whether it is a release), as rank 0 finds it.

    Collective over all ranks if torch.distributed is initialised. Raises SnipError if neither the checkpoint that the
    tracker names nor an earlier one is complete.
    """
    tracker, together = Path(tracker_filename).absolute(), dist.is_initialized()
    found: list[int | None] = [None]
    if not together or dist.get_rank() == 0:
        found[0], fault = complete_iteration(tracker)
        if found[0] is not None and fault:
            print(
                f"compat: checkpoint-fallback: {tracker.parent}: {fault}: loading iteration {found[0]}",
                flush=True,
            )
            if together:  # in a training
                _repair(tracker, found[0])
    if together:
        dist.broadcast_object_list(found)
    if found[0] is None:
        raise SnipError(
            f"{tracker}: neither the checkpoint it names nor one before it is complete; name one by --ckpt-step, or"
            " start without --load"
        )
    return max(found[0], 0), found[0] == RELEASE


def complete_iteration(tracker: Path) -> tuple[int | None, str]:
    """Return the iteration that is loaded, and if the tracker file does not name it, what is wrong with that one.

    The iteration is :data:`RELEASE` for a release, and None if no checkpoint is complete.
    """
    text = ""
    with contextlib.suppress(OSError, ValueError):
        text = tracker.read_text(encoding="ascii").strip()
    if text == "release":
        return RELEASE, ""
    named = int(text) if re.fullmatch(r"\d{1,18}", text) else None
    if named is None:
        fault = "latest is incomplete (the tracker file is empty or no number)"
    elif (missing := what_is_missing(tracker.parent, named)) is None:
        return named, ""
    else:
        fault = f"iteration {named} is incomplete ({missing})"
    found = (int(folder.name[5:]) for folder in tracker.parent.glob("iter_*") if folder.name[5:].isdecimal())
    earlier = sorted((iteration for iteration in found if named is None or iteration < named), reverse=True)
    return next((each for each in earlier if what_is_missing(tracker.parent, each) is None), None), fault


def _repair(tracker: Path, iteration: int) -> None:
    """Rewrite the tracker if this job saves into its folder: Megatron reads it again (``--save-retain-interval``)."""
    save = getattr(get_args(), "save", None)
    if save and Path(save).absolute() == tracker.parent:
        with contextlib.suppress(OSError):  # the next save reports the same error
            write_atomically(tracker, str(iteration).encode())


# -- whether a checkpoint is complete --------------------------------------------------------------------------
def what_is_missing(folder: Path, iteration: int) -> str | None:
    """Return why a distributed checkpoint cannot be loaded.

    Returns None if it is complete, or if it has another format, which is not checked.
    """
    path = Path(checkpointing.get_checkpoint_name(str(folder), iteration, return_base_dir=True))
    if not path.is_dir():
        return "its folder is missing"
    names = {entry.name for entry in path.iterdir()}
    if names and ".metadata" not in names and not any(name.endswith(".distcp") for name in names):
        return None  # another format
    if ".metadata" not in names:
        return ".metadata is missing"
    try:
        metadata = FileSystemReader(path).read_metadata()
    except Exception as error:  # a broken pickle can raise anything
        return f".metadata cannot be read: {type(error).__name__}"
    # torch_dist writes metadata.json last. torch_dcp and fsdp_dtensor write none, and hold the iteration as an entry.
    if "metadata.json" not in names and "iteration" not in metadata.state_dict_metadata:
        return "metadata.json is missing"
    for name, end in _extents(metadata).items():
        size = (path / name).stat().st_size if name in names else -1
        if size < end:
            return f"{name} is missing" if size < 0 else f"{name} has {size} bytes of {end}"
    return None


def _extents(metadata: Metadata) -> dict[str, int]:
    """Return the size in bytes that each file must have at least according to torch's checkpoint metadata."""
    extents: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        end = place.offset + place.length
        extents[place.relative_path] = max(extents.get(place.relative_path, 0), end)
    return extents
