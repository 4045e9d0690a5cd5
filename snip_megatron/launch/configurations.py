"""The configurations of ``snip launch``: the name of a model, its layout and its hyperparameters.

The shapes of the models are in :data:`snip_megatron.timing.models.MODELS`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from snip_megatron.errors import SnipError, cut, quoted
from snip_megatron.timing.models import MODELS, load_model

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters to start from.

    Attributes:
        tokens: Tokens of the whole run. With the batch size they give the number of steps.
        lr: Maximum learning rate of a cosine schedule.
        min_lr: Minimum learning rate of the schedule.
        warmup: Warm-up steps of the schedule.
        norm_epsilon: Epsilon of the model's norms.
        rotary_base: Base of the model's rotary embedding.
    """

    tokens: float
    lr: float
    min_lr: float
    warmup: int
    norm_epsilon: float
    rotary_base: int


@dataclass(frozen=True)
class Configuration:
    """A known configuration.

    Attributes:
        name: Name on the command line.
        title: Name of the model for readers.
        model: Name of the model in the table of models.
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        dp: Data parallel size.
        seq_length: Tokens of a sequence.
        micro_batch_size: Sequences of a microbatch.
        global_batch_size: Sequences of a step.
        recompute: ``none``, ``selective`` or ``full``.
        recipe: Hyperparameters.
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
        """Number of nodes with :data:`GPUS_PER_NODE` GPUs each."""
        return self.tp * self.pp * self.dp // GPUS_PER_NODE


_TINY = Recipe(3e12, 4e-4, 4e-5, 2000, 1e-5, 10_000)
_OPEN = Recipe(1e12, 3e-4, 3e-5, 2000, 1e-6, 10_000)
_LARGE = Recipe(15e12, 1.5e-4, 1.5e-5, 2000, 1e-5, 500_000)

_KNOWN = (
    Configuration("1b", "TinyLlama 1.1B", "llama-1b", 1, 1, 8, 2048, 8, 1024, "none", _TINY),
    # Fused attention needs heads of a multiple of 8 features, and these have 100. Unfused attention would keep its
    # scores for the backward, so they are recomputed.
    Configuration("3b", "OpenLLaMA 3B", "llama-3b", 1, 1, 8, 2048, 4, 2048, "selective", _OPEN),
    Configuration("7b", "OpenLLaMA 7B", "llama-7b", 1, 1, 8, 2048, 2, 2048, "none", _OPEN),
    Configuration("70b", "Llama 3 70B", "llama-70b", 8, 4, 2, 8192, 1, 512, "none", _LARGE),
    Configuration("70b-pp8", "Llama 3 70B", "llama-70b", 8, 8, 1, 8192, 1, 512, "none", _LARGE),
)
CONFIGURATIONS = {configuration.name: configuration for configuration in _KNOWN}

#: Rotary base of models in the table that no configuration trains.
_ROTARY_BASE = {"llama-8b": 500_000, "llama-405b": 500_000}
_DEFAULT_BASE, _DEFAULT_EPSILON = 10_000, 1e-5


def find(name: str) -> Configuration:
    """Return the configuration of this name. Raises SnipError if there is none."""
    if name not in CONFIGURATIONS:
        raise SnipError(
            f"{cut(name)}: no such configuration; choose one of {', '.join(CONFIGURATIONS)}, and --model for another"
            " Llama"
        )
    return CONFIGURATIONS[name]


def constants(model: str) -> tuple[float, int]:
    """Return (norm epsilon, rotary base) of a model, given its name or its ``config.json``. Raises SnipError."""
    name = load_model(model).name
    if name in MODELS:
        for configuration in _KNOWN:
            if configuration.model == name:
                return configuration.recipe.norm_epsilon, configuration.recipe.rotary_base
        return _DEFAULT_EPSILON, _ROTARY_BASE.get(name, _DEFAULT_BASE)
    body = json.loads(Path(name).read_text(encoding="utf-8"))  # load_model has checked the file
    rope = body.get("rope_parameters") or {}
    base = body.get("rope_theta", rope.get("rope_theta", _DEFAULT_BASE) if isinstance(rope, dict) else None)
    epsilon = body.get("rms_norm_eps", _DEFAULT_EPSILON)
    for field, value in (("rope_theta", base), ("rms_norm_eps", epsilon)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise SnipError(f"{name}: {field}: must be a positive number, got {quoted(value)}")
    return float(epsilon), int(base)
