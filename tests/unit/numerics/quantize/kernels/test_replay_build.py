"""The compilation of ``replay.cpp``: caches that others use, and compilers that fail."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from snip_megatron.numerics.quantize.kernels import replay


def test_a_missing_or_failing_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    broken = tmp_path / "compiler"
    broken.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such header' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(subprocess.SubprocessError, match=r"compiler: x.cpp:1: error: no such header"):
        replay.compiled_extension()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: None)
    found, why = replay.replay_extension.__wrapped__()
    assert found is None
    assert why.startswith("Python launches kernels (")
    assert "\n" not in why
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OSError, match="no C\\+\\+ compiler"):
        replay.compiled_extension()
    assert not list(tmp_path.glob("*.so"))


def test_a_compiler_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(replay, "_PATIENCE", 0.2)
    with pytest.raises(subprocess.TimeoutExpired):
        replay._compile([str(compiler)], tmp_path / "found.so")
