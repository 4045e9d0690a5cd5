"""A checkpoint from stock Transformer Engine Megatron to SNIP and back: equal weights, equal losses.

    python -m benchmarks.jobs.te_round_trip --out results/jobs/F.json [--commit SHA]

Seven short runs train a small Llama in bf16 with ``--transformer-impl transformer_engine``, each in a separate process:
stock training to step 4; from there SNIP under an all-bf16 map to step 8, and stock from its checkpoint to step 12; the
same without SNIP (the control); and, with a learning rate of 0, one step of SNIP and then one of stock, whose
checkpoints must hold the same weights as step 4. These three pairs run side by side. Losses are compared with the
control's step by step. An all-bf16 map runs the stock modules, so they are expected to be equal.

``--transformer-impl local`` runs the same on any machine, also on a CPU without Transformer Engine.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT, header, write

LOSS_TOLERANCE = 2e-3
"""Largest relative difference of a step's loss from the control's."""

SNIP = ("--snip", "--snip-policy", "bf16")
# The optimizer's parameter groups are found by their learning rates, so a frozen run loads the weights alone.
_FROZEN = ("--lr", "0", "--min-lr", "0", "--no-load-optim", "--no-load-rng")
_LLAMA = shlex.split("""
--num-layers 2 --hidden-size 256 --ffn-hidden-size 768 --num-attention-heads 4
--group-query-attention --num-query-groups 2 --seq-length 128 --max-position-embeddings 128
--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16
--micro-batch-size 2 --global-batch-size 8 --eval-iters 0 --eval-interval 1000 --train-iters 12
--lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 --clip-grad 1.0 --save-interval 1000
--seed 1234 --log-interval 1 --num-workers 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 255
--ckpt-format torch_dist --disable-jit-fuser --use-distributed-optimizer
""")
_LOSS = re.compile(r"iteration +(\d+)/.*?lm loss: (\S+)")


class RoundTrip:
    """The runs, in folders under ``folder``.

    Args:
        folder: folder for checkpoints and logs.
        transformer_impl: Megatron's argument of that name.
        timeout: seconds that a run may take.
    """

    def __init__(self, folder: Path, transformer_impl: str, timeout: float) -> None:
        self._folder = folder
        self._impl = transformer_impl
        self._timeout = timeout

    def train(self, name: str, until: int, *extra: str, load: str | None = None) -> dict[int, float]:
        """Train to step ``until`` from the checkpoint of run ``load``, and save.

        Returns step → loss. Raises RuntimeError if the run fails.
        """
        arguments = [*_LLAMA, "--lr", "1e-3", "--min-lr", "1e-4", "--transformer-impl", self._impl]
        arguments += ["--exit-interval", str(until), "--save", str(self._folder / name), *extra]
        if load is not None:
            arguments += ["--load", str(self._folder / load)]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        run = subprocess.run(
            [*command, "-m", "snip_megatron.pretrain_gpt", *arguments],
            capture_output=True,
            text=True,
            timeout=self._timeout,
            check=False,
            cwd=self._folder,
            env=environment,
        )
        losses = {int(step): float(loss) for step, loss in _LOSS.findall(run.stdout)}
        if run.returncode != 0 or not losses:
            raise RuntimeError(f"run {name} ended with {run.returncode}:\n{run.stdout[-2000:]}\n{run.stderr[-6000:]}")
        return losses

    def weights(self, name: str, step: int) -> dict[str, str]:
        """Return name → SHA-256 of every weight, "" for objects, without optimizer, random state and SNIP's state."""
        return weights(self._folder / name / f"iter_{step:07d}")


