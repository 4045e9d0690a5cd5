"""The runner of ``tests/gpu`` counts every test, whatever ends it, and leaves no process behind."""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import gpu_suite

TESTS = {
    "whole": """
import pytest
def test_passes(): pass
def test_fails(): assert 1 == 2, "because"
@pytest.fixture
def broken(): raise OSError("no such card")
def test_has_no_card(broken): pass
@pytest.mark.skip(reason="needs two GPUs")
def test_skipped(): pass
@pytest.mark.alone
def test_another_time(): pass
""",
    "dies": """
import os
def test_before(): pass
def test_dies(): os._exit(3)
def test_after(): pass
""",
    "hangs": """
import subprocess, sys, time
def test_hangs():
    subprocess.run([sys.executable, "-c", "import time; time.sleep(600)", __file__], start_new_session=True)
""",
}


def test_every_test_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setenv("GPU_SUITE_WORK", str(work))
    files = []
    for name, text in TESTS.items():
        files.append(tmp_path / f"test_{name}.py")
        files[-1].write_text(text)
    *shards, hanging, late = [gpu_suite.Shard([file], "not alone") for file in (*files, files[0])]
    gpu_suite.run(shards, 2, time.monotonic() + 120.0, work, [])
    gpu_suite.run([hanging], 1, time.monotonic() + 4.0, work, [])
    gpu_suite.run([late], 1, time.monotonic(), work, [])
    assert hanging.ended()
    results = [entry for shard in [*shards, hanging, late] for entry in shard.results()]
    assert gpu_suite.summary(results) == {
        "passed": 2, "failed": 1, "errors": 1 + 2 + 1 + 1, "skipped": {"needs two GPUs": 1},
    }  # fmt: skip
    assert any("because" in entry["text"] for entry in results)
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(files[2]).encode() in _read(path)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
