"""``snip prepare-data``: converts local text to Megatron's ``.bin/.idx``, with a tokenizer and a hold-out by file."""

import argparse
import hashlib
import itertools
import json
import logging
import os
import shlex
import shutil
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from snip_megatron.precision.errors import SnipError, needs_extra

with needs_extra("text", "a tokenizer"):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from tqdm import tqdm

SCHEMA = "snip.data/1"
END_OF_DOCUMENT = "<|endoftext|>"
VOCABULARY = 4096
SMALLEST_VOCABULARY = 257  # 256 bytes and the end of document
_BATCH = 256  # files that the tokenizer processes in parallel
_SKIPPED_FOLDERS = ("__pycache__", "site-packages", "dist-packages")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``snip prepare-data``."""
    add = parser.add_argument
    text = "text files or folders; default: Python's standard library"
    add("inputs", nargs="*", type=Path, metavar="PATH", help=text)
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
    size = args.vocab_size
    if not 0 <= args.holdout < 1:
        raise SnipError(f"--holdout {args.holdout}: expected a share in [0, 1)")
    if size is not None and args.tokenizer == "bytes":
        raise SnipError(f"--vocab-size {size}: --tokenizer bytes has {SMALLEST_VOCABULARY} tokens; give one")
    if size is not None and size < SMALLEST_VOCABULARY:
        raise SnipError(f"--vocab-size {size}: must be at least {SMALLEST_VOCABULARY} (bytes and end of document)")
    output: Path = args.output.resolve()
    existing = read_manifest(output)
    if existing is None and output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise SnipError(f"--output {output}: exists and was not made by snip prepare-data; name another folder")
    if existing is not None and not (args.overwrite or args.reuse):
        raise SnipError(f"--output {output}: exists; add --overwrite to replace it or --reuse to keep an equal one")
    inputs = args.inputs or [Path(sysconfig.get_path("stdlib"))]
    files, skipped = collect(inputs, args.glob or (["*"] if args.inputs else ["*.py"]))
    corpus = b"".join(os.fsencode(f"{file.key}\0{file.sha256}\n") for file in files)
    request = {
        "tokenizer": args.tokenizer,
        "holdout": args.holdout,
        "corpus_sha256": hashlib.sha256(corpus).hexdigest(),
    }
    if args.tokenizer == "bpe":
        request["vocab_size"] = size or VOCABULARY
    if existing is not None and args.reuse and existing.get("request") == request:
        hashes = existing.get("files_sha256", {})
        if all((output / name).is_file() and _sha256(output / name) == digest for name, digest in hashes.items()):
            print(f"{output} is current: {existing['train']['tokens']:,} training tokens")
            return 0
    if existing is not None and not args.overwrite:
        raise SnipError(f"--output {output}: made from other text or arguments; add --overwrite to replace it")
    sources = {"names": [_name(source) for source in inputs], "files": len(files), "skipped": skipped}
    new = output.with_name(f".{output.name}.new")
    try:
        shutil.rmtree(new, ignore_errors=True)  # which a stopped command has left
        new.mkdir(parents=True)
        manifest = _write_all(split(files, args.holdout), request, sources, new)
        if output.exists():
            shutil.rmtree(output)  # with the sample indices that Megatron caches beside the data
        new.rename(output)
    except OSError as error:
        raise SnipError(f"--output {output}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
    _print_summary(manifest, output)
    return 0


def read_manifest(output: Path) -> dict[str, Any] | None:
    """Return the manifest of an earlier result in ``output``. Returns None if there is none."""
    try:
        manifest = json.loads((output / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("schema") == SCHEMA else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- input -----------------------------------------------------------------------------------------------------
class TextFile(NamedTuple):
    """One document. ``key``, the name of the input and the path inside it, is equal on every machine."""

    key: str
    sha256: str
    path: Path
    size: int

    def position(self) -> float:
        """Return a number in [0, 1) from a hash of key and content. It does not depend on other files."""
        digest = hashlib.sha256(os.fsencode(f"{self.key}\0{self.sha256}")).digest()
        return int.from_bytes(digest[:8], "big") / 2**64


def collect(inputs: Sequence[Path], globs: Sequence[str]) -> tuple[list[TextFile], dict[str, int]]:
    """Return the documents of all inputs ordered by key, and reason → number of files that were skipped.

    Binary files (with a NUL byte), files that are not UTF-8, empty files and duplicates are skipped. A duplicate could
    leak held-out text into the training text. Raises SnipError if an input does not exist, cannot be read, or holds no
    text. A file that is named is taken whatever its name; ``globs`` select files inside folders.
    """
    skipped: Counter[str] = Counter()
    files: dict[str, TextFile] = {}
    for source in inputs:
        texts = 0
        try:
            for key, path in _walk(source, globs):
                data = path.read_bytes()
                if (reason := _why_skipped(data)) is not None:
                    skipped[reason] += 1
                    continue
                texts += 1
                file = TextFile(key, hashlib.sha256(data).hexdigest(), path, len(data))
                skipped["duplicate"] += file.sha256 in files
                files[file.sha256] = min(files.get(file.sha256, file), file)
        except OSError as error:
            why = error.strerror or error
            raise SnipError(f"{error.filename or source}: cannot be read ({why}); name other inputs") from error
        if not texts:
            matches = "" if source.is_file() else f" that matches --glob {' '.join(globs)}"
            raise SnipError(f"{source}: holds no UTF-8 text{matches}")
    return sorted(files.values()), dict(sorted((+skipped).items()))


def _name(source: Path) -> str:
    return source.resolve().name or "root"


def _walk(source: Path, globs: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield key and path of the files of one input.

    Hidden folders, caches, installed packages and results of this command are left out.
    """
    if source.is_file():
        yield _name(source), source
        return
    if not source.is_dir():
        raise SnipError(f"{source}: no such file or folder")

    def stop(error: OSError) -> None:
        raise error

    for folder, subfolders, names in source.walk(on_error=stop):
        if read_manifest(folder) is not None:
            subfolders.clear()
            continue
        subfolders[:] = sorted(n for n in subfolders if n not in _SKIPPED_FOLDERS and not n.startswith("."))
        for path in (folder / name for name in sorted(names)):
            relative = path.relative_to(source).as_posix()
            if any(fnmatch(name, glob) for glob in globs for name in (path.name, relative)) and path.is_file():
                yield f"{_name(source)}/{relative}", path


