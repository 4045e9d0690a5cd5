"""What a run on another stack records of pytest's report, and which stacks there are."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TESTS = """
import pytest
def test_a(): pass
@pytest.mark.parametrize("n", range(2))
def test_b(n): assert False
@pytest.fixture
def broken(): assert False
def test_c(broken): pass
@pytest.mark.skip
def test_d(): pass
"""


def test_counts_are_pytests(tmp_path: Path) -> None:
    (tmp_path / "test_counted.py").write_text(TESTS)
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml"]
    subprocess.run([*pytest_command, "test_counted.py"], cwd=tmp_path, capture_output=True, timeout=120)
    recorder = ROOT / "tests" / "compatibility" / "record.py"
    subprocess.run([sys.executable, recorder, "report.xml", "out.json", "-k", "a"], cwd=tmp_path, check=True)
    record = json.loads((tmp_path / "out.json").read_text())
    assert {key: record[key] for key in ("passed", "failed", "skipped")} == {"passed": 1, "failed": 3, "skipped": 1}
    assert record["torch"] == importlib.metadata.version("torch")
    assert record["arguments"] == ["-k", "a"]


def test_an_unknown_stack_is_refused() -> None:
    command = ["bash", "scripts/test.sh", "--stack", "last"]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert refused.stderr == "test.sh: --stack last: unknown; choose next or torch\n"
