"""Writes a checkpoint of Megatron as a Hugging Face Llama: config.json, safetensors and the tokenizer if there is one.

Both models compute the same function. Megatron's rotary embedding without interleaving rotates the halves of a head, as
Hugging Face's does. The rows of Megatron's QKV weight are ordered by group: the group's query heads, its key, its
value. Those of ``linear_fc1`` are the gate projection followed by the up projection.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from snip_megatron.errors import SnipError, cut, needs_extra, quoted
from snip_megatron.export.megatron_checkpoint import MegatronCheckpoint, read_checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHARD_BYTES = 5 * 10**9
"""Largest size of a model file, in bytes."""

_NEEDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("normalization", lambda v: v == "RMSNorm", "a Llama's norms are RMSNorm"),
    ("swiglu", bool, "a Llama's MLP is SwiGLU"),
    ("position_embedding_type", lambda v: v == "rope", "a Llama's positions are rope"),
    ("rotary_percent", lambda v: v in (None, 1.0), "a Llama turns the whole head"),
    ("rope_type", lambda v: v in (None, "rope"), "scaled positions are not exported"),
    ("softmax_type", lambda v: v in (None, "vanilla"), "a Llama's softmax has no sink"),
)
"""(argument of Megatron, test of its value, the reason to refuse other values)."""

_FORBIDS: tuple[tuple[str, str], ...] = (
    ("add_bias_linear", "a Llama's linears have no bias"),
    ("add_qkv_bias", "a Llama's linears have no bias"),
    ("num_experts", "a Llama is dense"),
    ("multi_latent_attention", "a Llama has no latent attention"),
    ("qk_layernorm", "a Llama does not normalise queries and keys"),
    ("qk_l2_norm", "a Llama does not normalise queries and keys"),
    ("mtp_num_layers", "a Llama predicts one token"),
    ("rotary_interleaved", "its rotary embedding turns neighbours, not halves"),
    ("rotary_seq_len_interpolation_factor", "interpolated positions are not exported"),
    ("use_rope_scaling", "scaled positions are not exported"),
    ("apply_layernorm_1p", "its norms' weights count from one"),
    ("layernorm_zero_centered_gamma", "its norms' weights count from one"),
    ("use_mup", "its activations are scaled"),
    ("window_size", "a Llama attends to everything before a token"),
    ("no_rope_freq", "a Llama has positions in every layer"),
    ("attention_output_gate", "a Llama's attention has no gate"),
    ("softmax_scale", "a Llama divides scores by the root of the head's size"),
    ("activation_func_clamp_value", "a Llama's activation is not clamped"),
    ("glu_linear_offset", "a Llama's gate multiplies up itself"),
    ("apply_residual_connection_post_layernorm", "a Llama's residual passes by the norm"),
    ("experimental_attention_variant", "a Llama's attention is not it"),
    ("heterogeneous_layers_config_path", "a Llama's layers are equal"),
)
"""(argument of Megatron that must be off, the reason to refuse it)."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_size: int
    tied: bool


# -- the command ---------------------------------------------------------------------------------------------------
def add_arguments(group: Any) -> None:
    """Add the arguments of ``snip export --format hf``."""
    group.add_argument("--step", type=int, metavar="N", help="iteration to export; default: the latest of the folder")
    group.add_argument("--dtype", choices=tuple(DTYPES), help="dtype of the weights; default: that of the checkpoint")
    group.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="tokenizer to copy; default: that of the run")
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="tokens to keep of the padded vocabulary; default: the size of the copied tokenizer, or all without one",
    )


def run(args: argparse.Namespace) -> int:
    """Write the model into ``args.out`` and print a summary. Returns the exit code. Raises SnipError on bad input."""
    _check_out(args.out)
    checkpoint = read_checkpoint(args.source, args.step)
    shape = check_llama(checkpoint)
    tokenizer = _tokenizer_folder(checkpoint, args.tokenizer)
    facts = {} if tokenizer is None else _tokenizer_facts(tokenizer)
    rows = _vocabulary(checkpoint, args.vocab_size, facts.get("size"))
    dtype = None if args.dtype is None else DTYPES[args.dtype]
    weights = llama_weights(checkpoint, shape, rows, dtype)
    config = llama_config(checkpoint, shape, rows, weights["model.embed_tokens.weight"].dtype, facts)
    _write(args.out, config, weights, tokenizer)
    count = sum(weight.numel() for weight in weights.values())
    print(f"{args.out}: Llama of {shape.layers} layers, {count:,} parameters, {config['dtype']}, {rows} tokens")
    if tokenizer is None:
        named = checkpoint.arguments.get("tokenizer_model") or checkpoint.arguments.get("tokenizer_type")
        print(f"no tokenizer was copied (the run's is {named}): give a folder by --tokenizer, or add it there yourself")
    return 0


