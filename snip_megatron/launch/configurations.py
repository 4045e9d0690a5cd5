"""The configurations that ``snip launch`` knows: a model of the planner's table, its layout and how it is trained.

Shapes are nowhere but in :data:`snip_megatron.planner.models.MODELS`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from snip_megatron.errors import SnipError
from snip_megatron.planner.models import MODELS, load_model

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Recipe:
    """How a model is trained: a starting point, not a promise.

    Attributes:
        tokens: of the whole run; with the batch they give the steps.
        lr, min_lr, warmup: of a cosine schedule; ``warmup`` in steps.
        norm_epsilon, rotary_base: constants of the architecture that its shapes do not tell.
    """

    tokens: float
    lr: float
    min_lr: float
    warmup: int
    norm_epsilon: float
    rotary_base: int


@dataclass(frozen=True)
class Configuration:
    """One launch: sizes as Megatron's arguments of the same names give them.

    Attributes:
        name, title: as asked for, and what it is.
        model: its name in the planner's table.
        tp, pp, dp: tensor parallel, pipeline and data parallel sizes.
        seq_length, micro_batch_size, global_batch_size: in tokens, sequences, sequences.
        recompute: ``none``, ``selective`` or ``full``.
    """

    name: str
    title: str
    model: str
    tp: int
    pp: int
    dp: int
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    recompute: str
    recipe: Recipe

    @property
    def nodes(self) -> int:
        """Nodes of :data:`GPUS_PER_NODE` GPUs."""
        return self.tp * self.pp * self.dp // GPUS_PER_NODE


_TINY = Recipe(3e12, 4e-4, 4e-5, 2000, 1e-5, 10_000)
_OPEN = Recipe(1e12, 3e-4, 3e-5, 2000, 1e-6, 10_000)
_LARGE = Recipe(15e12, 1.5e-4, 1.5e-5, 2000, 1e-5, 500_000)

_KNOWN = (
    Configuration("1b", "TinyLlama 1.1B", "llama-1b", 1, 1, 8, 2048, 8, 1024, "none", _TINY),
    # A head of 100 features is no multiple of 8, as fused attention wants: scores must not be kept for the backward.
    Configuration("3b", "OpenLLaMA 3B", "llama-3b", 1, 1, 8, 2048, 4, 2048, "selective", _OPEN),
    Configuration("7b", "OpenLLaMA 7B", "llama-7b", 1, 1, 8, 2048, 2, 2048, "none", _OPEN),
    Configuration("70b", "Llama 3 70B", "llama-70b", 8, 4, 2, 8192, 1, 512, "none", _LARGE),
    Configuration("70b-pp8", "Llama 3 70B", "llama-70b", 8, 8, 1, 8192, 1, 512, "none", _LARGE),
)
CONFIGURATIONS = {configuration.name: configuration for configuration in _KNOWN}

#: Of the models in the planner's table that no configuration trains.
_ROTARY_BASE = {"llama-8b": 500_000, "llama-405b": 500_000}
_DEFAULT_BASE, _DEFAULT_EPSILON = 10_000, 1e-5


def find(name: str) -> Configuration:
    """A configuration by name. Raises SnipError that lists the known ones."""
    if name not in CONFIGURATIONS:
        raise SnipError(
            f"{name}: no such configuration; choose one of {', '.join(CONFIGURATIONS)}, and --model for another Llama"
        )
    return CONFIGURATIONS[name]


def constants(model: str) -> tuple[float, int]:
    """(norm epsilon, rotary base) of a model by name, or from its ``config.json``. Raises SnipError."""
    name = load_model(model).name
    if name in MODELS:
        for configuration in _KNOWN:
            if configuration.model == name:
                return configuration.recipe.norm_epsilon, configuration.recipe.rotary_base
        return _DEFAULT_EPSILON, _ROTARY_BASE.get(name, _DEFAULT_BASE)
    body = json.loads(Path(name).read_text(encoding="utf-8"))  # load_model has read and checked it
    rope = body.get("rope_parameters") or {}
    base = body.get("rope_theta", rope.get("rope_theta", _DEFAULT_BASE) if isinstance(rope, dict) else None)
    epsilon = body.get("rms_norm_eps", _DEFAULT_EPSILON)
    for field, value in (("rope_theta", base), ("rms_norm_eps", epsilon)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise SnipError(f"{name}: {field}: must be a positive number, got {value!r:.40}")
    return float(epsilon), int(base)
