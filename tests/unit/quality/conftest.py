"""Synthetic statistics tables are those of the sensitivity tests."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.quality.compare import main

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return the line with which the command refuses its arguments, after its name."""

    def line(*arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        return err.removeprefix("compare: ").strip()

    return line


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
