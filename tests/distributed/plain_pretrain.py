"""Megatron's ``pretrain`` with nothing of SNIP in it, as its users' own scripts call it: module of warm ranks.

Only what lets Megatron run on a CPU at all is ours. For Megatron 0.19.
"""

import sys
from typing import Any

from snip_megatron.megatron.startup import prepare


def main() -> None:
    startup = prepare(sys.argv[1:], [])
    import torch
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import MockGPTDataset
    from megatron.core.enums import ModelType
    from megatron.training import get_args, pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from snip_megatron.megatron import compat
    from snip_megatron.megatron.datasets import dataset_config

    def provide(parser: Any) -> Any:
        compat.set_defaults(parser, startup)
        return parser

    def datasets(samples: Any, vp_stage: int | None = None) -> Any:
        config = dataset_config(get_args())
        return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, lambda: True, config).build()

    datasets.is_distributed = True  # type: ignore[attr-defined]

    def loss(mask: torch.Tensor, output: torch.Tensor) -> Any:
        total = (output.reshape(-1).float() * mask.reshape(-1).float()).sum()
        tokens = mask.sum().to(torch.int)
        return total, tokens, {"lm loss": torch.stack((total.detach(), tokens.float()))}

    def forward_step(data: Any, model: Any) -> Any:
        batch = next(data)
        output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        return output, lambda result: loss(batch["loss_mask"], result)

    args = parse_and_validate_args(provide)
    args.snip = False  # an argument of ours, which the patches ask for
    compat.apply(args, startup)
    model = gpt_config_from_args(args)
    pretrain(
        cfg_container=pretrain_cfg_container_from_args(args, model),
        train_valid_test_dataset_provider=datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
    )
