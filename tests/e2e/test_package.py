"""The wheel: what users who do not work in the repository get."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_wheel_holds_the_package_its_data_and_its_command(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(ROOT / "snip_megatron", source / "snip_megatron", ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
        metadata = Parser().parsestr(archive.read(next(n for n in names if n.endswith("METADATA"))).decode())
    packaged = {path.relative_to(ROOT).as_posix() for path in (ROOT / "snip_megatron").rglob("*") if path.is_file()}
    packaged = {name for name in packaged if "__pycache__" not in name}
    assert packaged - names == set()
    assert any(name.endswith("report.html") for name in packaged)
    assert not any(name.startswith(("tests/", "scripts/")) for name in names)
    assert "snip = snip_megatron.cli:main" in entry_points
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.12"
