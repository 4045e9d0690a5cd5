"""Training on data files of its own kind, with validation on others."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from launch import losses, tiny_llama_args
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from warm_ranks import WarmRanks

from snip_megatron.megatron.prepare_data import byte_tokenizer, save_tokenizer
from snip_megatron.runtime.run_data import load_run, read_events

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
    process = warm.succeed(1, args, tmp=tmp_path)
    curve = losses(process)
    assert len(curve) == 20
    validation = [float(v) for v in re.findall(r"validation loss at iteration .*lm loss value: (\S+)", process.stdout)]
    assert len(validation) == 3  # steps 10 and 20, and after training
    # Between knowing nothing and knowing which 64 tokens occur; documents of the validation file were never seen.
    assert math.log(64) - 0.5 < validation[-1] < math.log(255) - 0.3
    assert validation[-1] < validation[0]


def test_documents_whose_middle_is_filled_in(warm: WarmRanks, tmp_path: Path) -> None:
    write_documents(tmp_path / "train", 40, seed=1)
    save_tokenizer(byte_tokenizer(), tmp_path / "tokenizer")
    tokenizer = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path / "tokenizer"))
    tokens = [
        text for name in ("prefix", "middle", "suffix", "pad", "eod") for text in (f"--fim-{name}-token", name[0])
    ]
    curves = []
    for extra in ((), ("--fim-data", *tokens)):
        data = ("--train-data-path", str(tmp_path / "train"), *tokenizer)
        process = warm.succeed(1, tiny_llama_args(*data, *extra, iters=3, mock_data=False), tmp=tmp_path)
        curves.append(losses(process))
    assert len(curves[1]) == 3
    assert curves[0] != curves[1]


@pytest.mark.parametrize(("several", "expected"), [(True, {"books", "code"}), (False, {None})])
def test_sets_are_recorded_by_name(warm: WarmRanks, tmp_path: Path, several: bool, expected: set[str | None]) -> None:
    """The last step is validated twice: by the loop, and after training, when Megatron evaluates the test set too."""
    for name, documents in (("train", 40), ("books", 2), ("code", 3), ("test", 4)):
        write_documents(tmp_path / name, documents, seed=documents)
    sets = ["books", "code"] if several else ["books"]
    paths = {"--train-data-path": ["train"], "--valid-data-path": sets, "--test-data-path": ["test"] * (not several)}
    data = [text for flag, names in paths.items() if names for text in (flag, *(str(tmp_path / n) for n in names))]
    data += ["--multiple-validation-sets", "--full-validation", "--validation-set-names", *sets] * several
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "255"]
    snip = ["--snip", "--snip-policy", "uniform-fp8", "--snip-dir", str(tmp_path / "run")]
    args = tiny_llama_args(
        *data, *tokenizer, *snip, "--eval-interval", "2", "--eval-iters", "1", iters=4, mock_data=False
    )
    warm.succeed(1, args, tmp=tmp_path)
    events = [event for event in read_events(tmp_path / "run") if event["event"] in ("validation", "test")]
    assert {(event["event"], event.get("set")) for event in events} >= {("validation", name) for name in expected}
    assert [event["step"] for event in events if event["event"] == "test"] == ([] if several else [4])
    keys = {"map", "map, code"} if several else {"map"}
    validations = load_run(tmp_path / "run").validations()
    assert {key: list(losses) for key, losses in validations.items()} == {key: [2, 4] for key in keys}
