"""Which stacks of other versions there are."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_an_unknown_stack_is_refused() -> None:
    command = ["bash", "scripts/test.sh", "--stack", "last"]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert refused.stderr == "test.sh: --stack last: unknown; choose next or torch\n"
