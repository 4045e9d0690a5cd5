"""Text files of named inputs: found, checked, told from binary ones, and split by file into train and hold-out."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from snip_megatron.errors import SnipError

SKIPPED_FOLDERS = ("__pycache__", "site-packages", "dist-packages")


@dataclass(frozen=True)
class TextFile:
    """One document. ``key`` (input's name / path in it) and ``digest`` (SHA-256 of the bytes) hold on every machine."""

    key: str
    digest: str
    path: Path
    size: int

    def position(self) -> float:
        """Where the file falls in [0, 1): a hash of key and content, so that other files do not move it."""
        digest = hashlib.sha256(f"{self.key}\0{self.digest}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    def text(self) -> str:
        """The content, newlines as they are. Raises SnipError if it changed since it was listed."""
        data = _read(self.path)
        if hashlib.sha256(data).hexdigest() != self.digest:
            raise SnipError(f"{self.path}: changed while it was read; run again")
        return data.decode("utf-8")


@dataclass(frozen=True)
class Corpus:
    """All documents of the inputs in the order of their keys, and how many files were passed over, by reason."""

    inputs: tuple[str, ...]
    files: tuple[TextFile, ...]
    skipped: dict[str, int]

    def sha256(self) -> str:
        """One hash of every key and content."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.key}\0{file.digest}\n".encode())
        return digest.hexdigest()

    def split(self, share: float) -> tuple[list[TextFile], list[TextFile]]:
        """(train, hold-out) by file: about ``share`` of the files are held out, at least one when ``share`` > 0.

        Raises:
            SnipError: there are too few files to have both.
        """
        held = [file for file in self.files if file.position() < share]
        if share > 0 and not held:
            held = [min(self.files, key=TextFile.position)]
        held_keys = {file.key for file in held}
        train = [file for file in self.files if file.key not in held_keys]
        if not train:
            raise SnipError(
                f"{', '.join(self.inputs)}: {len(self.files)} file(s) are too few for a hold-out by file;"
                " give more files, or --holdout 0 for none"
            )
        return train, held


def standard_library() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def collect(inputs: Sequence[Path], globs: Sequence[str], advance: Callable[[int], object] = lambda _: None) -> Corpus:
    """Reads every file of the inputs once. A named file is taken whatever its name; ``globs`` filter inside folders.

    Binary (a NUL byte), undecodable (not UTF-8), empty and repeated contents are passed over and counted; repeats
    because a copy in both parts would leak the hold-out. ``advance`` is told the bytes read.

    Raises:
        SnipError: an input does not exist, cannot be read, or has no text.
    """
    total: Counter[str] = Counter()
    files: dict[str, TextFile] = {}
    for source in inputs:
        passed_over: Counter[str] = Counter()
        found = 0
        for key, path in _walk(source, globs):
            data = _read(path)
            advance(len(data))
            reason = _unfit(data)
            if reason is None:
                found += 1
                file = TextFile(key, hashlib.sha256(data).hexdigest(), path, len(data))
                kept = files.setdefault(file.digest, file)
                if kept is not file:
                    files[file.digest] = min(kept, file, key=lambda f: f.key)
                    passed_over["duplicate"] += 1
            else:
                passed_over[reason] += 1
        if not found:
            raise SnipError(f"{source}: {_nothing(source, globs, passed_over)}")
        total += passed_over
    ordered = tuple(sorted(files.values(), key=lambda f: (f.key, f.digest)))
    return Corpus(tuple(_name(source) for source in inputs), ordered, dict(sorted(total.items())))


def total_size(inputs: Sequence[Path], globs: Sequence[str]) -> int:
    """Bytes that :func:`collect` will read, for a progress bar. Raises SnipError as it does for missing inputs."""
    return sum(path.stat().st_size for source in inputs for _, path in _walk(source, globs))


def _name(source: Path) -> str:
    return source.resolve().name or "root"


def _walk(source: Path, globs: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """(key, path) of the regular files of one input; hidden folders, caches and installed packages are left out."""
    if not source.exists():
        raise SnipError(f"{source}: no such file or folder")
    if source.is_file():
        yield _name(source), source
        return
    if not source.is_dir():
        raise SnipError(f"{source}: not a regular file or folder")

    def stop(error: OSError) -> None:
        raise SnipError(f"{error.filename}: cannot be read ({error.strerror}); make it readable or name other inputs")

    for folder, subfolders, names in os.walk(source, onerror=stop):
        subfolders[:] = sorted(n for n in subfolders if n not in SKIPPED_FOLDERS and not n.startswith("."))
        for name in sorted(names):
            path = Path(folder) / name
            relative = path.relative_to(source).as_posix()
            if any(fnmatch.fnmatch(name, g) or fnmatch.fnmatch(relative, g) for g in globs) and path.is_file():
                yield f"{_name(source)}/{relative}", path


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SnipError(f"{path}: cannot be read ({reason}); make it readable or name other inputs") from error


def _unfit(data: bytes) -> str | None:
    """Why a content is no document; None if it is one."""
    if not data.strip():
        return "empty"
    if b"\0" in data:
        return "binary"
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return "undecodable"
    return None


def _nothing(source: Path, globs: Sequence[str], passed_over: Counter[str]) -> str:
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(passed_over.items()))
    if source.is_file():
        return f"the file is {next(iter(passed_over))}; name a UTF-8 text file"
    if passed_over:
        return f"no text in this folder ({counts}); name one with UTF-8 text files"
    return f"no file in this folder matches --glob {' '.join(globs)}"
