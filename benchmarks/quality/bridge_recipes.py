"""The recipes of Megatron Bridge, as configurations that can be judged without its data, its hub or a GPU.

Bridge's own code runs: its recipes, its conversion of a Hugging Face configuration, its validation. What it downloads
and what only its data sets need is replaced. The configuration of a model is that of its class in ``transformers``
with the published numbers of layers, heads and experts, which decide whether a layout is possible.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

NOTE = """Bridge's own code makes the configuration of each recipe. That of a model at the hub is replaced by that of
its class in `transformers` with the published numbers of layers, heads and experts.
"""
FAMILIES = ("llama", "qwen", "deepseek", "gpt_oss", "nemotronh", "glm", "glm_moe_dsa", "kimi")
_ABSENT = (  # packages of data sets and of models of images
    "datasets",
    "modelopt",
    "megatron.energon",
    "megatron.bridge.diffusion",
    "megatron.bridge.recipes.flux",
    "megatron.bridge.recipes.wan",
    "megatron.bridge.perf_recipes.wan",
)


def _sizes(kind: str, layers: int, heads: int, key_heads: int, **more: Any) -> dict[str, Any]:
    """Return the sizes of a model that decide which layouts are possible."""
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        **more,
    }


def _hybrid(layers: str, *, heads: int = 32, key_heads: int = 8, **more: Any) -> dict[str, Any]:
    """Return the sizes of a Nemotron hybrid with a pattern of layers, as Megatron writes it."""
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    blocks = [kinds[layer] for layer in layers]
    return {
        "model_type": "nemotron_h",
        "layers_block_type": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        **more,
    }


MODELS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-2-7b-hf": _sizes("llama", 32, 32, 32),
    "meta-llama/Llama-3.2-1B": _sizes("llama", 16, 32, 8, hidden_size=2048),
    "meta-llama/Llama-3.2-3B": _sizes("llama", 28, 24, 8, hidden_size=3072),
    "meta-llama/Meta-Llama-3-8B": _sizes("llama", 32, 32, 8),
    "meta-llama/Meta-Llama-3-70B": _sizes("llama", 80, 64, 8, hidden_size=8192),
    "meta-llama/Meta-Llama-3.1-8B": _sizes("llama", 32, 32, 8),
    "meta-llama/Meta-Llama-3.1-70B": _sizes("llama", 80, 64, 8, hidden_size=8192),
    "meta-llama/Meta-Llama-3.1-405B": _sizes("llama", 126, 128, 8, hidden_size=16384),
    "Qwen/Qwen3-0.6B": _sizes("qwen3", 28, 16, 8),
    "Qwen/Qwen3-1.7B": _sizes("qwen3", 28, 16, 8),
    "Qwen/Qwen3-4B": _sizes("qwen3", 36, 32, 8),
    "Qwen/Qwen3-8B": _sizes("qwen3", 36, 32, 8),
    "Qwen/Qwen3-14B": _sizes("qwen3", 40, 40, 8),
    "Qwen/Qwen3-32B": _sizes("qwen3", 64, 64, 8),
    "Qwen/Qwen3-30B-A3B": _sizes("qwen3_moe", 48, 32, 4, num_experts=128),
    "Qwen/Qwen3-235B-A22B": _sizes("qwen3_moe", 94, 64, 4, num_experts=128),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _sizes("qwen3_next", 48, 16, 2, num_experts=512),
    "deepseek-ai/DeepSeek-V2": _sizes("deepseek_v2", 60, 128, 128, n_routed_experts=160, num_experts_per_tok=6),
    "deepseek-ai/DeepSeek-V2-Lite": _sizes(
        "deepseek_v2", 27, 16, 16, q_lora_rank=None, n_routed_experts=64, num_experts_per_tok=6
    ),
    "deepseek-ai/DeepSeek-V3": _sizes("deepseek_v3", 61, 128, 128, num_nextn_predict_layers=1),
    "moonshotai/Kimi-K2-Instruct": _sizes(
        "deepseek_v3", 61, 64, 64, n_routed_experts=384, n_group=1, topk_group=1, num_nextn_predict_layers=0
    ),
    "openai/gpt-oss-20b": _sizes("gpt_oss", 24, 64, 8, num_local_experts=32),
    "openai/gpt-oss-120b": _sizes("gpt_oss", 36, 64, 8, num_local_experts=128),
    "zai-org/GLM-4.5": _sizes("glm4_moe", 92, 96, 8, n_routed_experts=160, num_nextn_predict_layers=1),
    "zai-org/GLM-4.5-Air": _sizes("glm4_moe", 46, 96, 8, n_routed_experts=128, num_nextn_predict_layers=1),
    "zai-org/GLM-5.1": {"model_type": "glm_moe_dsa", "indexer_rope_interleave": True},
    "zai-org/GLM-5.2": {"model_type": "glm_moe_dsa", "indexer_rope_interleave": True},
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _hybrid(
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", key_heads=2, n_routed_experts=128
    ),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": _hybrid(
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
        key_heads=2, n_routed_experts=512, moe_latent_size=1024, num_nextn_predict_layers=1,
    ),
}  # fmt: skip
"""Name of a model at the hub → fields of its configuration."""


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports packages that are not here as modules of which every name is a mock."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not any(f"{name}.".startswith(f"{absent}.") for absent in _ABSENT):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module: Any = MagicMock(name=spec.name, __path__=[], __file__=None, __all__=[])
        module.__name__, module.__spec__ = spec.name, spec
        return module  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None: ...


def enter(folder: Path) -> None:
    """Make ``megatron.bridge`` importable from a folder: an unpacked wheel, or ``src`` of a checkout."""
    import megatron

    sys.meta_path.insert(0, _Absent())
    sys.modules.pop("transformer_engine.pytorch.optimizers", None)  # hidden where there is no GPU
    megatron.__path__.append(str(folder / "megatron"))
    auto_bridge = importlib.import_module("megatron.bridge.models.conversion.auto_bridge")
    auto_bridge.safe_load_config_with_retry = _configuration  # type: ignore[attr-defined]


def _configuration(name: str, **_: Any) -> Any:
    """Return the configuration of a model at the hub. Raises LookupError if its sizes are not known here."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if name not in MODELS:
        raise LookupError(f"the sizes of {name} are not known")
    fields = dict(MODELS[name])
    kind = fields.pop("model_type")
    config = AutoConfig.for_model(kind, **fields)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    return config


