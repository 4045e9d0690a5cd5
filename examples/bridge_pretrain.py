"""A small Llama pretrained by Megatron Bridge 0.6 or 0.7 under SNIP, on mock data.

    torchrun --nproc-per-node 1 examples/bridge_pretrain.py --snip --snip-budget fp4=0.5 --snip-first-update 2 \\
        --snip-update-interval 8 --snip-lag 2 --snip-dir run

All ``--snip-*`` arguments of ``snip_megatron.pretrain_gpt`` hold; without ``--snip`` it is Bridge alone. Without a CUDA
device it runs on the CPU over gloo.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from snip_megatron.megatron import startup
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config import SnipConfig, add_arguments
from snip_megatron.runtime.options import given_options


def torch_layers(provider: Any) -> Any:
    """Megatron's own layers and torch's norms: nothing here needs a GPU, whatever else is installed."""
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    layer = local_layer_spec(provider)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = WrappedTorchNorm
    count = get_num_layers_to_build(provider)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=WrappedTorchNorm)


def container(steps: int, *, on_cpu: bool) -> Any:
    """Bridge's configuration of a 2-layer Llama, hidden 128, 128 tokens."""
    import torch
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config as bridge
    from megatron.bridge.training.tokenizers.config import TokenizerConfig

    model = GPTModelProvider(
        num_layers=2,
        hidden_size=128,
        ffn_hidden_size=384,
        num_attention_heads=4,
        num_query_groups=2,
        seq_length=128,
        vocab_size=256,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        transformer_impl="local",
        transformer_layer_spec=torch_layers,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=not on_cpu,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
    )
    return bridge.ConfigContainer(
        model=model,
        train=bridge.TrainingConfig(train_iters=steps, global_batch_size=4, micro_batch_size=2),
        validation=bridge.ValidationConfig(eval_interval=steps, eval_iters=1),
        optimizer=bridge.OptimizerConfig(lr=1e-3, min_lr=1e-4, bf16=True, use_distributed_optimizer=False),
        scheduler=bridge.SchedulerConfig(
            lr_decay_style="cosine", lr_warmup_iters=2, start_weight_decay=0.1, end_weight_decay=0.1
        ),
        ddp=bridge.DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False),
        dataset=bridge.MockGPTDatasetConfig(
            random_seed=1234,
            seq_length=128,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            num_workers=0,
            dataloader_type="single",
            skip_getting_attention_mask_from_dataset=not on_cpu,
        ),
        logger=bridge.LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=256),
        checkpoint=bridge.CheckpointConfig(save=None, load=None),
        dist=bridge.DistributedInitConfig(distributed_backend="gloo" if on_cpu else "nccl"),
        rng=bridge.RNGConfig(seed=1234),
    )


def main() -> int:
    """Train; returns the exit code."""
    parser = argparse.ArgumentParser(description="a small Llama under Megatron Bridge and SNIP")
    parser.add_argument("--steps", type=int, default=20, help="training steps (default 20)")
    args = add_arguments(parser).parse_args()
    try:
        decided = startup.prepare([], args.snip_no_compat or ())  # before Megatron is imported
        # This import comes first: it says in one line that Bridge is missing.
        from snip_megatron.bridge import SnipCallback, prepare  # isort: skip

        from megatron.bridge.training.gpt_step import forward_step
        from megatron.bridge.training.pretrain import pretrain

        prepare(decided)
        config = container(args.steps, on_cpu=decided.on_cpu)
        if not args.snip:
            pretrain(config, forward_step)
            return 0
        with SnipCallback(**given_options(args, SnipConfig)) as snip:
            snip.attach(config)
            pretrain(config, forward_step, callbacks=[snip])
    except SnipError as error:
        print(f"bridge_pretrain: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
