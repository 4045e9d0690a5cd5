"""Batches that not only the ends of a pipeline read: documents that do not attend to each other, conversations
(``--sft``) among them, and those for predictions of further tokens.
"""

import functools
import json
import random
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from altered_pretrain import traced
from launch import tiny_llama_args
from warm_ranks import WarmRanks

from snip_megatron.megatron.prepare_data import byte_tokenizer, save_tokenizer
from snip_megatron.runtime.run_data import read_maps

STEPS = 6
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
UPDATED = (
    "--snip --snip-estimator noise "
    "--snip-budget fp4=0.5 --snip-formats fp8,fp4 --snip-first-update 1 --snip-update-interval 3 --snip-lag 1"
    " --snip-wait 120"
)
Train = Callable[..., list[dict[str, Any]]]


def write_conversations(folder: Path) -> tuple[str, ...]:
    """Write a tokenizer and lines of several short conversations each. Returns the arguments that name them."""
    save_tokenizer(byte_tokenizer(), folder / "tokenizer")
    configuration = folder / "tokenizer" / "tokenizer_config.json"
    configuration.write_text(json.dumps(json.loads(configuration.read_text()) | {"chat_template": TEMPLATE}))
    draw = random.Random(1)
    lines = []
    for _ in range(40):
        messages = []
        for _ in range(3):
            word = draw.choice(["red", "green", "blue"])
            messages += [{"role": role, "content": word} for role in ("system", "user", "assistant")]
        lines.append(json.dumps({"messages": messages}))
    (folder / "conversations.jsonl").write_text("\n".join(lines))
    tokenizer = ("--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(folder / "tokenizer"))
    data = ("--train-data-path", str(folder / "conversations.jsonl"), "--sft-tokenizer-prompt-format", "default")
    return ("--sft", *tokenizer, *data)


@pytest.fixture(scope="module")
def train(warm: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """A function that trains on conversations or on mock data. Equal calls train once."""
    folder = tmp_path_factory.mktemp("trainings")
    conversations = write_conversations(folder)

    @functools.cache
    def run(name: str, extra: str = "", snip: str = "", ranks: int = 1, sft: bool = True) -> Any:
        words = [*(conversations if sft else ()), *shlex.split(f"--num-layers 2 {extra} {snip}")]
        words += ["--snip-dir", str(folder / name / "snip")] if snip else []
        args = tiny_llama_args(*words, iters=STEPS, mock_data=not sft)
        return traced(warm, ranks, args, folder / name, TORCH_ATTENTION="1", WHOLE_MOCK_DATA="1")

    run.folder = folder  # type: ignore[attr-defined]
    return run


def test_conversations_under_an_all_bf16_map_are_stock_bit_by_bit(train: Train) -> None:
    assert train("bf16", snip="--snip --snip-policy bf16") == train("stock")


def test_conversations_train_under_updated_maps(train: Train) -> None:
    """The probe, of a whole microbatch, leaves nothing behind: the next step's loss is stock's."""
    (stock,), (updated,) = train("stock"), train("updated", snip=UPDATED)
    assert {step: stock["losses"][step] for step in (1, 2)} == {step: updated["losses"][step] for step in (1, 2)}
    assert stock["losses"][STEPS] != updated["losses"][STEPS]
    assert float.fromhex(updated["losses"][STEPS]) == pytest.approx(float.fromhex(stock["losses"][STEPS]), rel=0.05)
    assert len(read_maps(train.folder / "updated" / "snip")) == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("data", "layout"),
    [
        ("--dataloader-inter-document-masking", "--micro-batch-size 1"),  # their ends on the middle stage too
        ("--mtp-num-layers 1", "--pipeline-model-parallel-layout Ett|tm|L"),  # so are tokens here
    ],
)
def test_layouts_agree(data: str, layout: str, train: Train) -> None:
    name = data.split()[0]
    saved = train.folder / f"saved{name}"  # type: ignore[attr-defined]
    model = f"{data} --num-layers 3 --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
    whole = train(f"one{name}", f"{model} --save {saved} --save-interval 2", sft=False)[0]["losses"]
    stages = f"{model} --pipeline-model-parallel-size 3 {layout} --load {saved} --ckpt-step 2"
    part = train(f"stages{name}", stages, ranks=3, sft=False)[-1]["losses"]
    assert sorted(part) == [3, 4, 5, 6]
    for step, loss in part.items():
        assert float.fromhex(loss) == pytest.approx(float.fromhex(whole[step]), rel=1e-3)


def test_documents_do_not_attend_to_each_other(train: Train) -> None:
    """Whether a sequence consists of documents changes the loss; an all-bf16 map does not."""
    plain, packed, mapped = (
        train(name, "--dataloader-inter-document-masking" * bool(name != "plain"), snip, sft=False)[0]["losses"]
        for name, snip in (("plain", ""), ("packed", ""), ("mapped", "--snip --snip-policy bf16"))
    )
    assert plain[1] != packed[1]
    assert mapped == packed
