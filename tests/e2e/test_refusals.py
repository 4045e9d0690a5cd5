"""Wrong SNIP arguments as a user meets them: one clear line, exit code 2, and nothing trained or written.

What is refused once Megatron is there is in tests/distributed/test_entry_errors.py.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LLAMA = shlex.split("""
--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 2 --train-iters 3 --lr 1e-3
--mock-data --tokenizer-type NullTokenizer --vocab-size 127
""")


def pretrain(tmp: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, "-m", "snip_megatron.pretrain_gpt", *LLAMA, *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tmp,
        env=environment
        | {
            "PYTHONPATH": str(REPOSITORY),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        },
    )


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("--snip --snip-budget fp4=1.7", "--snip-budget fp4=1.7: the share must be a number between 0 and 1"),
        ("--snip --snip-policy best", "--snip-policy best: unknown; choose one of snip, min-abs-err, "),
        ("--snip-budget fp4=0.5", "--snip-budget has no effect without --snip: add --snip, or leave it out"),
    ],
)
def test_one_line_and_nothing_done(args: str, line: str, tmp_path: Path) -> None:
    process = pretrain(tmp_path, "--save", "checkpoint", "--save-interval", "1", *args.split())
    assert process.returncode == 2
    ours = [text for text in process.stderr.splitlines() if text.startswith("pretrain_gpt: ")]
    assert len(ours) == 1
    assert ours[0].startswith(f"pretrain_gpt: {line}")
    assert "Traceback" not in process.stderr
    assert "iteration" not in process.stdout.split("end of arguments")[-1]
    assert not any(tmp_path.iterdir())
