"""Step time of the training entry with SNIP and an all-bf16 map, relative to the entry without SNIP.

    python -m benchmarks.jobs.entry --out results/jobs/F.json [--commit SHA]

Real runs of ``snip_megatron.pretrain_gpt`` follow one another in the order without, with, with, without. The model has
four blocks shaped like Llama-8B with embedding, output layer and AdamW, sequence 8192 and mock data. The time of a step
is what Megatron prints. The first steps of a run, which compile and allocate, are left out. Arguments after ``--`` are
passed to Megatron.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, header, step_times, write

MODEL = shlex.split("""
--num-layers 4 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 4
--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --eval-interval 100000
--lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --seed 1234 --log-interval 1
--num-workers 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --bf16
""")
SNIP = shlex.split("--snip --snip-policy bf16")
ORDER = (False, True, True, False)


def run(snip: bool, steps: int, megatron: list[str]) -> list[float]:
    """Return the milliseconds of every step of one run."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m"]
    with tempfile.TemporaryDirectory() as folder:
        directory = ["--snip-dir", folder] if snip else []
        command = [*launcher, "snip_megatron.pretrain_gpt", *MODEL, "--train-iters", str(steps), *megatron]
        process = subprocess.run(
            [*command, *(SNIP if snip else []), *directory], cwd=ROOT, capture_output=True, text=True, check=False
        )
    if process.returncode:
        sys.exit(f"entry.py: training {'with' if snip else 'without'} --snip failed:\n{process.stderr[-3000:]}")
    return step_times(process.stdout)


def measure(steps: int, warmup: int, megatron: list[str]) -> dict[str, Any]:
    runs = [{"snip": snip, "ms": run(snip, steps, megatron)} for snip in ORDER]
    times = {snip: [ms for r in runs if r["snip"] is snip for ms in r["ms"][warmup:]] for snip in (False, True)}
    without, with_snip = (statistics.median(times[snip]) for snip in (False, True))
    return {
        "runs": runs,
        "ms_a_step": {"without": without, "all-bf16 map": with_snip},
        "all_bf16_map_over_without": with_snip / without,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Step time of the entry under an all-bf16 map")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=6, help="steps of a run that do not count")
    parser.add_argument("--commit", help="what is measured, where the tree has no .git")
    parser.add_argument("megatron", nargs="*", help="arguments for Megatron, after --")
    arguments = parser.parse_args()
    result = header(arguments.commit) | measure(arguments.steps, arguments.warmup, arguments.megatron)
    write(arguments.out, result)
    print({name: result[name] for name in ("ms_a_step", "all_bf16_map_over_without")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
