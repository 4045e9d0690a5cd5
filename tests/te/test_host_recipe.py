"""The emulation of Megatron's own recipes against Transformer Engine's reference quantisers and update of scales."""

import pytest
import torch

pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)
pytest.importorskip("transformer_engine.pytorch.custom_recipes", reason="needs Transformer Engine 2.19 or later")

from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.custom_recipes.reference_current_scaling import CurrentScalingQuantizerRef
from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef, cast_from_fp4x2
from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats
from transformer_engine.pytorch.quantization import _amax_and_scale_update

from snip_megatron.numerics.products.host_recipe import DelayedScale, HostRecipe


def matrix(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(128, 256, generator=generator) * torch.randn(128, 1, generator=generator).exp()
    return x.bfloat16()


@pytest.mark.parametrize("operand", ["x", "g"])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_tensorwise_is_transformer_engine_s_bit_for_bit(operand: str, power_of_two: bool) -> None:
    x, dtype = matrix(), torch.float8_e5m2 if operand == "g" else torch.float8_e4m3fn
    theirs = CurrentScalingQuantizerRef(
        dtype=dtype, rowwise=True, columnwise=True, pow_2_scales=power_of_two, eps=0.0
    ).quantize(x)
    recipe = HostRecipe("tensorwise", hybrid=True, power_of_two=power_of_two)
    for axis in (0, 1):
        ours = recipe.quantize(x, operand, axis)
        assert torch.equal(ours.values, theirs.data.bfloat16())
        assert torch.equal(ours.scale, theirs.scale)


@pytest.mark.parametrize("operand", ["x", "w"])
def test_nvfp4_is_transformer_engine_s_bit_for_bit(operand: str) -> None:
    x, tile = matrix(1), (16, 16) if operand == "w" else (1, 16)
    theirs = NVFP4QuantizerRef(dtype=Fp4Formats.E2M1, quant_tile_shape=tile, with_rht=operand == "x").quantize(x)
    for axis, values, scale in ((1, theirs.data, theirs.scale), (0, theirs.data_t, theirs.scale_t)):
        numbers = cast_from_fp4x2(values, torch.float32)
        exact = numbers * scale.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
        ours = HostRecipe("nvfp4").quantize(x, operand, axis)
        assert torch.equal(ours.values.float(), exact if axis else exact.t())


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_delayed_scales_follow_transformer_engine_s(algorithm: str) -> None:
    recipe = DelayedScaling(margin=1, amax_history_len=4, amax_compute_algo=algorithm)
    history, scale = torch.tensor([0.0, 5.0, 0.0, 3.0]), torch.tensor(2.0)
    theirs, their_scale = history.clone()[:, None], scale.clone()[None]
    ours = DelayedScale(448.0 / 2, history, scale, algorithm == "most_recent")
    for microbatch, amax in enumerate((1.0, 4.0, 0.0, float("nan"), 2.5, 1e-39, 0.5)):
        assert float(ours.of(microbatch, torch.tensor([[amax, 0.0]]))) == float(their_scale)
        theirs[0, 0] = 0.0 if amax != amax else amax  # its kernels leave NaN out
        _amax_and_scale_update(theirs, their_scale, 448.0, recipe)
