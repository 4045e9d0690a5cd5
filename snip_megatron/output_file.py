"""Writing what a command was asked for: whole or not at all, and one line when it cannot be."""

from __future__ import annotations

import sys
from pathlib import Path

from snip_megatron.errors import SnipError
from snip_megatron.reporting.storage import write_atomically


def check_folder(argument: str, path: Path | None) -> None:
    """Refuse a file in a folder that does not exist, before work is spent. Raises SnipError naming ``argument``."""
    if path is not None and not path.absolute().parent.is_dir():
        raise SnipError(f"{argument} {path}: there is no folder {path.absolute().parent}")


def deliver(argument: str, path: Path | None, text: str) -> None:
    """Write ``text`` to ``path``, or to standard output where that is None. Raises SnipError naming ``argument``."""
    if path is None:
        sys.stdout.write(text)
        return
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise SnipError(f"{argument} {path}: cannot be written: {error.strerror}") from None
