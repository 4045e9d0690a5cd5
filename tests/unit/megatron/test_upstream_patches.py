"""Diffs for Megatron's own repository: without each of them Megatron fails, with it not."""

import importlib.util
import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from installed import copy_installed, installed_megatron
from megatron.core.transformer import multi_token_prediction

PATCHES = Path(__file__).parents[3] / "patches" / "upstream"


def loaded(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("megatron.core.tensor_parallel.inference_layers", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(
    not hasattr(multi_token_prediction, "is_inference_column_parallel_linear"), reason="Megatron 0.19 does not ask"
)
@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="fails without it alone")
def test_token_prediction_without_transformer_engine(tmp_path: Path) -> None:
    name = "megatron/core/tensor_parallel/inference_layers.py"
    with pytest.raises(TypeError):
        loaded(installed_megatron().parent / name).is_inference_column_parallel_linear(None)
    copy_installed(tmp_path, only=name)
    command = ["git", "apply", "--unidiff-zero", str(PATCHES / "mtp-without-transformer-engine.patch")]
    subprocess.run(
        command, cwd=tmp_path, check=True, env=os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    )
    assert loaded(tmp_path / name).is_inference_column_parallel_linear(None) is False
