"""The one exception a user sees as a single line: what is wrong, where, and what to do."""

from __future__ import annotations


class SnipError(Exception):
    """Bad input or an impossible configuration.

    Commands print ``str(error)`` as one line on standard error and exit with ``exit_code``; no traceback.
    """

    exit_code = 2

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(" ".join(message.split()))
        if exit_code is not None:
            self.exit_code = exit_code
