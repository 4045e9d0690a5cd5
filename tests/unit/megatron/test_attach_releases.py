"""A script with ``attach`` beside a release of Megatron that SNIP does not support."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import argparse, sys
import megatron.core.package_info as info
info.__version__ = "0.20.0"
sys.modules["snip_megatron.megatron.compat"] = None  # its names may be gone: an import would be an error
from snip_megatron.attach import attach, snip_arguments
snip_arguments()(argparse.ArgumentParser()).parse_args()
attach(print)("trained")
"""


@pytest.mark.parametrize(("start", "snip"), [((), False), (("-m", "snip_megatron.attach"), True)])
def test_only_snip_refuses_another_release(start: tuple[str, ...], snip: bool, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(SCRIPT)
    command = [sys.executable, *start, str(script), *(["--snip"] if snip else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stderr.splitlines() if line.startswith("own: ")]
    if snip:
        assert done.returncode == 2, done.stderr
        assert lines == ["own: megatron-core 0.20.0 is installed; snip_megatron supports >=0.19,<0.20"]
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("trained\n")
    assert "Traceback" not in done.stderr
