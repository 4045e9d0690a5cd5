"""Prepared text: a folder of ``snip prepare-data``, its Megatron arguments and the hash of its tokens."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from snip_megatron.errors import SnipError, cut, quoted

SCHEMA = "snip.data/1"
DATA = "{data}"
"""Placeholder of the folder in recorded arguments, which makes them independent of its path."""


@dataclass(frozen=True)
class Data:
    """Prepared text of a tokenizer, ``bytes`` or ``bpe``: the hash of its tokens, and their numbers."""

    folder: Path
    tokenizer: str
    sha256: str
    tokens: int
    valid_tokens: int

    @property
    def arguments(self) -> list[str]:
        """Megatron's arguments, with ``{data}`` for the folder. Samples are read in the training process itself."""
        return [
            *("--train-data-path", f"{DATA}/train", "--valid-data-path", f"{DATA}/valid", "--num-workers", "0"),
            *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", f"{DATA}/tokenizer"),
        ]


def load_data(folder: Path, tokenizer: str) -> Data:
    """Read a folder's manifest. Raises SnipError if it holds no text for training and validation in this tokenizer."""
    how = f"make it with: snip prepare-data --tokenizer {tokenizer} --output {folder}"
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if manifest["schema"] != SCHEMA:
            raise ValueError(f"schema {quoted(manifest['schema'])}")
        files = manifest["files_sha256"]
        data = Data(
            folder=folder.resolve(),
            tokenizer=manifest["tokenizer"]["type"],
            sha256=hashlib.sha256(f"{files['train.bin']} {files.get('valid.bin')}".encode()).hexdigest(),
            tokens=manifest["train"]["tokens"],
            valid_tokens=(manifest["valid"] or {}).get("tokens", 0),
        )
    except FileNotFoundError:
        raise SnipError(f"--data {folder}: holds no prepared text; {how}") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise SnipError(f"--data {folder}: manifest.json cannot be used ({cut(error)}); {how} --overwrite") from None
    if data.tokenizer != tokenizer:
        raise SnipError(
            f"--data {folder}: its tokenizer is {cut(data.tokenizer)}, the experiment wants {tokenizer}; {how}"
        )
    if not data.valid_tokens:
        raise SnipError(f"--data {folder}: has no hold-out for validation; {how} --holdout 0.05 --overwrite")
    return data
