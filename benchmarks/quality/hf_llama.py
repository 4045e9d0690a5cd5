"""A checkpoint of one of the evaluation's Llamas as a Hugging Face model, for :mod:`benchmarks.downstream`.

Megatron-Bridge's converters do this for users. This file covers what ``compare`` trains: ``torch_dist``
checkpoints of :mod:`benchmarks.quality.models`. It unpickles the checkpoint's metadata: give it
your own checkpoints only.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.quality.models import Model
from snip_megatron.precision.errors import SnipError

_LAYERS = "decoder.layers."


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return Megatron's name → whole weight on the CPU of the latest checkpoint of a run's ``--save`` folder.

    Megatron stacks the layers' weights (``decoder.layers.mlp.…``, [layers, …]) and puts norms with their linears.
    """
    tracker = folder / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        raise SnipError(f"{folder}: holds no checkpoint of Megatron ({tracker.name} is missing)")
    reader = FileSystemReader(folder / f"iter_{int(tracker.read_text()):07d}")
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(("embedding.", "decoder.", "output_layer."))
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        load(state, storage_reader=reader, no_dist=True)
    for name in [name for name in state if name.endswith("_w") and f"{name[:-2]}_v" in state]:
        state[name[:-2]] = torch.cat([state.pop(name), state.pop(f"{name[:-2]}_v")], dim=-2)  # SwiGLU's two halves
    weights = {}
    for name, tensor in state.items():
        suffix = name.removeprefix(_LAYERS)
        if suffix == name or suffix.split(".")[0].isdigit():
            weights[name] = tensor
        else:
            weights |= {f"{_LAYERS}{layer}.{suffix}": weight for layer, weight in enumerate(tensor)}
    return weights


def llama_weights(source: dict[str, torch.Tensor], model: Model, rows: int) -> dict[str, torch.Tensor]:
    """Return Hugging Face's name → weight, with the first ``rows`` tokens of the padded vocabulary.

    The rows of Megatron's QKV weight are ordered by group (its query heads, its key, its value), those of
    ``linear_fc1`` are the gate's followed by up's.
    """
    weights = {
        "model.embed_tokens.weight": source["embedding.word_embeddings.weight"][:rows],
        "model.norm.weight": source["decoder.final_layernorm.weight"],
        "lm_head.weight": source["output_layer.weight"][:rows],
    }
    each, size = model.heads // model.groups, model.hidden // model.heads
    for layer in range(model.layers):
        theirs, ours = f"{_LAYERS}{layer}.", f"model.layers.{layer}."
        groups = source[f"{theirs}self_attention.linear_qkv.weight"].reshape(model.groups, each + 2, size, model.hidden)
        query, key, value = groups[:, :each], groups[:, each], groups[:, each + 1]
        gate, up = source[f"{theirs}mlp.linear_fc1.weight"].chunk(2)
        weights |= {
            f"{ours}input_layernorm.weight": source[f"{theirs}self_attention.linear_qkv.layer_norm_weight"],
            f"{ours}self_attn.q_proj.weight": query.reshape(-1, model.hidden),
            f"{ours}self_attn.k_proj.weight": key.reshape(-1, model.hidden),
            f"{ours}self_attn.v_proj.weight": value.reshape(-1, model.hidden),
            f"{ours}self_attn.o_proj.weight": source[f"{theirs}self_attention.linear_proj.weight"],
            f"{ours}post_attention_layernorm.weight": source[f"{theirs}mlp.linear_fc1.layer_norm_weight"],
            f"{ours}mlp.gate_proj.weight": gate,
            f"{ours}mlp.up_proj.weight": up,
            f"{ours}mlp.down_proj.weight": source[f"{theirs}mlp.linear_fc2.weight"],
        }
    return weights


def write_llama(checkpoint: Path, model: Model, sequence: int, tokenizer: Path, out: Path) -> None:
    """Write the model in bf16 and its tokenizer into ``out``. ``sequence`` is its longest sequence."""
    words = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, trust_remote_code=False)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=model.hidden,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.groups,
        max_position_embeddings=sequence,
        rms_norm_eps=1e-5,  # Megatron's default, and its base of rotary embeddings
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    with torch.device("meta"):
        llama = LlamaForCausalLM(config)
    weights = llama_weights(read_weights(checkpoint), model, len(words))
    llama.load_state_dict({name: weight.to(torch.bfloat16) for name, weight in weights.items()}, assign=True)
    llama.save_pretrained(out)
    words.save_pretrained(out)
