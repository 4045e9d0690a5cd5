"""Wrong arguments: one clear line, a non-zero exit, nothing trained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import cpu_environment, error_lines, run_ranks, tiny_llama_args

from snip_megatron.megatron.startup import COMPAT_SETS


def run_alone(tmp: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """The entry in one process without a launcher."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, "-m", "snip_megatron.pretrain_gpt", *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tmp,
        env=environment | cpu_environment(),
    )


def test_unknown_compat_set_is_one_line_over_all_ranks(tmp_path: Path) -> None:
    process = run_ranks(2, tiny_llama_args("--snip-no-compat", "nonsense"), tmp=tmp_path)
    assert process.returncode != 0
    assert [line for line in (process.stdout + process.stderr).splitlines() if "nonsense" in line] == [
        f"pretrain_gpt: --snip-no-compat nonsense: unknown; choose one of {', '.join(COMPAT_SETS)}"
    ]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--snip-lag", "soon"], "argument --snip-lag: invalid int value: 'soon'"),
        (["--snip-no-compat", "cpu"], "no CUDA device is visible and --snip-no-compat cpu forbids running on the CPU"),
        (["--snip-colour", "blue"], "unrecognized arguments: --snip-colour blue"),
        (["--yaml-cfg", "run.yaml", "--snip"], "--yaml-cfg is not supported: "),
        (["--tensor-model-parallel-size", "2"], "Megatron refuses the arguments: world size (1) is not divisible"),
    ],
)
def test_wrong_argument_is_one_line(extra: list[str], message: str, tmp_path: Path) -> None:
    process = run_alone(tmp_path, *tiny_llama_args(*extra))
    assert process.returncode == 2
    (line,) = error_lines(process)
    assert line.startswith(f"pretrain_gpt: {message}")
    assert "Traceback" not in process.stderr
    assert "iteration" not in process.stdout.split("arguments ---")[-1].split("end of arguments")[-1]
