"""A usual Megatron pretraining script of a GPT model (megatron-core 0.19), with SNIP in three lines, marked ``SNIP``.

    torchrun --nproc-per-node 8 examples/own_pretrain_gpt.py <Megatron's arguments> --snip --snip-budget fp4=0.75 \\
        --snip-dir runs/own

Without a CUDA device: ``torchrun ... -m snip_megatron.attach examples/own_pretrain_gpt.py ...``. Without ``--snip`` it
trains as it does without the three lines.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from snip_megatron.attach import attach, snip_arguments  # SNIP 1

pretrain = attach(pretrain)  # SNIP 2


def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Run a microbatch. Returns the token losses and the function that sums them up."""
    tokens, labels, positions, mask = microbatch(data_iterator)
    return model(tokens, positions, None, labels=labels, loss_mask=mask), partial(summed_loss, mask)


def microbatch(data_iterator: Any) -> tuple[torch.Tensor | None, ...]:
    """Read a microbatch on the first tensor parallel rank, and send it to the others. Middle stages need none."""
    if not (mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()):
        return None, None, None, None
    data = None if data_iterator is None else next(data_iterator)
    numbers = tensor_parallel.broadcast_data(["tokens", "labels", "position_ids"], data, torch.int64)
    mask = tensor_parallel.broadcast_data(["loss_mask"], data, torch.float32)["loss_mask"]
    return numbers["tokens"], numbers["labels"], numbers["position_ids"], mask


def summed_loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the token losses under the mask, number of tokens, and what Megatron logs."""
    total = (losses.float().view(-1) * mask.view(-1)).sum()
    tokens = mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack((total.detach(), tokens.to(total.dtype)))}


def datasets(samples: tuple[int, int, int], vp_stage: int | None = None) -> Any:
    """Train, validation and test data from ``--data-path`` and its like, or Megatron's mock data."""
    args = get_args()
    blend, per_split = get_blend_and_blend_per_split(args)
    known = {field.name for field in dataclasses.fields(GPTDatasetConfig) if field.init}
    config = GPTDatasetConfig(
        **{name: value for name, value in vars(args).items() if name in known - {"blend", "blend_per_split", "split"}},
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=per_split,
        split=args.split if per_split is None else None,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        create_attention_mask=False,
    )

    def reads() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and bool(is_first_or_last_pipeline_stage(vp_stage))

    return BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset, samples, reads, config
    ).build()


datasets.is_distributed = True


def main() -> None:
    """Train as the command line says."""
    args = parse_and_validate_args(extra_args_provider=snip_arguments())  # SNIP 3
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
