"""A folder of ``snip prepare-data`` as Megatron's arguments, and what identifies its text."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from snip_megatron.errors import SnipError

SCHEMA = "snip.data/1"
DATA = "{data}"
"""Stands for the folder in recorded arguments: where it lies does not change what is trained."""


@dataclass(frozen=True)
class Data:
    """Prepared text. ``sha256``: of the tokens of both parts; ``tokens``: of the training text."""

    folder: Path
    tokenizer: str
    sha256: str
    tokens: int
    valid_tokens: int

    @property
    def arguments(self) -> list[str]:
        """Megatron's arguments, with ``{data}`` for the folder. Items are read in the training process itself."""
        return [
            *("--train-data-path", f"{DATA}/train", "--valid-data-path", f"{DATA}/valid", "--num-workers", "0"),
            *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", f"{DATA}/tokenizer"),
        ]


def load_data(folder: Path, tokenizer: str) -> Data:
    """The manifest of ``folder``. Raises SnipError if it is none, has no hold-out, or another tokenizer."""
    how = f"make it with: snip prepare-data --tokenizer {tokenizer} --output {folder}"
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if manifest["schema"] != SCHEMA:
            raise ValueError(f"schema {manifest['schema']!r}")
        files = manifest["files_sha256"]
        data = Data(
            folder=folder.resolve(),
            tokenizer=manifest["tokenizer"]["type"],
            sha256=hashlib.sha256(f"{files['train.bin']} {files['valid.bin']}".encode()).hexdigest(),
            tokens=manifest["train"]["tokens"],
            valid_tokens=(manifest["valid"] or {}).get("tokens", 0),
        )
    except FileNotFoundError:
        raise SnipError(f"--data {folder}: holds no prepared text; {how}") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise SnipError(f"--data {folder}: manifest.json cannot be used ({error}); {how} --overwrite") from None
    if data.tokenizer != tokenizer:
        raise SnipError(f"--data {folder}: its tokenizer is {data.tokenizer}, the experiment wants {tokenizer}; {how}")
    if not data.valid_tokens:
        raise SnipError(f"--data {folder}: has no hold-out for validation; {how} --holdout 0.05 --overwrite")
    return data
