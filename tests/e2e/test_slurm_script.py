"""launch/slurm.sh where no SLURM is installed: what it submits and what it refuses.

Stand-ins take the place of sbatch and of scontrol, which lists host names. tests/slurm has the real SLURM.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "slurm.sh"
SNIP = f"{sys.executable} -m snip_megatron.tools.cli"

SCONTROL = """
import os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print(os.environ.get("STUB_HOST", "localhost"))
"""
SBATCH = """
import os, sys
with open(os.environ["STUB_LOG"], "a") as log:
    print("sbatch", *sys.argv[1:], file=log)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a user, with SLURM's commands in PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, program in (("scontrol", SCONTROL), ("sbatch", SBATCH)):
        (folder / name).write_text(f"#!{sys.executable}\n{program}")
        (folder / name).chmod(0o755)
    (tmp_path / "log").touch()
    quiet = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SNIP_", "RANK", "WORLD", "LOCAL_"))}
    path = f"{folder}:{os.environ['PATH']}"
    return quiet | {"PATH": path, "PYTHONPATH": str(ROOT), "SNIP": SNIP, "STUB_LOG": str(tmp_path / "log")}


def job(cluster: dict[str, str]) -> dict[str, str]:
    """Return the environment that SLURM sets for a job of two nodes."""
    return cluster | {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "2"}


def log(cluster: dict[str, str]) -> list[str]:
    return Path(cluster["STUB_LOG"]).read_text().splitlines()


def bash(cluster: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=cluster, timeout=120)


def test_it_submits_itself_with_what_the_configuration_needs(cluster: dict[str, str]) -> None:
    asked = ("70b", "--data", "mock", "--save", "/shared/70b")
    process = bash(cluster | {"SNIP_SBATCH": "--partition=gpu --time=4:00:00"}, *asked)
    assert process.returncode == 0, process.stderr
    expected = f"--nodes=8 --gpus-per-node=8 --partition=gpu --time=4:00:00 {SCRIPT} {' '.join(asked)}"
    assert log(cluster) == [f"sbatch {expected}"]
    dry = bash(cluster, *asked, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert dry.stdout.startswith(f"# sbatch --nodes=8 --gpus-per-node=8 {SCRIPT} 70b ")
    assert "--rdzv-backend c10d" in dry.stdout
    assert len(log(cluster)) == 1  # nothing was submitted


def test_without_sbatch_one_line_says_so(cluster: dict[str, str], tmp_path: Path) -> None:
    shell = shutil.which("bash")
    assert shell is not None
    command = [shell, str(SCRIPT), "7b", "--data", "mock", "--save", str(tmp_path)]
    process = subprocess.run(
        command, capture_output=True, text=True, env=cluster | {"PATH": str(tmp_path)}, timeout=120
    )
    (line,) = process.stderr.splitlines()
    assert (process.returncode, line.startswith("slurm.sh: there is no sbatch here")) == (2, True)


def test_a_head_node_that_cannot_be_found_is_one_line(cluster: dict[str, str]) -> None:
    refused = bash(job(cluster) | {"STUB_HOST": "no-such-node"}, "7b", "--data", "mock", "--save", "/shared/7b")
    assert refused.returncode == 2
    assert refused.stderr == (
        "slurm.sh: no-such-node, the first node of this job, and its NodeAddr (none) do not resolve on it; the nodes"
        " cannot meet there\n"
    )
    assert "srun:" not in refused.stdout
