"""The runs of :mod:`benchmarks.jobs.multi_gpu`: models, layouts, torchrun, and the GPUs of each run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import ROOT

Run = Callable[[int, Sequence[str], Path, str | None], subprocess.CompletedProcess[str]]
"""(ranks, arguments, folder, CUDA_VISIBLE_DEVICES or None to keep it) → the finished ranks."""

LLAMA = shlex.split("""
--group-query-attention --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --eval-interval 100000
--lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --seed 1234 --log-interval 1
--num-workers 0 --mock-data --tokenizer-type NullTokenizer --use-distributed-optimizer
--dist-ckpt-optim-fully-reshardable --ckpt-format torch_dist --bf16
""")
# torch.compile of Megatron's small fused functions would take most of a run's start.
COMMON = [*LLAMA, "--disable-jit-fuser"]


def sizes(layers: int, hidden: int, ffn: int, heads: int, groups: int, seq: int, micro: int, batch: int) -> list[str]:
    return shlex.split(
        f"--num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {ffn} --num-attention-heads {heads}"
        f" --num-query-groups {groups} --seq-length {seq} --max-position-embeddings {seq} --micro-batch-size {micro}"
        f" --global-batch-size {batch}"
    )


@dataclass(frozen=True)
class Size:
    """The models of the two parts, and the number of steps after the checkpoint or of a timed run."""

    equivalence: list[str]
    timed: list[str]
    vocab: int
    steps: int
    timed_steps: int


# Every shard, gated half, query group and token share is a multiple of 128, on all layouts: tiles fall alike.
SIZES = {
    "tiny": Size(sizes(2, 256, 256, 4, 2, 128, 2, 8), sizes(2, 256, 256, 4, 2, 128, 2, 8), 255, 4, 20),
    "gpu": Size(sizes(8, 1024, 2816, 8, 4, 1024, 2, 8), sizes(4, 4096, 14336, 32, 8, 4096, 1, 8), 32000, 20, 24),
}


@dataclass(frozen=True)
class Layout:
    """GPUs, Megatron's arguments, and the data parallel size (with context parallel peers: of microbatches)."""

    gpus: int
    arguments: str
    data: int = 1
    needs_te: bool = False


TP2, PP2 = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "tp2": Layout(2, TP2),
    "pp2": Layout(2, PP2),
    "dp2": Layout(2, "", data=2),
    "cp2": Layout(2, "--context-parallel-size 2", needs_te=True),
    "tp2-pp2": Layout(4, f"{TP2} {PP2}"),
    "dp4": Layout(4, "", data=4),
}


def torchrun(ranks: int, arguments: Sequence[str], folder: Path, gpus: str | None) -> subprocess.CompletedProcess[str]:
    """Run ranks of the training entry on this host. If there are fewer ``gpus`` than ranks, the ranks share them."""
    folder.mkdir(parents=True, exist_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    shared = gpus is not None and len(gpus.split(",")) < ranks
    entry = ["benchmarks.jobs.one_gpu_hosts", str(gpus)] if shared else ["snip_megatron.pretrain_gpt"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    visible = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    return subprocess.run(
        [*launcher, "-m", *entry, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **visible},
        capture_output=True,
        text=True,
        check=False,
    )


class Runs:
    """Trainings in ``folder``. Its methods may be called from any thread.

    Args:
        run: starts ranks.
        size: the models.
        megatron: additional arguments of every run.
    """

    def __init__(self, run: Run, folder: Path, size: Size, megatron: Sequence[str]) -> None:
        self.folder, self.size = folder, size
        self.seconds: dict[str, float] = {}
        """Name of a run → its wall time, start-up included."""
        self._run = run
        self._megatron = [*COMMON, "--vocab-size", str(size.vocab), *megatron]

    def train(self, name: str, layout: Layout | None, steps: int, *arguments: str, gpus: str | None = None) -> str:
        """Train and return the standard output. Raises RuntimeError with the end of a failed run's error output."""
        extra = layout.arguments.split() if layout is not None else []
        started = time.monotonic()
        process = self._run(
            layout.gpus if layout is not None else 1,
            [*self._megatron, "--train-iters", str(steps), *arguments, *extra],
            self.folder / name,
            gpus,
        )
        self.seconds[name] = round(time.monotonic() - started, 2)
        if process.returncode:
            lines = [line for line in process.stderr.splitlines() if line.strip()]
            raise RuntimeError(f"{name}: exit code {process.returncode}: " + " / ".join(lines[-12:])[-2000:])
        return process.stdout


def visible_gpus(count: int) -> list[str]:
    """Return ``count`` GPUs by their names for CUDA_VISIBLE_DEVICES. Exits if there are fewer.

    If CUDA_VISIBLE_DEVICES is set, its first entries are returned.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = ",".join(map(str, range(count))) if visible is None else visible
    entries = [entry.strip() for entry in named.split(",") if entry.strip()]
    if len(entries) < count:
        sys.exit(f"multi_gpu.py: --gpus {count}, but CUDA_VISIBLE_DEVICES={visible} names {len(entries)}")
    return entries[:count]


def rounds(names: Sequence[str], gpus: Sequence[str], alone: bool) -> list[dict[str, list[str]]]:
    """Return the layouts that run side by side, with their GPUs. Each is in the first round with enough free GPUs."""
    rounds: list[dict[str, list[str]]] = []
    for name in names:
        count = LAYOUTS[name].gpus
        for placed in rounds:
            used = sum(len(taken) for taken in placed.values())
            if not alone and used + count <= len(gpus):
                placed[name] = list(gpus[used : used + count])
                break
        else:
            rounds.append({name: list(gpus[:count])})
    return rounds
