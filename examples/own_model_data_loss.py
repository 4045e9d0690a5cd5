"""A Megatron script with its own model provider, data, loss and argument, and SNIP in three lines, marked ``SNIP``.

The data set counts in steps: 7, 10, 13, 16, ... The loss weighs a token the more, the worse it was predicted.

    torchrun --nproc-per-node 8 examples/own_model_data_loss.py <Megatron's arguments> --focus 2 --snip \\
        --snip-dir runs/own

Without a CUDA device: ``torchrun ... -m snip_megatron.attach examples/own_model_data_loss.py ...``.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import core_transformer_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from snip_megatron.attach import attach, snip_arguments  # SNIP 1
from snip_megatron.precision import PrecisionMap


def print_map(step: int, precision_map: PrecisionMap) -> None:
    """Say on every rank that a map came into force."""
    print(f"rank {torch.distributed.get_rank()}: map {precision_map.version} from step {step} on", flush=True)


pretrain = attach(pretrain, on_adopt=print_map)  # SNIP 2


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The script's own arguments."""
    parser.add_argument("--focus", type=float, default=1.0, help="exponent of a token's weight in the loss")
    return parser


class Counting(torch.utils.data.Dataset):
    """Sequences that count in steps of 1 to 8, modulo the vocabulary."""

    def __init__(self, samples: int, length: int, vocabulary: int) -> None:
        self._samples, self._length, self._vocabulary = samples, length, vocabulary

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        counted = (index + (1 + index % 8) * torch.arange(self._length + 1)) % self._vocabulary
        return {"tokens": counted[:-1], "labels": counted[1:], "position_ids": torch.arange(self._length)}


def datasets(samples: tuple[int, int, int]) -> tuple[Counting | None, ...]:
    """Train, validation and test data. Megatron calls this on the first rank of each tensor parallel group."""
    args = get_args()
    return tuple(Counting(count, args.seq_length, args.padded_vocab_size) if count else None for count in samples)


def build_model(pre_process: bool, post_process: bool, vp_stage: int | None = None, **other: Any) -> GPTModel:
    """One model chunk."""
    args = get_args()
    config = core_transformer_config_from_args(args)
    fused = args.transformer_impl == "transformer_engine"
    layer = get_gpt_layer_with_transformer_engine_spec() if fused else get_gpt_layer_local_spec(normalization="RMSNorm")
    return GPTModel(
        config=config,
        transformer_layer_spec=layer,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.seq_length,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type="rope",
        vp_stage=vp_stage,
        pg_collection=other.get("pg_collection"),
    )


def focused_loss(focus: float, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean of the token losses, each times (1 − its probability) to the power of ``focus``."""
    losses = losses.float()
    loss = ((1 - torch.exp(-losses.detach())) ** focus * losses).mean()
    return loss, {"focused loss": loss.detach()}


def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Run a microbatch."""
    data = None if data_iterator is None else next(data_iterator)
    batch = tensor_parallel.broadcast_data(["tokens", "labels", "position_ids"], data, torch.int64)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(focused_loss, get_args().focus)


def main() -> None:
    """Train as the command line says."""
    args = parse_and_validate_args(extra_args_provider=snip_arguments(add_arguments))  # SNIP 3
    config = pretrain_cfg_container_from_args(args)
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step, model_provider=build_model)


if __name__ == "__main__":
    main()
