"""Synthetic statistics tables are those of the sensitivity tests."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A folder with the manifest of prepared text, and no text."""
    manifest = {
        "schema": "snip.data/1",
        "tokenizer": {"type": "bytes"},
        "files_sha256": {"train.bin": "1", "valid.bin": "2"},
        "train": {"tokens": 1000},
        "valid": {"tokens": 100},
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path
