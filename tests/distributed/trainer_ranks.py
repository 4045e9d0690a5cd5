"""A Llama in transformers' ``Trainer`` with and without SNIP: module of warm ranks, with a folder as argument.

Every rank writes losses, maps and a sum over its weights to ``<folder>/<rank>.json``.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from snip_megatron.plain.trainer import SnipCallback

STEPS = 12


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    rows = (torch.randint(1, 8, (96, 1), generator=generator) * torch.arange(17)) % 64
    return [{"input_ids": row, "labels": row} for row in rows]


def train(folder: Path, callback: Any = None, resume: str | None = None, **arguments: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    backend = "gloo" if "RANK" in os.environ else None
    args = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
        learning_rate=3e-3, logging_steps=1, save_steps=8, report_to="none", disable_tqdm=True, ddp_backend=backend,
        restore_callback_states_from_checkpoint=True, **arguments,
    )  # fmt: skip
    callbacks = [] if callback is None else [callback]
    trainer = Trainer(model, args, train_dataset=data(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    result: dict[str, Any] = {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "norms": [row["grad_norm"] for row in trainer.state.log_history if "loss" in row],
        "weights": float(sum(p.double().abs().sum() for p in model.parameters())),
    }
    snip_callbacks = [each for each in trainer.callback_handler.callbacks if isinstance(each, SnipCallback)]
    if snip_callbacks:
        snip = snip_callbacks[0].snip
        assert snip is not None
        result["map"] = {key: fmt.value for key, fmt in snip.map.choices.items()}
        result["tokens"] = None if snip.table is None else snip.table.tokens
    return result


def main() -> None:
    if os.environ["WORLD_SIZE"] == "1":  # a process that no launcher started
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    folder = Path(sys.argv[1])
    options = {"budget": "fp4=0.75", "first_update": 5, "update_interval": 100}
    result = {"stock": train(folder / "stock")}
    result["snip"] = train(folder / "snip", SnipCallback(**options, dir=str(folder / "run")))
    result["resumed"] = train(folder / "resumed", SnipCallback(**options), str(folder / "snip" / "checkpoint-8"))
    Path(folder, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