def _why_skipped(data: bytes) -> str | None:
    """Return why ``data`` cannot be used as a document. Returns None if it can."""
    if b"\0" in data:
        return "binary"
    try:
        return None if data.decode().strip() else "empty"
    except UnicodeDecodeError:
        return "undecodable"


def split(files: Sequence[TextFile], share: float) -> tuple[list[TextFile], list[TextFile]]:
    """Return training files and held-out files.

    About ``share`` of the files are held out, and at least one if ``share`` > 0. Raises SnipError if no file is left
    for training.
    """
    held_out = {file for file in files if file.position() < share}
    if share > 0 and not held_out:
        held_out = {min(files, key=TextFile.position)}
    train = [file for file in files if file not in held_out]
    if not train:
        raise SnipError(
            f"{len(files)} file(s) are too few for a hold-out by file; give more files, or --holdout 0 for none"
        )
    return train, sorted(held_out)


# -- tokenizers ------------------------------------------------------------------------------------------------
def _byte_symbols() -> list[str]:
    """Return the character for each byte value in a byte-level vocabulary: itself, or in order one beyond Latin-1."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    substitutes = iter(symbol for symbol in alphabet if ord(symbol) > 255)
    return [chr(value) if chr(value) in alphabet else next(substitutes) for value in range(256)]


def train_bpe(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with at most ``vocab_size`` tokens, including the end-of-document token (id 0)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte, whose id is the byte's value. End of document is 256."""
    vocabulary = {symbol: value for value, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    return tokenizer


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text, followed by the end-of-document id.

    If a text contains the characters of the end-of-document token, they are encoded as bytes.
    """
    end: int = tokenizer.get_vocab()[END_OF_DOCUMENT]
    if end == 256:  # byte_tokenizer(), which takes 3 s for a million bytes
        return [[*text.encode(), end] for text in texts]
    tokenizer.encode_special_tokens = True
    return [[*each.ids, end] for each in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files from which transformers' AutoTokenizer loads ``tokenizer``."""
    from transformers import PreTrainedTokenizerFast

    options = {"eos_token": END_OF_DOCUMENT, "clean_up_tokenization_spaces": False, "model_max_length": 10**9}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(folder)


# -- output ----------------------------------------------------------------------------------------------------
def _write_all(
    parts: tuple[list[TextFile], list[TextFile]], request: dict[str, Any], inputs: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """Write all files of the result into the new folder ``folder``. Returns the manifest."""
    bpe = request["tokenizer"] == "bpe"
    texts = _texts(parts[0], "training the tokenizer")
    tokenizer = train_bpe(texts, request["vocab_size"]) if bpe else byte_tokenizer()
    save_tokenizer(tokenizer, folder / "tokenizer")
    described = {
        "folder": "tokenizer",
        "type": request["tokenizer"],
        "vocab_size": tokenizer.get_vocab_size(),
        "end_of_document_id": tokenizer.token_to_id(END_OF_DOCUMENT),
    }
    manifest: dict[str, Any] = {"schema": SCHEMA, "request": request, "inputs": inputs, "tokenizer": described}
    for name, files in zip(("train", "valid"), parts, strict=True):
        manifest[name] = _write_part(name, files, tokenizer, folder) if files else None
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest["files_sha256"] = {path.relative_to(folder).as_posix(): _sha256(path) for path in paths}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def _write_part(name: str, files: list[TextFile], tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Write one ``.bin/.idx`` pair with one document per file. Returns its entry in the manifest."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():  # about CUDA, Apex and Transformer Engine, which this command does not need
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    vocab_size = tokenizer.get_vocab_size()
    counts = np.zeros(vocab_size, np.int64)
    builder = IndexedDatasetBuilder(f"{folder / name}.bin", dtype=DType.optimal_dtype(vocab_size))
    for texts in itertools.batched(_texts(files, f"tokenizing {name}"), _BATCH):
        for document in encode_documents(tokenizer, texts):
            counts += np.bincount(document, minlength=vocab_size)
            builder.add_document(np.asarray(document), [len(document)])
    builder.finalize(f"{folder / name}.idx")
    tokens = int(counts.sum())
    share = counts[counts > 0] / tokens
    entropy = float(-(share * np.log(share)).sum())
    sizes = {"files": len(files), "bytes": sum(file.size for file in files), "tokens": tokens}
    return {"prefix": name, **sizes, "unigram_entropy_nats": entropy}


def _texts(files: Sequence[TextFile], task: str) -> Iterator[str]:
    """Yield the text of each file, with its newlines as they are, and show the progress on standard error."""
    for file in tqdm(files, desc=task, unit="file", mininterval=0.2 if sys.stderr.isatty() else 5.0, file=sys.stderr):
        yield file.path.read_bytes().decode("utf-8")


def _print_summary(manifest: dict[str, Any], output: Path) -> None:
    for reason, count in manifest["inputs"]["skipped"].items():
        print(f"skipped: {count} {reason}")
    arguments = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", f"{output}/tokenizer"]
    for name in ("train", "valid"):
        if part := manifest[name]:
            entropy = f"unigram entropy {part['unigram_entropy_nats']:.4f} nats a token"
            print(f"{name}: {part['files']:,} files, {part['bytes']:,} bytes, {part['tokens']:,} tokens, {entropy}")
            arguments += [f"--{name}-data-path", f"{output}/{name}"]
    print(f"tokenizer: {manifest['tokenizer']['type']}, {manifest['tokenizer']['vocab_size']:,} tokens")
    print(f"for Megatron: {shlex.join(arguments)}")
