"""The downstream benchmark's Llama answers in transformers as the trained model did in Megatron."""

from pathlib import Path

import torch
from altered_pretrain import TOKENS
from launch import tiny_llama_args
from transformers import AutoModelForCausalLM, AutoTokenizer
from warm_ranks import WarmRanks

from benchmarks.quality.hf_llama import write_llama
from benchmarks.quality.models import Model
from snip_megatron.megatron.prepare_data import byte_tokenizer, save_tokenizer

MODEL = Model(layers=4, hidden=64, ffn=192, heads=4, groups=2)


def test_logits_of_a_tensor_parallel_run_under_snip(warm: WarmRanks, tmp_path: Path) -> None:
    args = tiny_llama_args(
        *("--vocab-size", "400", "--bf16", "--tensor-model-parallel-size", "2", "--snip", "--snip-first-update", "100"),
        *("--save", str(tmp_path / "saved"), "--save-interval", "2", "--exit-interval", "2", "--lr", "1e-2"),
        iters=4,
    )
    env = {"LOGITS": str(tmp_path / "logits.pt")}
    warm.succeed(2, args, module="altered_pretrain", tmp=tmp_path / "run", env=env)
    tokenizer = byte_tokenizer()
    save_tokenizer(tokenizer, tmp_path / "tokenizer")

    write_llama(tmp_path / "saved", MODEL, 64, tmp_path / "tokenizer", tmp_path / "hf")

    loaded = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert loaded("ab")["input_ids"] == [97, 98]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        found = model(TOKENS).logits
    assert found.shape[-1] == len(loaded)  # without the padding of Megatron's vocabulary
    expected = torch.load(tmp_path / "logits.pt")[..., : len(loaded)]
    assert expected.std() > 0.05
    assert (found - expected).abs().max() < 0.1 * expected.std()  # Megatron's activations are bf16
