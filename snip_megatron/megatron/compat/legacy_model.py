"""The GPT model for Megatron 0.17 and 0.18, which call a function for each model chunk and have no hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args

from snip_megatron.megatron.compat.model_chunks import HookedChunks


@dataclass
class LegacyModelConfig(HookedChunks):
    """The part of Megatron 0.19's model configuration that SNIP sets. ``provide`` is the model provider.

    Attributes:
        transformer: Configuration of the transformer, shared by all chunks.
    """

    transformer: Any

    @classmethod
    def from_args(cls, args: Any) -> LegacyModelConfig:
        """Build the configuration from Megatron's arguments, with ``--spec`` as layer spec if it was given."""
        spec = None if args.spec is None else import_module(args.spec)
        return cls(transformer=core_transformer_config_from_args(args), transformer_layer_spec=spec)

    def provide(
        self,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: Any = None,
    ) -> GPTModel:
        """Build one model chunk. Raises SnipError if a hook replaces chunks."""
        args = get_args()
        return self.built(self._build(args, pre_process, post_process, vp_stage, pg_collection))

    def _build(self, args: Any, pre_process: bool, post_process: bool, vp_stage: int | None, groups: Any) -> GPTModel:
        config, use_te = self.transformer, args.transformer_impl == "transformer_engine"
        spec = self.transformer_layer_spec
        if callable(spec) and not isinstance(spec, ModuleSpec):
            spec = spec(self)
        elif spec is None:
            spec = get_gpt_decoder_block_spec(
                config, use_te, normalization=args.normalization, qk_l2_norm=args.qk_l2_norm, vp_stage=vp_stage
            )
        mtp = None
        if args.mtp_num_layers is not None:
            mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=use_te, vp_stage=vp_stage)
        return GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
            parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
            mtp_block_spec=mtp,
            pg_collection=groups,
            vp_stage=vp_stage,
        )