def weights(checkpoint: Path) -> dict[str, str]:
    """Return the entries of the model in a torch_dist checkpoint.

    They are name → SHA-256 of dtype, shape and bytes, or "" for objects.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    entries = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    model = {name: entry for name, entry in entries.items() if _is_model_s(name)}
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in model.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    return {name: _sha256(tensors[name]) if name in tensors else "" for name in model}


def _is_model_s(name: str) -> bool:
    return not name.startswith(("optimizer.", "rng_state", "rerun_state", "common_state", "snip."))


def _sha256(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def round_trip(folder: Path, transformer_impl: str = "transformer_engine", timeout: float = 240.0) -> dict[str, Any]:
    """Run everything. Returns what the runs show about weights and losses. Raises RuntimeError if a run fails."""
    runs = RoundTrip(folder, transformer_impl, timeout)
    losses = {"stock": runs.train("stock", 4)}

    def there_and_back() -> None:
        losses["snip"] = runs.train("snip", 8, *SNIP, load="stock")
        losses["stock_after_snip"] = runs.train("stock_after_snip", 12, load="snip")

    def control() -> None:
        losses["control"] = runs.train("control", 8, load="stock")
        losses["control_after_control"] = runs.train("control_after_control", 12, load="control")

    def frozen() -> None:
        runs.train("snip_frozen", 5, *SNIP, *_FROZEN, load="stock")
        runs.train("stock_frozen", 6, *_FROZEN, load="snip_frozen")

    pairs = (there_and_back, control, frozen)
    with ThreadPoolExecutor(len(pairs)) as pool:
        for started in [pool.submit(pair) for pair in pairs]:
            started.result()
    original = runs.weights("stock", 4)
    copies = {"stock -> snip": runs.weights("snip_frozen", 5), "snip -> stock": runs.weights("stock_frozen", 6)}
    trained = {
        "snip, trained": runs.weights("snip", 8),
        "stock after snip, trained": runs.weights("stock_after_snip", 12),
    }
    return {
        "transformer_impl": transformer_impl,
        "arguments": shlex.join(_LLAMA),
        "weights": compare_weights(original, copies, trained),
        "losses": compare_losses(losses),
    }


def compare_weights(
    original: Mapping[str, str], copies: Mapping[str, Mapping[str, str]], trained: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Compare the weights of checkpoints.

    ``equal``: every copy has the original's entries bit for bit, and every trained checkpoint has the same entries with
    other bits. ``digest``: SHA-256 over the original's names and hashes, in order.
    """
    digest = hashlib.sha256("".join(f"{name} {original[name]}\n" for name in sorted(original)).encode()).hexdigest()
    tensors = [name for name, value in original.items() if value]
    differences = {
        where: sorted(name for name in original.keys() | copy.keys() if original.get(name) != copy.get(name))
        for where, copy in copies.items()
    }
    keys = {where: sorted(original.keys() ^ weights.keys()) for where, weights in {**copies, **trained}.items()}
    unmoved = {
        where: [name for name in tensors if original[name] == weights.get(name)] for where, weights in trained.items()
    }
    return {
        "equal": bool(tensors) and not any(map(any, (differences.values(), keys.values(), unmoved.values()))),
        "tensors": len(tensors),
        "entries": len(original),
        "digest": digest,
        "differences": differences,
        "keys_of_one_only": keys,
        "untouched_by_training": unmoved,
    }


def compare_losses(losses: Mapping[str, Mapping[int, float]]) -> dict[str, Any]:
    """Compare losses. ``equal``: at every step within :data:`LOSS_TOLERANCE` of the control's, relative."""
    actual = {**losses["snip"], **losses["stock_after_snip"]}
    expected = {**losses["control"], **losses["control_after_control"]}
    differences = {
        step: abs(actual[step] - expected[step]) / abs(expected[step]) if step in actual else float("inf")
        for step in expected
    }
    largest = max(differences.values())
    return {
        "equal": actual.keys() == expected.keys() and largest <= LOSS_TOLERANCE,
        "tolerance": LOSS_TOLERANCE,
        "largest_relative_difference": largest,
        "stock_to_step_4": losses["stock"],
        "through_snip": actual,
        "control": expected,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="checkpoint round trip stock Transformer Engine - SNIP - stock")
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--commit", help="the measured commit, where the tree has no .git")
    parser.add_argument("--transformer-impl", default="transformer_engine", choices=("transformer_engine", "local"))
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds a run may take")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and arguments.transformer_impl != "local":
        parser.error("needs a CUDA device; --transformer-impl local runs without")
    with tempfile.TemporaryDirectory() as folder:
        result = round_trip(Path(folder), arguments.transformer_impl, arguments.timeout)
    about = header(arguments.commit) if torch.cuda.is_available() else {"device": "cpu", "torch": torch.__version__}
    write(arguments.out, about | result)
    summary = (result["weights"]["equal"], result["losses"]["equal"], result["losses"]["largest_relative_difference"])
    print("weights equal: {}; losses equal: {} (largest relative difference {:.2e})".format(*summary))
    return 0 if summary[0] and summary[1] else 1


if __name__ == "__main__":
    sys.exit(main())
