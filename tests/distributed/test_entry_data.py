"""Training on data files of its own kind, with validation on others."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import torch
from launch import losses, tiny_llama_args
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from warm_ranks import WarmRanks

PERIOD = 16


def write_documents(prefix: Path, documents: int, seed: int) -> None:
    """Documents that repeat a sequence of PERIOD tokens from 0..63 each, of the 255 that the model knows."""
    rng = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(documents):
        tokens = np.tile(rng.integers(0, 64, PERIOD), 40)
        builder.add_document(torch.from_numpy(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")


def test_train_and_validation_files(warm: WarmRanks, tmp_path: Path) -> None:
    write_documents(tmp_path / "train", 40, seed=1)
    write_documents(tmp_path / "valid", 20, seed=2)
    data = ["--train-data-path", str(tmp_path / "train"), "--valid-data-path", str(tmp_path / "valid")]
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "255"]
    evaluation = ["--eval-iters", "2", "--eval-interval", "10"]
    args = tiny_llama_args(*data, *tokenizer, *evaluation, iters=20, mock_data=False)
    process = warm.run(1, args, tmp=tmp_path)
    assert process.returncode == 0, process.stderr[-4000:]
    curve = losses(process)
    assert len(curve) == 20
    validation = [float(v) for v in re.findall(r"validation loss at iteration .*lm loss value: (\S+)", process.stdout)]
    assert len(validation) == 3  # steps 10 and 20, and after training
    # Between knowing nothing and knowing which 64 tokens occur; documents of the validation file were never seen.
    assert math.log(64) - 0.5 < validation[-1] < math.log(255) - 0.3
    assert validation[-1] < validation[0]
