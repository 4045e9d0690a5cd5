"""Models and prepared text of the evaluation as arguments: Llamas (RMSNorm, SwiGLU, RoPE, untied), and mixtures."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from snip_megatron.precision.errors import SnipError, cut, quoted

SCHEMA = "snip.data/1"
DATA = "{data}"
"""Placeholder of the folder in recorded arguments, which makes them independent of its path."""


@dataclass(frozen=True)
class Model:
    """The sizes of a Llama. ``groups`` is the number of key-value heads; ``groups == heads`` is plain attention.

    ``more`` are Megatron's arguments that make another model of it.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    more: str = ""

    def arguments(self, sequence: int) -> list[str]:
        """Return Megatron's arguments for sequences of ``sequence`` tokens, in bf16 with local (torch) layers."""
        shape = {
            "--num-layers": self.layers,
            "--hidden-size": self.hidden,
            "--ffn-hidden-size": self.ffn,
            "--num-attention-heads": self.heads,
            "--seq-length": sequence,
            "--max-position-embeddings": sequence,
            "--position-embedding-type": "rope",
            "--normalization": "RMSNorm",
            "--attention-dropout": 0,
            "--hidden-dropout": 0,
            "--transformer-impl": "local",
        }
        arguments = [text for pair in shape.items() for text in (pair[0], str(pair[1]))]
        arguments += ["--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--bf16"]
        # In short runs, compiling the fused kernels takes longer than they save.
        arguments.append("--disable-jit-fuser")
        if self.groups != self.heads:
            arguments += ["--group-query-attention", "--num-query-groups", str(self.groups)]
        return [*arguments, *self.more.split()]


_EXPERTS = (
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001"
    " --num-experts"
)
_LATENT = (
    "--multi-latent-attention --rope-type rope --no-rope-fusion --q-lora-rank 256 --kv-lora-rank 128 --qk-head-dim 64"
    " --qk-pos-emb-head-dim 32 --v-head-dim 64"
)
_DELTA_NET = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 3 --linear-conv-kernel-dim 4"
    " --linear-key-head-dim 64 --linear-value-head-dim 64 --linear-num-key-heads 4 --linear-num-value-heads 8"
)
MODELS: Mapping[str, Model] = {
    "nano": Model(layers=2, hidden=64, ffn=128, heads=4, groups=2),  # for tests: trains in seconds on a CPU
    "tiny": Model(layers=4, hidden=256, ffn=512, heads=4, groups=2),
    "26m": Model(layers=8, hidden=512, ffn=1408, heads=8, groups=8),
    "125m": Model(layers=12, hidden=768, ffn=2048, heads=12, groups=12),
    # Qwen3-MoE-like, 26 M active of 157 M: every MLP a mixture, 4 of 32 experts.
    "moe": Model(8, 512, 1536, 8, 4, f"--qk-layernorm --moe-ffn-hidden-size 384 --moe-router-topk 4 {_EXPERTS} 32"),
    # DeepSeek-like: latent attention, one dense block, then a shared expert beside 4 of 16.
    "mla": Model(
        *(6, 512, 1408, 8, 8),
        f"{_LATENT} --moe-layer-freq [0]*1+[1]*5 --moe-shared-expert-intermediate-size 384 --moe-ffn-hidden-size 384"
        f" --moe-router-topk 4 {_EXPERTS} 16",
    ),
    # Qwen3-Next-like: two blocks of gated DeltaNet to one of gated attention, a shared expert beside 2 of 8.
    "hybrid": Model(
        *(6, 512, 1408, 8, 2),
        f"{_DELTA_NET} --attention-output-gate --qk-layernorm --moe-shared-expert-intermediate-size 384"
        f" --moe-shared-expert-gate --moe-ffn-hidden-size 768 --moe-router-topk 2 {_EXPERTS} 8",
    ),
    "1b": Model(layers=22, hidden=2048, ffn=5632, heads=32, groups=4),
}
"""The models by name. They use grouped-query attention if the published model does."""


def model(name: str) -> Model:
    if name not in MODELS:
        raise SnipError(f"model {quoted(name)}: unknown; choose one of {', '.join(MODELS)}")
    return MODELS[name]


# -- text ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Data:
    """Prepared text of a tokenizer, ``bytes`` or ``bpe``: the hash of its tokens, and their numbers."""

    folder: Path
    tokenizer: str
    sha256: str
    tokens: int
    valid_tokens: int

    @property
    def arguments(self) -> list[str]:
        """Megatron's arguments, with ``{data}`` for the folder. Samples are read in the training process itself."""
        return [
            *("--train-data-path", f"{DATA}/train", "--valid-data-path", f"{DATA}/valid", "--num-workers", "0"),
            *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", f"{DATA}/tokenizer"),
        ]


def load_data(folder: Path | None, tokenizer: str) -> Data:
    """Read a folder's manifest. Raises SnipError if it holds no text for training and validation in this tokenizer.

    ``folder`` is the argument ``--data``, None without it.
    """
    if folder is None:
        raise SnipError("--data DIR is missing: the folder that snip prepare-data made")
    how = f"make it with: snip prepare-data --tokenizer {tokenizer} --output {folder}"
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if manifest["schema"] != SCHEMA:
            raise ValueError(f"schema {quoted(manifest['schema'])}")
        files = manifest["files_sha256"]
        data = Data(
            folder=folder.resolve(),
            tokenizer=manifest["tokenizer"]["type"],
            sha256=hashlib.sha256(f"{files['train.bin']} {files.get('valid.bin')}".encode()).hexdigest(),
            tokens=manifest["train"]["tokens"],
            valid_tokens=(manifest["valid"] or {}).get("tokens", 0),
        )
    except FileNotFoundError:
        raise SnipError(f"--data {folder}: holds no prepared text; {how}") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise SnipError(f"--data {folder}: manifest.json cannot be used ({cut(error)}); {how} --overwrite") from None
    if data.tokenizer != tokenizer:
        raise SnipError(  # how ends with this folder, which prepare-data would not replace
            f"--data {folder}: its tokenizer is {cut(data.tokenizer)}, the experiment wants {tokenizer};"
            f" {how}-{tokenizer}"
        )
    if not data.valid_tokens:
        raise SnipError(f"--data {folder}: has no hold-out for validation; {how} --holdout 0.05 --overwrite")
    return data
