"""Commands whose standard output is closed, or of another encoding than UTF-8."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLAN = ("plan", "--model", "1b")


def snip(*arguments: object, stdout: int, **variables: str) -> subprocess.CompletedProcess[bytes]:
    # Output is written when the buffer is full or the command ends, unless a test says otherwise.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""} | variables
    command = [sys.executable, "-m", "snip_megatron.tools.cli", *map(str, arguments)]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=environment, timeout=300, check=False)


def test_a_reader_that_has_exited_ends_a_command_silently() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        process = snip(*PLAN, stdout=writer)
    finally:
        os.close(writer)
    assert (process.returncode, process.stderr) == (141, b"")


def test_what_an_encoding_lacks_is_replaced() -> None:
    process = snip(*PLAN, stdout=subprocess.PIPE, PYTHONIOENCODING="latin-1")
    assert (process.returncode, process.stderr) == (0, b"")
    whole = snip(*PLAN, stdout=subprocess.PIPE, PYTHONIOENCODING="utf-8").stdout.decode()
    assert len(process.stdout.splitlines()) == len(whole.splitlines())
