"""What a script's call of pretrain is taken for, and what is said where it lacks something."""

from __future__ import annotations

import argparse
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training import global_vars

from snip_megatron.errors import SnipError
from snip_megatron.megatron.attachment import run_attached
from snip_megatron.megatron.compat.pretraining import bound_call, hooked_model
from snip_megatron.megatron.model_linears import check_shapes, linear_names
from snip_megatron.megatron.startup import Startup
from snip_megatron.precision import LinearId

STARTUP = Startup(on_cpu=True, disabled=frozenset())
ARGS = argparse.Namespace(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=4,
    group_query_attention=False,
    num_query_groups=None,
    kv_channels=16,
    swiglu=False,
    num_experts=None,
    pipeline_model_parallel_size=1,
    virtual_pipeline_model_parallel_size=None,
    pipeline_model_parallel_layout=None,
    decoder_first_pipeline_num_layers=None,
    decoder_last_pipeline_num_layers=None,
    account_for_embedding_in_pipeline_split=False,
    account_for_loss_in_pipeline_split=False,
)
SHAPES = ((192, 64), (64, 64), (128, 64), (64, 128))


def call(**named: Any) -> inspect.BoundArguments:
    return bound_call((SimpleNamespace(model=None),), {"train_valid_test_dataset_provider": 1, "model_type": 2} | named)


def test_a_script_that_did_not_add_the_arguments_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", argparse.Namespace(yaml_cfg=None))
    with pytest.raises(SnipError, match="extra_args_provider=snip_arguments"):
        run_attached(lambda *a, **k: None, (SimpleNamespace(), 1, 2, 3), {}, STARTUP)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", argparse.Namespace(yaml_cfg="run.yaml"))
    with pytest.raises(SnipError, match="--yaml-cfg is not supported"):
        run_attached(lambda *a, **k: None, (SimpleNamespace(), 1, 2, 3), {}, STARTUP)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", None)
    with pytest.raises(SnipError, match="before the script parsed"):
        run_attached(lambda *a, **k: None, (SimpleNamespace(), 1, 2, 3), {}, STARTUP)


def test_wrong_arguments_of_pretrain_are_one_line() -> None:
    with pytest.raises(SnipError, match=r"Megatron's pretrain\(\) cannot be called like this: .*'colour'"):
        bound_call((1, 2, 3, 4), {"colour": "blue"})
    nothing = call(forward_step_func=3)
    with (
        pytest.raises(SnipError, match="neither a model configuration nor a model_provider"),
        hooked_model(nothing, on_cpu=False),
    ):
        pass


class Registry(list[Any]):
    def __init__(self, layers: int, shapes: tuple[tuple[int, int], ...] = SHAPES) -> None:
        names = linear_names(argparse.Namespace(**vars(ARGS) | {"num_layers": layers}))
        super().__init__(
            SimpleNamespace(name=name, id=LinearId.parse(name), n=n, k=k)
            for name, (n, k) in zip(names, shapes * layers, strict=True)
        )
        self.names = names


def test_a_model_of_other_sizes_than_the_arguments_is_refused() -> None:
    check_shapes(Registry(2), ARGS)  # type: ignore[arg-type]
    with pytest.raises(SnipError, match="the model has 12 decoder linears, and the arguments say 8"):
        check_shapes(Registry(3), ARGS)  # type: ignore[arg-type]
    wide = (SHAPES[0], SHAPES[1], (256, 64), (64, 256))
    with pytest.raises(SnipError, match=r"layers.0.mlp.linear_fc1 has the shape 256 x 64, and the arguments say 128"):
        check_shapes(Registry(2, wide), ARGS)  # type: ignore[arg-type]
