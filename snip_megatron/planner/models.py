"""The sizes of a model that a plan needs, and those of known Llama models."""

import dataclasses
from dataclasses import dataclass

from snip_megatron.precision import DENSE_LAYER, LinearId, LinearRow
from snip_megatron.precision.errors import SnipError, cut


@dataclass(frozen=True)
class Model:
    """A model: its linears, and the sizes of what is no linear."""

    name: str
    rows: tuple[LinearRow, ...]  # the linears of all layers. Their stages are those of a layout
    hidden: int
    heads: int
    groups: int
    head_size: int  # features of a head; of latent attention, the mean of those of keys and of values
    vocabulary: int
    context: int
    tied: bool = False  # whether the output layer shares the word embedding's weight

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
    """The sizes of an untied Llama: RMSNorm, SwiGLU, RoPE, grouped-query attention, no biases."""

    name: str
    blocks: int  # number of transformer blocks
    hidden: int
    ffn: int  # intermediate size of the MLP
    heads: int
    groups: int
    head_size: int
    vocabulary: int
    context: int
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
        keys = 2 * self.groups * self.head_size
        shapes = (
            (queries + keys, self.hidden),
            (self.hidden, queries),
            (2 * self.ffn, self.hidden),
            (self.hidden, self.ffn),
        )
        rows = (
            LinearRow(str(LinearId("decoder", block, path)), block * pp // self.blocks, *shape)
            for block in range(self.blocks)
            for path, shape in zip(DENSE_LAYER, shapes, strict=True)
        )
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(Model) if f.name not in ("rows", "tied")}
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
    """Return a Llama's sizes by name (``70b``, ``llama-70b``). Raises SnipError if the name is unknown."""
    model = MODELS.get(name.lower()) or MODELS.get(f"llama-{name.lower()}")
    if model is None:
        names = ", ".join(name.removeprefix("llama-") for name in MODELS)
        raise SnipError(
            f"model {cut(name)}: unknown; choose one of {names}, or give the arguments of another one to Megatron"
            " (--megatron ...)"
        )
    return model
