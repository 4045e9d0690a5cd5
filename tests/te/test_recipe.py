"""``--snip-gemm transformer_engine``: quantizers of real linears of Transformer Engine follow the map in force.

Their GEMMs need a GPU. What comes before them does not: here the stock forward ends once it has its quantizers.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)

import transformer_engine.pytorch as te
from te_models import dense
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from snip_megatron.megatron import convert_model
from snip_megatron.precision import Format, Gemm, PrecisionMap, option_id
from snip_megatron.precision.errors import SnipError
from snip_megatron.runtime.config import SnipConfig

pytestmark = [
    pytest.mark.usefixtures("model_parallel_of_one"),
    pytest.mark.skipif(not hasattr(te, "HybridQuantizer"), reason="needs Transformer Engine 2.19 or later"),
]
CLASSES = {
    Format.BF16: te.IdentityQuantizer,
    Format.FP8: te.Float8BlockQuantizer,
    Format.MXFP8: te.MXFP8Quantizer,
    Format.NVFP4: te.NVFP4Quantizer,
}
MIXED = (Format.FP8, Format.BF16, Format.MXFP8)


@pytest.fixture(autouse=True)
def forwards_end_at_quantizers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def forward(self: Any, x: torch.Tensor, **_: Any) -> torch.Tensor:
        self.init_fp8_metadata(num_gemms=1)
        return x

    monkeypatch.setattr(te.Linear, "forward", forward)
    monkeypatch.setattr(te.LayerNormLinear, "forward", forward)
    monkeypatch.setattr(FP8GlobalStateManager, "is_fp8_available", lambda: (True, ""))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    yield
    FP8GlobalStateManager.reset()


def quantizers(module: Any) -> dict[str, tuple[Any, Any]]:
    """Tensor → its quantizers of the rowwise and of the columnwise representation."""
    result = dict(zip(("input", "weight"), module.quantizers["scaling_fwd"], strict=False))
    result["grad_output"] = module.quantizers["scaling_bwd"][0]
    halves = ("rowwise_quantizer", "columnwise_quantizer")
    return {name: tuple(getattr(each, half, each) for half in halves) for name, each in result.items()}


def test_quantizers_are_those_of_the_map_and_of_the_next_one() -> None:
    chunk = dense()
    registry = convert_model([chunk], SnipConfig(enabled=True))
    registry.context.use_te_recipe = True
    module = chunk.decoder.layers[1].mlp.linear_fc2
    choices = {option_id(name, gemm): fmt for name in registry.names for gemm, fmt in zip(Gemm, MIXED, strict=True)}
    registry.adopt(PrecisionMap(choices))
    x = torch.zeros(32, 2, 128)
    module(x)
    fprop, dgrad, wgrad = (CLASSES[fmt] for fmt in MIXED)
    readers = {"input": (fprop, wgrad), "weight": (fprop, dgrad), "grad_output": (dgrad, wgrad)}
    assert {name: tuple(map(type, pair)) for name, pair in quantizers(module).items()} == readers
    assert not module.is_first_microbatch  # as in stock training
    assert module.get_extra_state().numel() == 0  # so that stock checkpoints and these are alike

    module._fp8_workspaces["weight"] = torch.zeros(1)  # the quantised weight of the earlier map
    before = module.quantizers["scaling_fwd"]
    module(x)
    assert module.quantizers["scaling_fwd"] is before
    assert module._fp8_workspaces
    registry.end_step()  # the optimizer changes weights
    module(x)
    assert not module._fp8_workspaces
    assert module.quantizers["scaling_fwd"] is before

    module._fp8_workspaces["weight"] = torch.zeros(1)
    registry.adopt(PrecisionMap.uniform(registry.names, Format.NVFP4))
    module(x)
    assert {type(each) for pair in quantizers(module).values() for each in pair} == {te.NVFP4Quantizer}
    assert not module._fp8_workspaces


def test_a_machine_without_the_cards_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = dense()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SnipError, match="--snip-gemm transformer_engine: needs a Hopper or Blackwell GPU"):
        convert_model([chunk], SnipConfig(enabled=True, gemm="transformer_engine"))