def recipes() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield name and function of each recipe for pretraining. A recipe is named by its folder, family and function."""
    for folder in ("perf_recipes", "recipes"):
        importlib.import_module(f"megatron.bridge.{folder}")
        for family in FAMILIES:
            if importlib.util.find_spec(f"megatron.bridge.{folder}.{family}") is None:
                continue
            inside = importlib.import_module(f"megatron.bridge.{folder}.{family}")
            names = [inside.__name__, *(m.name for m in pkgutil.walk_packages(inside.__path__, f"{inside.__name__}."))]
            for module in map(importlib.import_module, names):
                for name, recipe in inspect.getmembers(module, inspect.isfunction):
                    is_recipe = recipe.__module__ == module.__name__ and not inspect.signature(recipe).parameters
                    if is_recipe and "_pretrain_" in name and not name.startswith("_"):
                        yield f"{folder}/{family}/{name}", recipe


def finished(recipe: Callable[[], Any], change: Callable[[Any], None]) -> Any:
    """Return the configuration of a recipe as Bridge's ``pretrain`` completes it. Spoils the environment.

    Args:
        recipe: makes the configuration.
        change: called with the configuration before it is completed.
    """
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # each recipe brings its own
    config = recipe()
    model = config.model
    config.dataset.path_to_cache = "."
    model.vocab_size = model.vocab_size or 131072  # else of the tokenizer, which is not read
    inner = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
    named = re.search(r"_(\d+)gpu", recipe.__name__)
    os.environ["WORLD_SIZE"] = str(named[1] if named else inner * (model.expert_model_parallel_size or 1))
    change(config)
    importlib.import_module("megatron.bridge.training.config").runtime_config_update(config)
    return config
