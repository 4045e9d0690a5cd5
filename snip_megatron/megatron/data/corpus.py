"""Finds and checks the text files of the inputs, and splits them by file into training text and hold-out."""

import fnmatch
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from snip_megatron.precision.errors import SnipError

SKIPPED_FOLDERS = ("__pycache__", "site-packages", "dist-packages")


@dataclass(frozen=True)
class TextFile:
    """One document.

    Attributes:
        key: Name of the input and path inside it, equal on every machine.
    """

    key: str
    digest: str
    path: Path
    size: int

    def position(self) -> float:
        """Return a number in [0, 1) from a hash of key and content. It does not depend on other files."""
        digest = hashlib.sha256(os.fsencode(f"{self.key}\0{self.digest}")).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    def text(self) -> str:
        """Return the content with its newlines unchanged. Raises SnipError if the file changed since it was listed."""
        data = _read(self.path)
        if hashlib.sha256(data).hexdigest() != self.digest:
            raise SnipError(f"{self.path}: changed while it was read; run again")
        return data.decode("utf-8")


@dataclass(frozen=True)
class Corpus:
    """All documents of the inputs.

    Attributes:
        files: The documents, ordered by key.
        skipped: Reason → number of files that were skipped.
    """

    inputs: tuple[str, ...]
    files: tuple[TextFile, ...]
    skipped: dict[str, int]

    def sha256(self) -> str:
        """Return a hash of all keys and contents."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(os.fsencode(f"{file.key}\0{file.digest}\n"))
        return digest.hexdigest()

    def split(self, share: float) -> tuple[list[TextFile], list[TextFile]]:
        """Return (training files, held-out files).

        About ``share`` of the files are held out, and at least one if ``share`` > 0. Raises SnipError if no file is
        left for training.
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


def collect(inputs: Sequence[Path], globs: Sequence[str]) -> Corpus:
    """Read every file of the inputs once.

    Binary files (with a NUL byte), files that are not UTF-8, empty files and duplicates are skipped and counted. A
    duplicate could leak held-out text into the training text. Raises SnipError if an input does not exist, cannot be
    read, or holds no text. A file that is named is taken whatever its name; ``globs`` select files inside folders.
    """
    total: Counter[str] = Counter()
    files: dict[str, TextFile] = {}
    for source in inputs:
        passed_over: Counter[str] = Counter()
        found = 0
        for key, path in _walk(source, globs):
            data = _read(path)
            if (reason := _unfit(data)) is not None:
                passed_over[reason] += 1
                continue
            found += 1
            file = TextFile(key, hashlib.sha256(data).hexdigest(), path, len(data))
            passed_over["duplicate"] += file.digest in files
            files[file.digest] = min(files.get(file.digest, file), file, key=lambda f: f.key)
        if not found:
            raise SnipError(f"{source}: {_nothing(source, globs, passed_over)}")
        total += passed_over
    ordered = tuple(sorted(files.values(), key=lambda f: (f.key, f.digest)))
    return Corpus(tuple(_name(source) for source in inputs), ordered, dict(sorted((+total).items())))


def _name(source: Path) -> str:
    return source.resolve().name or "root"


def _walk(source: Path, globs: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield (key, path) of the files of one input.

    Hidden folders, caches, installed packages and results of this command are left out.
    """
    if source.is_file():
        yield _name(source), source
        return
    if not source.is_dir():
        raise SnipError(f"{source}: {'not a regular' if source.exists() else 'no such'} file or folder")

    def stop(error: OSError) -> None:
        raise SnipError(f"{error.filename}: cannot be read ({error.strerror}); make it readable or name other inputs")

    for folder, subfolders, names in os.walk(source, onerror=stop):
        if {"manifest.json", "train.bin", "train.idx"} <= set(names):
            subfolders.clear()
            continue
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
    """Return why a content cannot be used as a document. Returns None if it can."""
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
    if counts:
        return f"no text in this folder ({counts}); name one with UTF-8 text files"
    return f"no file in this folder matches --glob {' '.join(globs)}"
