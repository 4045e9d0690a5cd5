"""Files of released megatron-core wheels, from the package index once a session; tests skip where there is none."""

import functools
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

RELEASES = ("0.19.0", "0.19.2")


@functools.cache
def wheel(release: str, folder: Path) -> Path:
    """The wheel of megatron-core ``release`` in ``folder``; skips the test if it cannot be had."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(folder), f"megatron-core=={release}"], capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"megatron-core {release} cannot be downloaded: no answer in 120 s")
    found = sorted(folder.glob(f"megatron_core-{release}-*.whl"))
    if done.returncode or not found:
        pytest.skip(f"megatron-core {release} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    return found[0]


def extract(release: str, folder: Path, into: Path, *, only: str = "") -> Path:
    """``into`` with the wheel's files, or the one named ``only``."""
    with zipfile.ZipFile(wheel(release, folder)) as archive:
        archive.extractall(into, [only] if only else None)
    return into


def copy_installed(into: Path) -> Path:
    """``into`` with a copy of the installed ``megatron`` package, to be changed.

    Its byte code comes along: Python compiles again what has another time or size than its source had.
    """
    import importlib.util

    spec = importlib.util.find_spec("megatron.training")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parents[1], into / "megatron")
    return into
