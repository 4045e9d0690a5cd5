"""What a plan knows of a model; the sizes of known Llama models, and of those that a ``config.json`` gives."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snip_megatron.precision import DENSE_LAYER, LinearId, LinearRow, strict_json
from snip_megatron.precision.errors import SnipError, cut, located, quoted

_MAX_EDGE = 2**24
_MAX_BLOCKS = 10_000


@dataclass(frozen=True)
class Model:
    """A model: its linears, and the sizes of what is no linear.

    Attributes:
        rows: the linears of all layers. Their stages are those of a layout.
        head_size: features of a head; of latent attention, the mean of those of keys and of values.
        tied: whether the output layer shares the word embedding's weight.
    """

    name: str
    rows: tuple[LinearRow, ...]
    hidden: int
    heads: int
    groups: int
    head_size: int
    vocabulary: int
    context: int
    tied: bool = False

    @property
    def blocks(self) -> int:
        """Number of layers, those of multi-token prediction included."""
        return len({(row.id.stack, row.id.layer) for row in self.rows})

    @property
    def weights(self) -> float:
        return sum(row.elements for row in self.rows)

    @property
    def flops(self) -> float:
        """FLOPs of the linears for one token, in forward and backward."""
        return sum(row.flops * row.runs(None) for row in self.rows)

    @property
    def predictions(self) -> int:
        """Number of predictions of a token: the next one, and those of multi-token prediction."""
        return 1 + sum(row.active for row in self.rows if row.id.path == "eh_proj")

    @property
    def parameters(self) -> int:
        """Number of parameters: linears, norms, embedding and output layer, without padding of the vocabulary."""
        norms = len({row.sub_block for row in self.rows}) + 1
        return int(self.weights) + norms * self.hidden + self.vocabulary * self.hidden * (1 if self.tied else 2)


@dataclass(frozen=True)
class Llama:
    """The sizes of a Llama: RMSNorm, SwiGLU, RoPE, grouped-query attention, no biases. Others are as in :class:`Model`.

    ``blocks`` is the number of transformer blocks, ``ffn`` the intermediate size of the MLP.
    """

    name: str
    blocks: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_size: int
    vocabulary: int
    context: int
    tied: bool = False
    norm_epsilon: float = 1e-5
    rotary_base: int = 10_000

    def model(self, pp: int = 1) -> Model:
        """Return the model, split evenly over ``pp`` pipeline stages. Raises SnipError if it cannot be."""
        if self.blocks % pp:
            raise SnipError(
                f"--pp {pp}: {self.name} has {self.blocks} blocks, not divisible by {pp}; choose another size, or plan"
                " the arguments of a training (snip plan --megatron ...)"
            )
        queries = self.heads * self.head_size
        shapes = (
            (queries + 2 * self.groups * self.head_size, self.hidden),
            (self.hidden, queries),
            (2 * self.ffn, self.hidden),
            (self.hidden, self.ffn),
        )
        rows = (
            LinearRow(str(LinearId("decoder", block, path)), block * pp // self.blocks, *shape)
            for block in range(self.blocks)
            for path, shape in zip(DENSE_LAYER, shapes, strict=True)
        )
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(Model) if f.name != "rows"}
        return Model(rows=tuple(rows), **shared)


_KNOWN = (
    Llama("llama-1b", 22, 2048, 5632, 32, 4, 64, 32000, 2048),
    Llama("llama-3b", 26, 3200, 8640, 32, 32, 100, 32000, 2048, norm_epsilon=1e-6),
    Llama("llama-7b", 32, 4096, 11008, 32, 32, 128, 32000, 4096, norm_epsilon=1e-6),
    Llama("llama-8b", 32, 4096, 14336, 32, 8, 128, 128256, 8192, rotary_base=500_000),
    Llama("llama-70b", 80, 8192, 28672, 64, 8, 128, 128256, 8192, rotary_base=500_000),
    Llama("llama-405b", 126, 16384, 53248, 128, 8, 128, 128256, 8192, rotary_base=500_000),
)
MODELS = {model.name: model for model in _KNOWN}
"""TinyLlama 1.1B, OpenLLaMA 3B, Llama 2 7B, Llama 3 8B, 70B and 405B."""


def load_llama(name: str) -> Llama:
    """Load a Llama's sizes by name (``70b``, ``llama-70b``), from a Hugging Face ``config.json``, or from its folder.

    Raises SnipError if the name is unknown, the file cannot be read, or a field is missing or invalid.
    """
    known = MODELS.get(name.lower()) or MODELS.get(f"llama-{name.lower()}")
    if known is not None:
        return known
    path = Path(name, "config.json") if os.path.isdir(name) else Path(name)
    if not os.path.exists(path):
        names = ", ".join(model.removeprefix("llama-") for model in MODELS)
        raise SnipError(
            f"model {cut(name)}: unknown; choose one of {names}, or give a Llama's Hugging Face config.json"
        )
    return from_hugging_face(strict_json.read_file(path), where=str(path))


def from_hugging_face(text: str | bytes, *, where: str) -> Llama:
    """Parse the ``config.json`` of a Llama. Raises SnipError naming ``where`` and the invalid field."""
    with located(where):
        body = strict_json.read_object(text)
    if body.get("model_type") != "llama":
        raise SnipError(
            f'{where}: model_type: must be "llama", got {quoted(body.get("model_type"))}; plan another model from its'
            " arguments of Megatron (snip plan --megatron ...)"
        )
    if body.get("hidden_act", "silu") != "silu":
        raise SnipError(f'{where}: hidden_act: must be "silu", got {quoted(body["hidden_act"])}')
    for bias in ("attention_bias", "mlp_bias"):
        if body.get(bias):
            raise SnipError(f"{where}: {bias}: linears with biases are not planned for")
    hidden, heads = _whole(body, "hidden_size", where), _whole(body, "num_attention_heads", where)
    groups = _whole(body, "num_key_value_heads", where, default=heads)
    if body.get("head_dim") is None and hidden % heads:
        raise SnipError(f"{where}: hidden_size {hidden} is not divisible by num_attention_heads {heads}")
    if heads % groups:
        raise SnipError(f"{where}: num_attention_heads {heads} is not divisible by num_key_value_heads {groups}")
    rope = body.get("rope_parameters") or {}
    base = body.get("rope_theta", rope.get("rope_theta", Llama.rotary_base) if isinstance(rope, dict) else None)
    return Llama(
        name=where,
        blocks=_whole(body, "num_hidden_layers", where, most=_MAX_BLOCKS),
        hidden=hidden,
        ffn=_whole(body, "intermediate_size", where),
        heads=heads,
        groups=groups,
        head_size=_whole(body, "head_dim", where, default=max(1, hidden // heads)),
        vocabulary=_whole(body, "vocab_size", where),
        context=_whole(body, "max_position_embeddings", where, default=2048),
        tied=body.get("tie_word_embeddings", False) is True,
        norm_epsilon=float(_positive(body.get("rms_norm_eps", Llama.norm_epsilon), f"{where}: rms_norm_eps")),
        rotary_base=int(_positive(base, f"{where}: rope_theta")),
    )


def _positive(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise SnipError(f"{where}: must be a positive number, got {quoted(value)}")
    return value


def _whole(body: dict[str, Any], field: str, where: str, *, default: int | None = None, most: int = _MAX_EDGE) -> int:
    value = default if body.get(field) is None else body[field]
    if value is None:
        raise SnipError(f"{where}: {field}: missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise SnipError(f"{where}: {field}: must be a whole number from 1 to {most}, got {quoted(value)}")
    return value
