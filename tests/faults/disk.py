"""A disk that is full or read-only under one folder, at the calls with which a process writes."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class FaultyDisk:
    """From now on until :meth:`heal` nothing can be written under ``folder``: OSError ``error``.

    A full disk takes half of what the first writes bring, as a real one does. ``hit`` is called at the first failure.
    """

    def __init__(self, folder: Path, error: int, hit: Callable[[], None]) -> None:
        self._folder, self._error, self._hit = str(folder.absolute()) + os.sep, error, hit
        self._genuine = {name: getattr(os, name) for name in ("open", "write", "replace", "mkdir")}
        self._write_bytes = Path.write_bytes
        os.open, os.write, os.replace, os.mkdir = self._open, self._write, self._replace, self._mkdir  # type: ignore
        disk = self
        Path.write_bytes = lambda path, data: disk._write_whole(path, data)  # type: ignore[method-assign]

    def heal(self) -> None:
        """Everything as before."""
        for name, genuine in self._genuine.items():
            setattr(os, name, genuine)
        Path.write_bytes = self._write_bytes  # type: ignore[method-assign]

    def _concerns(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.path.abspath(path).startswith(self._folder)

    def _fail(self, path: Any) -> OSError:
        self._hit()
        self._hit = lambda: None
        return OSError(self._error, os.strerror(self._error), str(path))

    def _open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        if flags & _WRITING and self._concerns(path) and (self._error == errno.EROFS or not os.path.exists(path)):
            raise self._fail(path)
        return self._genuine["open"](path, flags, *args, **kwargs)

    def _write(self, descriptor: int, data: bytes) -> Any:
        if not self._concerns(path := os.readlink(f"/proc/self/fd/{descriptor}")):
            return self._genuine["write"](descriptor, data)
        if self._error == errno.ENOSPC and len(data) > 1 and len(data) % 2:
            self._hit()
            self._hit = lambda: None
            return self._genuine["write"](descriptor, data[: len(data) // 2])
        raise self._fail(path)

    def _replace(self, source: Any, target: Any, **kwargs: Any) -> Any:
        if self._error == errno.EROFS and self._concerns(target):
            raise self._fail(target)
        return self._genuine["replace"](source, target, **kwargs)

    def _mkdir(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        if self._concerns(path) and not os.path.isdir(path):
            raise self._fail(path)
        return self._genuine["mkdir"](path, *args, **kwargs)

    def _write_whole(self, path: Path, data: bytes) -> int:
        if not self._concerns(path):
            return self._write_bytes(path, data)
        if self._error == errno.ENOSPC:
            self._write_bytes(path, data[: len(data) // 2])
        raise self._fail(path)
