"""What a run on another stack records of pytest's report, and which stacks there are."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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

    def recorded(*reports: str) -> dict[str, Any]:
        recorder = ROOT / "tests" / "compatibility" / "record.py"
        subprocess.run([sys.executable, recorder, "out.json", *reports], cwd=tmp_path, check=True)
        record: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
        return record

    record = recorded("report.xml", "--", "-k", "a")
    assert {key: record[key] for key in ("passed", "failed", "skipped")} == {"passed": 1, "failed": 3, "skipped": 1}
    assert record["torch"] == importlib.metadata.version("torch")
    assert record["arguments"] == ["-k", "a"]

    (tmp_path / "again.xml").write_text('<testsuite><testcase classname="test_counted" name="test_c"/></testsuite>')
    record = recorded("report.xml", "again.xml")  # of a test that has run twice the last run counts
    assert {key: record[key] for key in ("passed", "failed", "skipped")} == {"passed": 2, "failed": 2, "skipped": 1}
    assert "arguments" not in record


def test_an_unknown_stack_is_refused() -> None:
    command = ["bash", "scripts/test.sh", "--stack", "last"]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert refused.stderr == "test.sh: --stack last: unknown; choose next or torch\n"
