"""scripts/apply_patches.sh on a file of the installed release: applied, compiled, idempotent, reverted, or refused."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from installed import copy_installed

ROOT = Path(__file__).resolve().parents[2]
FILE = "megatron/training/training.py"


def patches(*arguments: object, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable} | ({"PATH": path} if path else {})
    command = ["/bin/bash", str(ROOT / "scripts" / "apply_patches.sh"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def said(result: subprocess.CompletedProcess[str], code: int = 0) -> str:
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout.strip()


def test_a_released_file(tmp_path: Path) -> None:
    file = copy_installed(tmp_path, only=FILE) / FILE
    file.chmod(0o640)
    original = file.read_bytes()
    head = f"megatron-core {'.'.join(version('megatron-core').split('.')[:2])}: {FILE}: "
    assert said(patches("--check", tmp_path), 3) == head + "as released"
    assert said(patches(tmp_path)) == head + "patched now"
    patched = file.read_bytes()
    assert said(patches(tmp_path)) == said(patches("--check", tmp_path)) == head + "patched"
    assert file.read_bytes() == patched
    assert patched.count(b"\n") == original.count(b"\n") + 5
    assert file.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]  # nothing is left beside it
    compile(patched, str(file), "exec")
    for call in (b') = SNIP_HOOKS.get("train_step", train_step)(', b'= SNIP_HOOKS.get("evaluate", evaluate)('):
        assert patched.count(call) == 1
    assert said(patches("--revert", tmp_path)) == head + "as released again"
    assert file.read_bytes() == original
    assert said(patches("--revert", tmp_path)) == head + "as released"


def test_anything_else_is_refused_untouched(tmp_path: Path) -> None:
    file = tmp_path / FILE
    file.parent.mkdir(parents=True)
    file.write_text("def train_step():\n    pass\n")
    for mode in ((), ("--revert",), ("--check",)):
        refused = patches(*mode, tmp_path)
        assert refused.returncode == 2
        assert refused.stderr.startswith(f"apply_patches: {file}: not the file of a released megatron-core (0.19 0.20)")
        assert "nothing was changed. By hand:" in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert file.read_text() == "def train_step():\n    pass\n"