# -- whether the model is a Llama ----------------------------------------------------------------------------------
def check_llama(checkpoint: MegatronCheckpoint) -> Shape:
    """Return the sizes of the model. Raises SnipError if a Hugging Face Llama would not compute the same function."""
    arguments, where = checkpoint.arguments, checkpoint.path

    def refuse(name: str, reason: str) -> SnipError:
        shown = arguments.get(name)
        return SnipError(f"{where}: not a Llama: {name} is {quoted(shown)} ({reason}); --format hf writes Llamas only")

    for name, fits, reason in _NEEDS:
        if not fits(arguments.get(name)):
            raise refuse(name, reason)
    for name, reason in _FORBIDS:
        if arguments.get(name):
            raise refuse(name, reason)
    try:
        heads = int(arguments["num_attention_heads"])
        shape = Shape(
            layers=int(arguments["num_layers"]),
            hidden=int(arguments["hidden_size"]),
            ffn=int(arguments["ffn_hidden_size"]),
            heads=heads,
            groups=int(arguments["num_query_groups"]) if arguments.get("group_query_attention") else heads,
            head_size=int(arguments["kv_channels"]),
            tied=not arguments["untie_embeddings_and_output_weights"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SnipError(f"{where}: its run's arguments do not give the model's sizes ({cut(error)})") from None
    _check_tensors(checkpoint, shape)
    return shape


def _check_tensors(checkpoint: MegatronCheckpoint, shape: Shape) -> None:
    """Raise SnipError unless the checkpoint holds exactly the tensors of such a Llama, in their sizes."""
    vocabulary = checkpoint.tensors["embedding.word_embeddings.weight"].shape[0]
    expected = expected_tensors(shape, vocabulary)
    ignored = {"output_layer.weight"} if shape.tied else set()  # pipeline stages keep a second copy of tied weights
    for name in sorted(checkpoint.tensors.keys() - expected.keys() - ignored):
        raise SnipError(f"{checkpoint.path}: not a Llama: it holds {name}; --format hf writes Llamas only")
    for name, size in expected.items():
        if name not in checkpoint.tensors:
            raise SnipError(f"{checkpoint.path}: {name} is missing")
        found = tuple(checkpoint.tensors[name].shape)
        if found != size:
            raise SnipError(f"{checkpoint.path}: {name} is {found}, its run's arguments say {size}")


def expected_tensors(shape: Shape, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Return Megatron's name → size of every tensor of a Llama with ``vocabulary`` embedding rows."""
    h, queries = shape.hidden, shape.heads * shape.head_size
    sizes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (vocabulary, h),
        "decoder.final_layernorm.weight": (h,),
    }
    if not shape.tied:
        sizes["output_layer.weight"] = (vocabulary, h)
    for layer in range(shape.layers):
        prefix = f"decoder.layers.{layer}."
        sizes |= {
            f"{prefix}input_layernorm.weight": (h,),
            f"{prefix}self_attention.linear_qkv.weight": (queries + 2 * shape.groups * shape.head_size, h),
            f"{prefix}self_attention.linear_proj.weight": (h, queries),
            f"{prefix}pre_mlp_layernorm.weight": (h,),
            f"{prefix}mlp.linear_fc1.weight": (2 * shape.ffn, h),
            f"{prefix}mlp.linear_fc2.weight": (h, shape.ffn),
        }
    return sizes


# -- the model -----------------------------------------------------------------------------------------------------
def llama_weights(
    checkpoint: MegatronCheckpoint, shape: Shape, rows: int, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Return Hugging Face's name → weight for the first ``rows`` tokens, in ``dtype``, or as stored if it is None."""
    source = checkpoint.tensors
    weights = {
        "model.embed_tokens.weight": source["embedding.word_embeddings.weight"][:rows],
        "model.norm.weight": source["decoder.final_layernorm.weight"],
    }
    if not shape.tied:
        weights["lm_head.weight"] = source["output_layer.weight"][:rows]
    for layer in range(shape.layers):
        theirs, ours = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        query, key, value = split_qkv(source[f"{theirs}self_attention.linear_qkv.weight"], shape)
        gate, up = source[f"{theirs}mlp.linear_fc1.weight"].chunk(2, dim=0)
        weights |= {
            f"{ours}input_layernorm.weight": source[f"{theirs}input_layernorm.weight"],
            f"{ours}self_attn.q_proj.weight": query,
            f"{ours}self_attn.k_proj.weight": key,
            f"{ours}self_attn.v_proj.weight": value,
            f"{ours}self_attn.o_proj.weight": source[f"{theirs}self_attention.linear_proj.weight"],
            f"{ours}post_attention_layernorm.weight": source[f"{theirs}pre_mlp_layernorm.weight"],
            f"{ours}mlp.gate_proj.weight": gate,
            f"{ours}mlp.up_proj.weight": up,
            f"{ours}mlp.down_proj.weight": source[f"{theirs}mlp.linear_fc2.weight"],
        }
    return {name: (weight if dtype is None else weight.to(dtype)).contiguous() for name, weight in weights.items()}


def split_qkv(weight: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split Megatron's QKV weight into query, key and value of all heads.

    ``weight`` is [groups · (heads per group + 2) · head size, hidden].
    """
    each, size = shape.heads // shape.groups, shape.head_size
    groups = weight.reshape(shape.groups, each + 2, size, weight.shape[1])
    query, key, value = groups[:, :each], groups[:, each], groups[:, each + 1]
    return tuple(part.reshape(-1, weight.shape[1]) for part in (query, key, value))  # type: ignore[return-value]


def llama_config(
    checkpoint: MegatronCheckpoint, shape: Shape, rows: int, dtype: torch.dtype, tokenizer: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of config.json."""
    with needs_extra("hf", "the export"):
        from transformers import LlamaConfig

    arguments = checkpoint.arguments
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=rows,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        head_dim=shape.head_size,
        max_position_embeddings=int(arguments["max_position_embeddings"]),
        rms_norm_eps=_epsilon(checkpoint),
        rope_parameters={"rope_type": "default", "rope_theta": float(arguments.get("rotary_base", 10000))},
        initializer_range=float(arguments.get("init_method_std", 0.02)),
        tie_word_embeddings=shape.tied,
        bos_token_id=tokenizer.get("bos"),
        eos_token_id=tokenizer.get("eos"),
        pad_token_id=tokenizer.get("pad"),
    )
    return dict(json.loads(config.to_json_string()))


def _epsilon(checkpoint: MegatronCheckpoint) -> float:
    for name in ("layernorm_epsilon", "norm_epsilon"):  # layernorm_epsilon since megatron-core 0.18
        value = checkpoint.arguments.get(name)
        if isinstance(value, float):
            return value
    raise SnipError(f"{checkpoint.path}: its run's arguments do not give the norms' epsilon")


# -- tokenizer -----------------------------------------------------------------------------------------------------
def _tokenizer_folder(checkpoint: MegatronCheckpoint, given: Path | None) -> Path | None:
    """Return the folder of the run's Hugging Face tokenizer, or None if it is not on this machine."""
    if given is not None:
        if not (given / "tokenizer_config.json").is_file():
            raise SnipError(f"--tokenizer {given}: is no folder with a tokenizer_config.json")
        return given
    name = checkpoint.arguments.get("tokenizer_model")
    if checkpoint.arguments.get("tokenizer_type") != "HuggingFaceTokenizer" or not isinstance(name, str):
        return None
    folder = Path(name)
    return folder if (folder / "tokenizer_config.json").is_file() else None


def _tokenizer_facts(folder: Path) -> dict[str, Any]:
    with needs_extra("hf", "the export"):
        from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers can raise anything on a broken folder
        raise SnipError(f"{folder}: its tokenizer cannot be loaded ({type(error).__name__}: {error})") from None
    return {
        "size": len(tokenizer),
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "pad": tokenizer.pad_token_id,
    }


def _vocabulary(checkpoint: MegatronCheckpoint, asked: int | None, known: int | None) -> int:
    padded = checkpoint.tensors["embedding.word_embeddings.weight"].shape[0]
    rows = asked if asked is not None else known if known is not None else padded
    if not 0 < rows <= padded:
        argument = "--vocab-size" if asked is not None else "the tokenizer's size,"
        raise SnipError(f"{argument} {rows}: the checkpoint's vocabulary has {padded} tokens, padding included")
    return rows


# -- files ---------------------------------------------------------------------------------------------------------
def _check_out(folder: Path) -> None:
    """Raise SnipError unless ``folder`` is new or empty: files of two models in one folder would load as a mixture."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SnipError(f"--out {folder}: exists and is not an empty folder")
    # The folder is replaced by the complete model, and the shell would be left in the old one.
    if folder.resolve() == Path.cwd():
        raise SnipError(f"--out {folder}: is the current folder; give another one, which need not exist")


def _write(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], tokenizer: Path | None
) -> None:
    """Write all files into a folder beside ``folder`` and rename it, so that ``folder`` is complete or missing."""
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    try:
        partial.mkdir(parents=True)
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        _write_weights(partial, weights)
        if tokenizer is not None:
            _copy_tokenizer(tokenizer, partial)
        if folder.exists():
            folder.rmdir()
        os.replace(partial, folder)
    except OSError as error:
        raise SnipError(f"--out {folder}: cannot be written ({error})") from None
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(partial)


def _write_weights(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    held = total = 0
    for name, weight in weights.items():
        if shards[-1] and held + weight.nbytes > SHARD_BYTES:
            shards.append({})
            held = 0
        shards[-1][name] = weight
        held += weight.nbytes
        total += weight.nbytes
    if len(shards) == 1:
        _save(shards[0], folder / "model.safetensors")
        return
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _save(shard, folder / file)
        index |= dict.fromkeys(shard, file)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2, sort_keys=True)
    (folder / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")


def _save(weights: dict[str, torch.Tensor], file: Path) -> None:
    with needs_extra("hf", "the export"):
        from safetensors.torch import save_file

    file.touch()
    mode = file.stat().st_mode  # follows the user's umask, whereas safetensors writes files for their owner alone
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(mode)


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
