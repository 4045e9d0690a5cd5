"""``snip`` as a user runs it, in this process or in one of its own, and the one line of a refusal."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

from snip_megatron.tools.cli import main

ROOT = Path(__file__).resolve().parents[1]
SNIP = (sys.executable, "-m", "snip_megatron.tools.cli")


def snip(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def snip_alone(
    *arguments: object, cwd: Path = ROOT, command: tuple[str, ...] = SNIP, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, which sees no GPU."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | variables
    words = [*command, *map(str, arguments)]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)


def refused(*arguments: object, code: int = 2) -> str:
    """Return the one line with which a command refuses its arguments, after its name."""
    process = snip(*arguments)
    assert (process.returncode, process.stdout) == (code, ""), process.stderr
    (line,) = process.stderr.splitlines()
    assert line.startswith("snip")
    return line.removeprefix(f"snip {arguments[0]}: ")
