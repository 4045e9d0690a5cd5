"""Output files of the commands. A file is written completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from snip_megatron.errors import SnipError
from snip_megatron.records.storage import write_atomically


def check_folder(argument: str, path: Path | None) -> None:
    """Check that an output file can be made, so that a command fails before it computes anything.

    Raises SnipError naming ``argument`` if ``path`` is a folder, or its own folder is missing or cannot be written.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if os.path.isdir(path):  # False for a name that is too long, where Path.is_dir raises
        raise SnipError(f"{argument} {path}: is a folder; name a file in it")
    if not os.path.isdir(folder):
        raise SnipError(f"{argument} {path}: there is no folder {folder}")
    if not is_special(path) and not os.access(folder, os.W_OK):
        raise SnipError(f"{argument} {path}: the folder {folder} cannot be written")


def write_output(path: Path, data: bytes) -> None:
    """Write ``data`` by :func:`write_atomically`, or straight into ``path`` if it is a pipe or a device.

    A rename would put a file in the place of ``/dev/null``. Raises OSError if ``path`` cannot be written.
    """
    if is_special(path):
        path.write_bytes(data)
    else:
        write_atomically(path, data)


def deliver(argument: str, path: Path | None, text: str) -> None:
    """Write ``text`` to ``path``, or to standard output if that is None. Raises SnipError naming ``argument``."""
    if path is None:
        print(text, end="")
        return
    try:
        write_output(path, text.encode())
    except OSError as error:
        raise SnipError(f"{argument} {path}: cannot be written: {error.strerror}") from None


def is_special(path: Path) -> bool:
    """Return whether ``path`` is a pipe or a device."""
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))
