"""``checkpoint-fallback``: resumes a job that was killed while saving from the newest complete checkpoint.

Megatron writes the parts of a checkpoint, then ``metadata.json``, then truncates and rewrites the tracker file. A kill
in between can leave an empty tracker, at which Megatron exits with code 0 without training. A host failure can leave
truncated files. This set checks the checkpoint that the tracker names before it is loaded. If it is incomplete, the
newest complete checkpoint before it is loaded instead.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import megatron.training.checkpointing as checkpointing
import torch
import torch.distributed as dist
from megatron.training import get_args
from torch.distributed.checkpoint.filesystem import FileSystemReader

from snip_megatron.errors import SnipError
from snip_megatron.megatron.compat.versions import check_signature

check_signature(checkpointing.read_metadata, ("tracker_filename",), "read_metadata")
if "read_metadata" not in checkpointing._load_base_checkpoint.__code__.co_names:
    raise SnipError("Megatron's loader no longer looks read_metadata up: incomplete checkpoints cannot be passed over")

_RELEASE, _NONE, _SILENT = -1, -2, -3  # a rank's contribution to the agreement when it is no iteration
_ITERATION = re.compile(r"iter_(\d{7,18})\Z")
_chosen: dict[Path, int] = {}
_genuine = checkpointing.read_metadata


def install() -> str:
    """Replace Megatron's reader of the tracker file. Returns a description for the list printed at start."""
    checkpointing.read_metadata = read_tracker
    return "a checkpoint that was not written to its end is passed over for the newest one that was"


def chosen_iteration(folder: str | None) -> int | None:
    """Return the iteration that this process loads instead of the one that the tracker names.

    Returns None if the tracker's iteration is loaded.
    """
    return None if folder is None else _chosen.get(Path(folder).absolute())


def read_tracker(tracker_filename: str) -> tuple[int, bool]:
    """Return (iteration to load, whether it is a release), equal on all ranks.

    Collective over all ranks if torch.distributed is initialised.

    Raises:
        SnipError: If neither the checkpoint that the tracker names nor an earlier one is complete.
    """
    tracker = Path(tracker_filename).absolute()
    _chosen.pop(tracker.parent, None)  # of an earlier start in this process
    together = dist.is_initialized()
    decides = not together or dist.get_rank() == 0
    choice = _choose(tracker) if decides else _SILENT
    if together:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        agreed = torch.tensor([choice], dtype=torch.long, device=device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        choice = int(agreed)
    if choice == _NONE:
        raise SnipError(
            f"{tracker}: neither the checkpoint it names nor one before it is complete; name one by --ckpt-step, or"
            " start without --load"
        )
    if choice == _RELEASE:
        return 0, True
    if choice != _named(tracker):
        _chosen[tracker.parent] = choice
        if together:
            dist.barrier()  # other ranks may still be reading the tracker
            if decides:
                _repair(tracker, choice)
    return choice, False


def _choose(tracker: Path) -> int:
    named = _named(tracker)
    if named == _RELEASE:
        return _RELEASE
    fault = "the tracker file is empty or no number" if named is None else what_is_missing(tracker.parent, named)
    if fault is None and named is not None:
        return named
    for iteration in sorted(_iterations(tracker.parent), reverse=True):
        if (named is None or iteration < named) and what_is_missing(tracker.parent, iteration) is None:
            what = "latest" if named is None else f"iteration {named}"
            print(
                f"compat: checkpoint-fallback: {tracker.parent}: {what} is incomplete ({fault}): loading iteration"
                f" {iteration}",
                flush=True,
            )
            return iteration
    return _NONE


def _named(tracker: Path) -> int | None:
    """Return the iteration in the tracker file, _RELEASE, or None if it holds neither."""
    try:
        text = tracker.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    if text == "release":
        return _RELEASE
    return int(text) if re.fullmatch(r"\d{1,18}", text) else None


def _iterations(folder: Path) -> list[int]:
    return [int(match[1]) for entry in folder.iterdir() if (match := _ITERATION.match(entry.name)) and entry.is_dir()]


def _repair(tracker: Path, iteration: int) -> None:
    """Rewrite the tracker if this job saves into its folder: Megatron reads it again (``--save-retain-interval``)."""
    save = getattr(get_args(), "save", None)
    if save and Path(save).absolute() == tracker.parent:
        partial = tracker.with_name(tracker.name + ".part")
        with contextlib.suppress(OSError):  # the next save reports the same error
            partial.write_text(str(iteration), encoding="ascii")
            os.replace(partial, tracker)


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
    for name in ("metadata.json", ".metadata"):  # metadata.json is written last
        if name not in names:
            return f"{name} is missing"
    try:
        extents = _extents(path)
    except Exception as error:  # a broken pickle can raise anything
        return f".metadata cannot be read: {type(error).__name__}"
    for name, end in extents.items():
        size = (path / name).stat().st_size if name in names else -1
        if size < end:
            return f"{name} is missing" if size < 0 else f"{name} has {size} bytes of {end}"
    return None


def _extents(folder: Path) -> dict[str, int]:
    """Return the size in bytes that each file must have at least according to torch's checkpoint metadata."""
    extents: dict[str, int] = {}
    for place in (FileSystemReader(folder).read_metadata().storage_data or {}).values():
        end = place.offset + place.length
        extents[place.relative_path] = max(extents.get(place.relative_path, 0), end)
    return extents
