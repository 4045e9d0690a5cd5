"""Checkpoints of real runs, exported by the command, answer in transformers as they did in Megatron."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launch import tiny_llama_args
from logits_pretrain import TOKENS
from transformers import AutoModelForCausalLM, AutoTokenizer
from warm_ranks import WarmRanks

from snip_megatron.cli import main
from snip_megatron.megatron.data.text_tokenizer import byte_tokenizer, save

VOCABULARY = 200  # padded to 256


def train(warm: WarmRanks, tmp: Path, nproc: int, *extra: str, tied: bool = False) -> torch.Tensor:
    """Two steps, one checkpoint in ``tmp / "saved"``; the logits after them."""
    args = tiny_llama_args("--vocab-size", str(VOCABULARY), *extra, iters=4)
    args += ["--save", str(tmp / "saved"), "--save-interval", "2", "--exit-interval", "2", "--lr", "1e-2"]
    if tied:
        args.remove("--untie-embeddings-and-output-weights")
    env = {"LOGITS": str(tmp / "logits.pt")}
    process = warm.run(nproc, args, module="logits_pretrain", tmp=tmp / "run", env=env)
    assert process.returncode == 0, process.stderr[-4000:]
    logits: torch.Tensor = torch.load(tmp / "logits.pt")
    return logits


def check(folder: Path, logits: torch.Tensor, vocabulary: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found = model(TOKENS).logits
    assert found.shape[-1] == vocabulary
    expected = logits[..., :vocabulary]
    assert expected.std() > 0.05
    assert (found - expected).abs().max() < 1e-4


def test_torch_dist_of_tensor_parallel_snip(warm: WarmRanks, tmp_path: Path) -> None:
    logits = train(
        warm,
        tmp_path,
        2,
        *("--tensor-model-parallel-size", "2", "--snip", "--snip-first-update", "100", "--rotary-base", "50000"),
    )
    out = tmp_path / "hf"
    tokenizer = byte_tokenizer()
    save(tokenizer, tmp_path / "tokenizer")
    assert main(["export", "--format", "hf", str(tmp_path / "saved"), "--out", str(out)]) == 0
    check(out, logits, 256)
    # Rows beyond the vocabulary cut, narrower numbers, an iteration's own folder, a tokenizer.
    short = tmp_path / "short"
    extra = ["--vocab-size", str(VOCABULARY), "--dtype", "bfloat16", "--tokenizer", str(tmp_path / "tokenizer")]
    source = tmp_path / "saved" / "iter_0000002"
    assert main(["export", "--format", "hf", str(source), "--out", str(short), *extra]) == 0
    config = json.loads((short / "config.json").read_text())
    assert (config["dtype"], config["vocab_size"], config["eos_token_id"]) == ("bfloat16", VOCABULARY, 256)
    assert AutoTokenizer.from_pretrained(short)("ab")["input_ids"] == [97, 98]
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(short, dtype=torch.float32)(TOKENS).logits
    assert 0 < (found - logits[..., :VOCABULARY]).abs().max() < 0.1


@pytest.mark.parametrize("checkpoint", ["torch", "torch_dist"])
def test_pipelines_with_tied_weights(warm: WarmRanks, tmp_path: Path, checkpoint: str) -> None:
    """Tensor and pipeline parallel with two chunks a stage: layers 0 and 2 on the first, 1 and 3 on the second."""
    args = ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"]
    if checkpoint == "torch":
        args += ["--tensor-model-parallel-size", "2"]
    logits = train(warm, tmp_path, 4 if checkpoint == "torch" else 2, *args, "--ckpt-format", checkpoint, tied=True)
    assert main(["export", "--format", "hf", str(tmp_path / "saved"), "--out", str(tmp_path / "hf")]) == 0
    check(tmp_path / "hf", logits, 256)
