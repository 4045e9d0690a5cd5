"""scripts/demo.sh as a user runs it, with half the layers and fewer steps, in a folder of its own, on this venv."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAMP = Path(sys.prefix) / "snip-stamp.json"
# Maps are adopted before steps 42 and 48: a CPU takes twice as long for steps in formats that it emulates.
SHORT = shlex.split(
    "--train-iters 50 --snip-first-update 38 --snip-update-interval 6 --snip-lag 4 --snip-wait 240 --num-layers 2"
)


def is_ours() -> bool:
    """Return whether scripts/bootstrap.sh of this checkout made this environment. It refuses another checkout's."""
    return STAMP.exists() and json.loads(STAMP.read_text()).get("root") == str(ROOT)


@pytest.mark.skipif(not is_ours(), reason="the demonstration refuses the environment of another checkout")
def test_the_demonstration_meets_its_own_demands(tmp_path: Path) -> None:
    environment = {**os.environ, "SNIP_VENV": sys.prefix, "SNIP_DEMO_DIR": str(tmp_path)}
    result = subprocess.run(
        ["bash", str(ROOT / "scripts" / "demo.sh"), *SHORT],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2700,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "NOT MET" not in result.stdout
    assert sum(line.startswith("step ") for line in result.stdout.splitlines()) >= 6  # progress while it trains
    assert result.stdout.index("speedup") < result.stdout.index("starting Python")  # the prediction comes first
    assert "\nverdict: SNIP chose 2 maps" in result.stdout
    report = Path(result.stdout.splitlines()[-1].removeprefix("report: "))
    assert report.is_relative_to(tmp_path)
    page = report.read_text()
    assert "</html>" in page
    assert "http" not in page.split("<body", 1)[0].replace("http-equiv", "")  # nothing is loaded from elsewhere
