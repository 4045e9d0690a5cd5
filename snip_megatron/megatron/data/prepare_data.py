"""``snip prepare-data``: converts local text to Megatron's ``.bin/.idx``, with a tokenizer and a hold-out by file."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import math
import shlex
import signal
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from snip_megatron.megatron.data import text_tokenizer
from snip_megatron.megatron.data.corpus import Corpus, TextFile, collect
from snip_megatron.precision.errors import SnipError, needs_extra

with needs_extra("text", "snip prepare-data"):
    from tokenizers import Tokenizer
    from tqdm import tqdm

SCHEMA = "snip.data/1"
BATCH = 256  # files that the tokenizer processes in parallel
VOCABULARY = 4096
SMALLEST_VOCABULARY, LARGEST_VOCABULARY = text_tokenizer.BYTES + 1, 2**24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``snip prepare-data``."""
    add = parser.add_argument
    add(
        "inputs", nargs="*", type=Path, metavar="PATH", help="text files or folders; default: Python's standard library"
    )
    add("--output", type=Path, required=True, metavar="DIR", help="folder for the output; created by this command")
    text = "take only files whose name or path in a folder matches; repeatable; default: all, or *.py without PATH"
    add("--glob", action="append", metavar="PATTERN", help=text)
    text = "a BPE trained on the text, or one token per byte; default: bpe"
    add("--tokenizer", choices=("bpe", "bytes"), default="bpe", help=text)
    add("--vocab-size", type=int, metavar="N", help=f"size of the BPE vocabulary; default: {VOCABULARY}")
    add("--holdout", type=float, default=0.05, metavar="SHARE", help="share of files for validation; default: 0.05")
    add("--overwrite", action="store_true", help="replace DIR if this command wrote it")
    add("--reuse", action="store_true", help="do nothing if DIR already holds the same result")


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns its exit code. Raises SnipError on bad input."""
    _check(args)
    output: Path = args.output.resolve() if args.output.is_symlink() else args.output
    inputs = args.inputs or [Path(sysconfig.get_path("stdlib"))]
    globs = args.glob or (["*"] if args.inputs else ["*.py"])
    existing = _existing(output)
    if existing is None and output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise SnipError(f"--output {output}: exists and was not made by snip prepare-data; name another folder")
    if existing is not None and not (args.overwrite or args.reuse):
        raise SnipError(f"--output {output}: exists; add --overwrite to replace it or --reuse to keep an equal one")
    corpus = collect(inputs, globs)
    request = {"tokenizer": args.tokenizer, "holdout": args.holdout, "corpus_sha256": corpus.sha256()}
    if args.tokenizer == "bpe":
        request["vocab_size"] = args.vocab_size or VOCABULARY
    if existing is not None and args.reuse and existing.get("request") == request and _is_whole(output, existing):
        print(f"{output} is current: {existing['train']['tokens']:,} training tokens")
        return 0
    if existing is not None and not args.overwrite:
        raise SnipError(f"--output {output}: made from other text or arguments; add --overwrite to replace it")
    try:
        with _ended_by_signals(), _replacing(output) as folder:
            manifest = _build(corpus, request, folder)
    except OSError as error:
        raise SnipError(f"--output {output}: cannot be written ({error.strerror or error})") from error
    _report(manifest, output)
    return 0


def _check(args: argparse.Namespace) -> None:
    if not (math.isfinite(args.holdout) and 0 <= args.holdout < 1):
        raise SnipError(f"--holdout {args.holdout}: expected a share in [0, 1)")
    if args.vocab_size is None:
        return
    if args.tokenizer == "bytes":
        raise SnipError(f"--vocab-size {args.vocab_size}: --tokenizer bytes has {SMALLEST_VOCABULARY} tokens; give one")
    if not SMALLEST_VOCABULARY <= args.vocab_size <= LARGEST_VOCABULARY:
        raise SnipError(
            f"--vocab-size {args.vocab_size}: must be between {SMALLEST_VOCABULARY} (bytes and end of document)"
            f" and {LARGEST_VOCABULARY}"
        )


def _existing(output: Path) -> dict[str, Any] | None:
    """Return the manifest of an earlier result in ``output``. Returns None if there is none."""
    try:
        manifest = json.loads((output / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("schema") == SCHEMA else None


def _is_whole(output: Path, manifest: dict[str, Any]) -> bool:
    """Whether every file of the manifest exists with its hash."""
    files = manifest.get("files_sha256", {})
    # Files outside of the folder are not opened.
    if not isinstance(files, dict) or any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        return False
    return all((output / name).is_file() and _sha256(output / name) == digest for name, digest in files.items())


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Raise SystemExit in this context on signals that would end the process at once, but not on those that are
    ignored, as SIGHUP under nohup.
    """
    deadly = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for each in deadly:
        signal.signal(each, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        for each in deadly:
            signal.signal(each, signal.SIG_DFL)


@contextmanager
def _replacing(output: Path) -> Iterator[Path]:
    """Yield a new folder that replaces ``output`` at the end of the block, or is removed if the block fails."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.", ignore_cleanup_errors=True) as place:
        new, old = Path(place, "new"), Path(place, "old")
        new.mkdir()
        yield new
        if output.exists():
            output.rename(old)  # including the sample index that Megatron caches beside the data
        try:
            new.rename(output)
        except OSError:
            if old.exists():
                old.rename(output)
            raise


def _build(corpus: Corpus, request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write all files of the result into ``folder``. Returns the manifest."""
    train, held = corpus.split(request["holdout"])
    if request["tokenizer"] == "bpe":
        with _bar("training the tokenizer", sum(file.size for file in train)) as bar:
            tokenizer = text_tokenizer.train_bpe(_texts(train, bar), request["vocab_size"])
    else:
        tokenizer = text_tokenizer.byte_tokenizer()
    text_tokenizer.save(tokenizer, folder / "tokenizer")
    parts: dict[str, Any] = {"train": None, "valid": None}
    for name, files in (("train", train), ("valid", held)):
        if files:
            counts = _write(files, tokenizer, folder / name, f"tokenizing {name}")
            size, tokens = sum(file.size for file in files), int(counts.sum())
            parts[name] = {"prefix": name, "files": len(files), "bytes": size, "tokens": tokens}
            share = counts[counts > 0] / tokens
            parts[name]["unigram_entropy_nats"] = float(-(share * np.log(share)).sum())
    manifest = {
        "schema": SCHEMA,
        "request": request,
        "inputs": {"names": corpus.inputs, "files": len(corpus.files), "skipped": corpus.skipped},
        "tokenizer": {
            "folder": "tokenizer",
            "type": request["tokenizer"],
            "vocab_size": tokenizer.get_vocab_size(),
            "end_of_document_id": tokenizer.token_to_id(text_tokenizer.END_OF_DOCUMENT),
        },
        **parts,
        "files_sha256": {
            path.relative_to(folder).as_posix(): _sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def _write(files: list[TextFile], tokenizer: Tokenizer, prefix: Path, what: str) -> NDArray[np.int64]:
    """Write one ``.bin/.idx`` pair with one document per file. Returns the token counts, int64 [vocabulary]."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():  # about CUDA, Apex and Transformer Engine, which this command does not need
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    vocab_size = tokenizer.get_vocab_size()
    counts = np.zeros(vocab_size, np.int64)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocab_size))
    with _bar(what, sum(file.size for file in files)) as bar:
        for batch in itertools.batched(files, BATCH):
            for document in text_tokenizer.encode_documents(tokenizer, list(_texts(batch, bar))):
                counts += np.bincount(document, minlength=vocab_size)
                builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    return counts


def _texts(files: Iterable[TextFile], bar: tqdm[Any]) -> Iterator[str]:
    for file in files:
        yield file.text()
        bar.update(file.size)


def _bar(what: str, size: int) -> tqdm[Any]:
    """Return a progress bar in bytes on standard error. It is updated less often if that is not a terminal."""
    interval = 0.2 if sys.stderr.isatty() else 5.0
    return tqdm(total=size, desc=what, unit="B", unit_scale=True, mininterval=interval, file=sys.stderr)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _report(manifest: dict[str, Any], output: Path) -> None:
    skipped = ", ".join(f"{count} {reason}" for reason, count in manifest["inputs"]["skipped"].items())
    print(f"{manifest['inputs']['files']:,} files" + (f" ({skipped} passed over)" if skipped else ""))
    for name in ("train", "valid"):
        part = manifest[name]
        if part:
            print(f"{name}: {part['files']:,} files, {part['bytes']:,} bytes, {part['tokens']:,} tokens")
    vocab_size = manifest["tokenizer"]["vocab_size"]
    wanted = manifest["request"].get("vocab_size", vocab_size)
    note = "" if vocab_size == wanted else f" (the text has no more than these; --vocab-size {wanted} was asked for)"
    print(f"tokenizer: {manifest['tokenizer']['type']}, {vocab_size:,} tokens{note}")
    if manifest["valid"]:
        print(f"unigram entropy of the hold-out: {manifest['valid']['unigram_entropy_nats']:.4f} nats a token")
    data = ["--train-data-path", f"{output}/train", "--tokenizer-type", "HuggingFaceTokenizer"]
    data[2:2] = ["--valid-data-path", f"{output}/valid"] if manifest["valid"] else []
    print(f"for Megatron: {shlex.join([*data, '--tokenizer-model', f'{output}/tokenizer'])}")
