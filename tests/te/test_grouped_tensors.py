"""All experts of a layer in one parameter of Megatron 0.20. Trainings: families of tests/gpu/test_families.py."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)

from megatron.core import dist_checkpointing
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from te_models import EXPERTS, SWIGLU, dense
from test_convert_experts import CONFIG
from torch import Tensor

from snip_megatron.megatron import convert_model

pytestmark = [
    pytest.mark.usefixtures("model_parallel_of_one"),
    pytest.mark.skipif(
        not hasattr(TransformerConfig, "moe_use_grouped_tensor"), reason="Megatron 0.19 has no grouped tensors"
    ),
]

SINGLE: dict[str, Any] = EXPERTS | SWIGLU | {
    "moe_use_grouped_tensor": True, "moe_single_grouped_weight": True, "params_dtype": torch.bfloat16
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)


def linears(chunk: GPTModel) -> tuple[Any, Any]:
    experts = chunk.decoder.layers[0].mlp.experts
    return experts.linear_fc1, experts.linear_fc2


def test_single_grouped_weights_stay_transformer_engine_s(capsys: pytest.CaptureFixture[str]) -> None:
    chunk = dense(**SINGLE)
    registry = convert_model([chunk], CONFIG)
    assert "mlp.experts.linear_fc1 of 2 layers stays bf16 (one parameter holds" in capsys.readouterr().out
    assert not any("experts" in name for name in registry.names)
    assert [type(linear).__name__[:2] for linear in linears(chunk)] == ["TE", "TE"]


def test_checkpoints_are_megatron_s_in_both_layouts() -> None:
    """A job with single grouped weights can go on under a map that quantises experts, and the other way round."""
    single, apart = dense(**SINGLE), dense(**(SINGLE | {"moe_single_grouped_weight": False}))
    convert_model([apart], CONFIG)
    for source, target in ((single, apart), (apart, single)):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.copy_(torch.randn(parameter.shape))
        target.load_state_dict(source.state_dict())
        for of_source, of_target in zip(linears(source), linears(target), strict=True):
            assert torch.equal(stacked(of_source), stacked(of_target))
    assert sharded(single) == sharded(apart)


def stacked(linear: Any) -> Tensor:
    return (
        linear.weight.detach()
        if linear.single_grouped_weight
        else torch.stack([getattr(linear, f"weight{e}").detach() for e in range(4)])
    )


def sharded(chunk: GPTModel) -> dict[str, Any]:
    """The part of each distributed checkpoint's tensor that this rank writes."""
    state = chunk.sharded_state_dict()
    return {
        name: (each.key, each.global_shape, each.global_offset, tuple(each.local_shape))
        for name, each in state.items()
        if isinstance(each, dist_checkpointing.ShardedTensor)
    }
