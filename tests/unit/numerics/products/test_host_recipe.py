"""Megatron's own recipes against quantisers in numpy and ml_dtypes, bit for bit, and their products."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from snip_megatron.numerics.products.host_recipe import DelayedScale, HostRecipe, RecipeGemms
from snip_megatron.numerics.quantize.operands import GradientKeys, OperandSpec
from snip_megatron.precision import Format, Gemm

TYPES = {
    "e4m3": (ml_dtypes.float8_e4m3fn, np.float32(448)),
    "e5m2": (ml_dtypes.float8_e5m2, np.float32(57344)),
    "e2m1": (ml_dtypes.float4_e2m1fn, np.float32(6)),
}
EIGHT_BIT = [
    HostRecipe("tensorwise", hybrid=True),
    HostRecipe("tensorwise", power_of_two=True),
    HostRecipe("blockwise"),
    HostRecipe("blockwise", hybrid=True, power_of_two=True),
    HostRecipe("mxfp8"),
    HostRecipe("mxfp8", hybrid=True),
]
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)


def matrix(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers whose rows and columns differ in size by orders of magnitude, a zero row, an outlier."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, cols)) * np.exp(rng.normal(0, 3, (rows, 1))) * np.exp(rng.normal(0, 1, cols))
    x[1], x[0, 0] = 0, 1e4
    return torch.from_numpy(x.astype(np.float32)).bfloat16()


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    """The nearest numbers of a type, saturated."""
    dtype, maximum = TYPES[kind]
    return np.clip(x, -maximum, maximum).astype(dtype).astype(np.float32)


def tiles(x: np.ndarray, tile: tuple[int, int]) -> Any:
    """The slices of the tiles."""
    for row in range(0, x.shape[0], tile[0]):
        for col in range(0, x.shape[1], tile[1]):
            yield np.s_[row : row + tile[0], col : col + tile[1]]


def tile_of(name: str, operand: str, axis: int, shape: tuple[int, int]) -> tuple[int, int]:
    if name == "tensorwise":
        return shape
    width = {"blockwise": 128, "mxfp8": 32, "nvfp4": 16}[name]
    if operand == "w" and name != "mxfp8":
        return width, width
    return (1, width) if axis else (width, 1)


def expected(recipe: HostRecipe, x: np.ndarray, operand: str, axis: int) -> np.ndarray:
    kind = "e5m2" if recipe.hybrid and operand == "g" else "e4m3"
    maximum, out = TYPES[kind][1], np.zeros_like(x)
    for at in tiles(x, tile_of(recipe.name, operand, axis, x.shape)):
        amax = np.abs(x[at]).max()
        if amax == 0:
            continue
        if recipe.name == "mxfp8":
            exponent = np.ceil(np.log2(np.float64(amax * (np.float32(1) / maximum))))
            scale = np.float32(2.0**-exponent)
        else:
            scale = maximum / amax
            if recipe.power_of_two:
                scale = np.float32(2.0 ** np.floor(np.log2(np.float64(scale))))
        out[at] = rounded(x[at] * scale, kind) * (np.float32(1) / scale)
    return out


@pytest.mark.parametrize("recipe", EIGHT_BIT, ids=repr)
@pytest.mark.parametrize("operand", ["x", "w", "g"])
@pytest.mark.parametrize("axis", [0, 1])
def test_eight_bits_are_those_of_numpy(recipe: HostRecipe, operand: str, axis: int) -> None:
    x = matrix(200, 300)
    ours = recipe.quantize(x, operand, axis).dequantize()
    np.testing.assert_array_equal(ours.numpy(), expected(recipe, x.float().numpy(), operand, axis))


@pytest.mark.parametrize("operand", ["x", "w", "g"])
@pytest.mark.parametrize("axis", [0, 1])
def test_four_bits_are_those_of_numpy(operand: str, axis: int) -> None:
    """Both factors of a scale are computed with rounded reciprocals, so that single tiles may differ by a step."""
    x = matrix(96, 64)
    values = x.float().numpy()
    if operand != "w" and axis == 0:
        groups = values.reshape(6, 16, 64)
        turned = np.einsum("ij,gjc->gic", hadamard(16).astype(np.float32) * 0.25, groups * SIGNS[:, None])
        values = turned.reshape(96, 64).astype(ml_dtypes.bfloat16).astype(np.float32)
    whole, out = np.abs(values).max() / np.float32(2688), np.zeros_like(values)
    for at in tiles(values, tile_of("nvfp4", operand, axis, values.shape)):
        scale = rounded(np.abs(values[at]).max() / 6 / whole, "e4m3")
        out[at] = 0 if scale == 0 else rounded(values[at] / (scale * whole), "e2m1") * (scale * whole)
    ours = HostRecipe("nvfp4").quantize(x, operand, axis).dequantize().numpy()
    assert np.isclose(ours, out, rtol=1e-5, atol=0).mean() > 0.998


def test_gradients_are_rounded_stochastically_without_bias() -> None:
    recipe, g = HostRecipe("nvfp4"), torch.full((64, 64), 0.3).bfloat16()
    g[:, 0] = 6.0  # the scale of every tile of 16 is 1, so that .3 lies between 0 and .5
    g[:, 16::16] = 6.0
    spec = OperandSpec(Format.NVFP4, None, keys=GradientKeys(dgrad=7, wgrad=8))
    (row, _), (again, _) = (RecipeGemms(recipe).quantize(g, spec) for _ in range(2))
    drawn = row.dequantize()
    assert torch.equal(drawn, again.dequantize())
    small = drawn[g == g[0, 1]]
    assert small.unique().numel() == 2
    assert float(small.mean()) == pytest.approx(0.3, rel=0.05)
    nearest = RecipeGemms(HostRecipe("nvfp4", stochastic=False)).quantize(g, spec)[0].dequantize()
    assert nearest[g == g[0, 1]].unique().numel() == 1


def test_infinities_saturate_and_nan_stays() -> None:
    x = torch.tensor([[1.0, float("inf"), float("nan"), -2.0]]).bfloat16()
    for name in ("tensorwise", "blockwise"):
        ours = HostRecipe(name).quantize(x, "x", 1).dequantize()
        torch.testing.assert_close(ours, torch.tensor([[1.0, 448.0, float("nan"), -2.0]]), equal_nan=True)


@pytest.mark.parametrize("recipe", [*EIGHT_BIT, HostRecipe("nvfp4", stochastic=False)], ids=repr)
def test_products_are_those_of_the_operands(recipe: HostRecipe) -> None:
    backend, fmt, dtype = RecipeGemms(recipe), recipe.format, torch.float32
    x, w, g = matrix(48, 160), matrix(96, 160, 1), matrix(48, 96, 2)
    keys = GradientKeys(1, 2)
    x_row, x_col = backend.quantize(x, OperandSpec(fmt, fmt))
    w_row, w_col = backend.quantize(w, OperandSpec(fmt, fmt, weight=True))
    g_row, g_col = backend.quantize(g, OperandSpec(fmt, fmt, keys=keys))
    numbers = {
        (name, axis): recipe.quantize(t, name, axis).dequantize().double()
        for name, t in (("x", x), ("w", w), ("g", g))
        for axis in (0, 1)
    }
    out = torch.ones(96, 160)
    for ours, product in (
        (backend.multiply(Gemm.FPROP, x_row, w_row, dtype), numbers["x", 1] @ numbers["w", 1].t()),
        (backend.multiply(Gemm.DGRAD, g_row, w_col, dtype), numbers["g", 1] @ numbers["w", 0]),
        (backend.multiply(Gemm.WGRAD, g_col, x_col, dtype, out), numbers["g", 0].t() @ numbers["x", 0] + 1),
    ):
        assert float((ours.double() - product).norm() / product.norm()) < 1e-5
    plain = backend.quantize(x, OperandSpec(Format.BF16, None))[0]
    assert plain.tensor is x


@pytest.mark.parametrize("most_recent", [False, True])
def test_a_delayed_scale_comes_from_the_microbatches_before(most_recent: bool) -> None:
    scale = DelayedScale(448.0, torch.tensor([0.0, 3.0, 8.0]), torch.tensor(56.0), most_recent)
    amaxes = [2.0, 7.0, 0.0, float("inf"), 1.0, 1.0]
    # The history holds two earlier amaxes and the latest one: max(3, 8, 2), max(8, 2, 7), max(2, 7, 0), …
    maxima = [2.0, 7.0, 7.0, 7.0, 1.0] if most_recent else [8.0, 8.0, 7.0, 7.0, 7.0]
    scales = [float(scale.of(m, torch.tensor([[-amax, 0.5 * min(amax, 1)]]))) for m, amax in enumerate(amaxes)]
    assert scales == [56.0] + [448.0 / amax for amax in maxima]
    assert float(scale.of(1, torch.ones(1, 1))) == scales[1]  # a recomputed forward, or wgrad


def test_experts_have_scales_of_their_own() -> None:
    calls = []

    def scale_of(expert: int, operand: str, x: torch.Tensor) -> torch.Tensor:
        calls.append((expert, operand, len(x)))
        return torch.tensor(2.0**expert)

    backend = RecipeGemms(HostRecipe("delayed", hybrid=True), scale_of)
    group = backend.grouped(64, 32, torch.bfloat16)
    fmt = Format.FP8_TENSOR
    rows, _ = group.quantize_rows(matrix(24, 32), [16, 0, 8], OperandSpec(fmt, fmt))
    weights, _ = group.quantize_weights([matrix(64, 32, e) for e in range(3)], OperandSpec(fmt, None, weight=True))
    assert calls == [(0, "x", 16), (1, "x", 0), (2, "x", 8), *((e, "w", 64) for e in range(3))]
    assert [float(each.scale) for each in rows] == [1.0, 0.5, 0.25]
    assert group.multiply(Gemm.FPROP, rows, weights, torch.bfloat16).shape == (24, 64)
