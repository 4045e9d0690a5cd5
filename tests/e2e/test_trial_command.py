"""``snip trial`` as a user runs it: three trainings of a real job, a table, a verdict, and nothing left behind."""

import json
import re
import shlex
from pathlib import Path

from snip_command import snip_alone

JOB = """
--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 64
--max-position-embeddings 64 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16 --transformer-impl local
--micro-batch-size 1 --global-batch-size 64 --lr 1e-3 --lr-decay-style cosine --train-iters 5000 --clip-grad 1.0
--num-workers 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --eval-interval 10 --eval-iters 2
--save never --save-interval 5 --tensorboard-dir never --fp8-format hybrid --snip-lag 400
"""


def test_a_job_is_compared_and_nothing_is_left(tmp_path: Path) -> None:
    words = ("trial", "--steps", 18, "--out", tmp_path / "trial.json", "--", *shlex.split(JOB))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = snip_alone(*words, cwd=tmp_path, TMPDIR=str(temporary))
    assert process.returncode == 0, process.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"temporary", "trial.json"}
    assert list(temporary.glob("snip-*")) == []
    bf16, fp8, snip = process.stdout.splitlines()[3:6]
    assert re.fullmatch(r"bf16 +[\d,.]+ ms +[\d,]+ +1\.00 +\d\.\d+.*", bf16)
    assert fp8.split() == ["Megatron's", "own", "FP8", "not", "run:", "it", "needs", "a", "GPU"]
    assert re.fullmatch(r"--snip +[\d,.]+ ms +[\d,]+ +[\d.]+ +\d\.\d+.*", snip)
    assert re.search(r"\nMap: 7\d% fp4, 2\d% fp8_tensor, from step 9 on; its update cost", process.stdout), (
        process.stdout
    )
    assert "In this trial: --global-batch-size 4 instead of 64." in process.stdout
    assert process.stdout.splitlines()[-1].startswith("Not judged: this machine has no GPU.")
    result = json.loads((tmp_path / "trial.json").read_text())
    first, _, third = result["runs"]
    assert len(first["losses"]) == len(third["step_ms"]) == 18
    assert first["losses"][:8] == third["losses"][:8]  # the same weights, batches and learning rates, until the map
    assert first["losses"] != third["losses"]
    assert (result["tokens_per_step"], result["job_steps"]) == (256, 5000)
