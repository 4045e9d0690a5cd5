"""Output files of the commands. A file is written completely or not at all."""

from __future__ import annotations

import sys
from pathlib import Path

from snip_megatron.errors import SnipError
from snip_megatron.records.storage import write_atomically


def check_folder(argument: str, path: Path | None) -> None:
    """Check that the folder of an output file exists, so that a command fails before it computes anything.

    Raises:
        SnipError: the folder of ``path`` does not exist. The message names ``argument``.
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise SnipError(f"{argument} {path}: there is no folder {path.absolute().parent}")


def deliver(argument: str, path: Path | None, text: str) -> None:
    """Write ``text`` to ``path``, or to standard output if ``path`` is None.

    Raises:
        SnipError: ``path`` cannot be written. The message names ``argument``.
    """
    if path is None:
        sys.stdout.write(text)
        return
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise SnipError(f"{argument} {path}: cannot be written: {error.strerror}") from None
