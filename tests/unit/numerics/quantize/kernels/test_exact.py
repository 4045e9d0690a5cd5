"""The kernels of bf16 emulation against the torch reference, bit for bit: interpreted, or on a GPU if there is one."""

from typing import Any

import pytest
import torch

from snip_megatron.numerics.products.grouped import DeviceRows, GroupRows, group_rows
from snip_megatron.numerics.products.grouped_hopper import add_wgrad
from snip_megatron.numerics.quantize import fake_quantize, operands
from snip_megatron.numerics.quantize.operands import CachedPair, ExactOperand, OperandPair, OperandSpec, RowMap
from snip_megatron.numerics.quantize.reference import Rotation
from snip_megatron.precision import Format

from ..specs import keys_of_a_step, spec
from .interpreter import Quantizers, matrix
from .test_quantize import assert_operands

FORMATS = ("nvfp4", "mxfp4", "mxfp8", "fp4", "fp8", "fp8_tensor", "nvfp4_46")


def assert_same(actual: OperandPair, expected: OperandPair, *, drawn: bool = False) -> None:
    """``drawn``: a draw may decide otherwise where a quotient is rounded otherwise."""
    for side, reference in zip(actual, expected, strict=True):
        if reference is None:
            assert side is None
            continue
        assert side.tile == reference.tile
        torch.testing.assert_close(side.scale, reference.scale, rtol=0, atol=0, equal_nan=True)
        finite = ~reference.dequantize().isnan()
        assert torch.equal(~side.dequantize().isnan(), finite)
        differing = (side.values.view(torch.int16) != reference.values.view(torch.int16)) & finite
        assert int(differing.sum()) <= (2 if drawn else 0)


def check(quantizers: Quantizers, x: torch.Tensor, row: str | None, col: str | None, **options: Any) -> None:
    how = spec(row, col, **options)
    assert_same(quantizers.call("quantize_exact", x, how), operands.quantize_exact(x, how), drawn=how.keys is not None)


@pytest.mark.parametrize(("fmt", "square"), [*((fmt, False) for fmt in FORMATS), ("nvfp4", True), ("fp8", True)])
def test_tails_and_what_is_not_finite(quantizers: Quantizers, fmt: str, square: bool) -> None:
    x = matrix(140, 150) if fmt in ("fp4", "fp8") else matrix(37, 270)
    check(quantizers, x, fmt, fmt, weight=square)
    x[3, 130], x[-4, 5] = float("nan"), float("-inf")
    check(quantizers, x, fmt, fmt, weight=square)


@pytest.mark.parametrize(("fmt", "dtype"), [("nvfp4", torch.float32), ("fp8", torch.float32), ("mxfp8", torch.float16)])
def test_other_dtypes(quantizers: Quantizers, fmt: str, dtype: torch.dtype) -> None:
    check(quantizers, matrix(40, 530, dtype), fmt, "mxfp4")


def test_numbers_of_mxfp8_below_those_of_bf16(quantizers: Quantizers) -> None:
    """FP32 matrices alone have them. Every multiple of 2^-136 that is no number of bf16 is rounded."""
    x = torch.arange(-240, 240).mul(2.0**-136).view(4, 120)
    check(quantizers, x, "mxfp8", "mxfp8")


def close_errors(rows: int, cols: int) -> torch.Tensor:
    """Tiles whose two squared errors are equal or nearly so, zero tiles, and tiles with the smallest scales."""
    generator = torch.Generator().manual_seed(rows + cols)
    x = torch.randint(-24, 25, (rows, cols), generator=generator).float()
    x[16:32] *= torch.rand(16, 1, generator=generator) * 2.0**-9
    x[32:, ::2] = 0.0
    x[0, :16] = 0.0
    x[1, 0] = 6 * 256.0
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_four_over_six_of_close_errors(quantizers: Quantizers, dtype: torch.dtype) -> None:
    """Integers decide where sums of FP32 numbers do not. Scales saturate if the amax is that of other numbers."""
    x = close_errors(48, 96).to(dtype)
    check(quantizers, x, "nvfp4_46", "nvfp4_46")
    for amax in (1e-30, 1e4):
        check(quantizers, x, "nvfp4_46", "nvfp4_46", amax=torch.tensor(amax).to(dtype))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "fp4"])
def test_stochastic_rounding(quantizers: Quantizers, fmt: str) -> None:
    x, cols = matrix(70, 300), torch.arange(300) * 3 + 1
    check(quantizers, x, fmt, fmt, row_seed=2**64 - 1, col_seed=5, cols=cols)
    check(quantizers, x, "fp8", fmt, row_seed=3, col_seed=5)


@pytest.mark.parametrize(("fmt", "size"), [("nvfp4", 1e-38), ("mxfp4", 1e-41), ("fp4", 1e-41)])
def test_subnormal_scales(quantizers: Quantizers, fmt: str, size: float) -> None:
    x = torch.randn(32, 160, generator=torch.Generator().manual_seed(0)) * size
    check(quantizers, x, fmt, fmt, row_seed=3, col_seed=5)
    check(quantizers, x.bfloat16(), fmt, fmt, row_seed=3, col_seed=5)
    check(quantizers, x, fmt, fmt)


def test_keys_from_memory(quantizers: Quantizers) -> None:
    x, (seeds, words) = matrix(40, 96), keys_of_a_step()
    result = quantizers.call("quantize_exact", x, spec("nvfp4", "mxfp4", row_seed=words[0], col_seed=words[1]))
    assert_same(result, operands.quantize_exact(x, spec("nvfp4", "mxfp4", row_seed=seeds[0], col_seed=seeds[1])))


@pytest.mark.parametrize(("row", "col"), [("nvfp4", None), (None, "nvfp4"), ("nvfp4", "mxfp8"), ("fp4", "nvfp4")])
def test_each_side_has_a_format_of_its_own(quantizers: Quantizers, row: str | None, col: str | None) -> None:
    x = matrix(50, 150)
    x[3, 20] = float("nan")
    check(quantizers, x, row, col)
    check(quantizers, x.t(), row, col)
    check(quantizers, x[:, 16:112], row, col, weight=True)


def test_the_amax_of_a_shard(quantizers: Quantizers) -> None:
    x, amax = matrix(30, 70), torch.tensor(7e4)
    check(quantizers, x, "nvfp4", "fp8_tensor", amax=amax)


@pytest.mark.parametrize(("fmt", "current"), [("nvfp4", 0), ("nvfp4", 1), ("fp4", 0)])
def test_kept_weights(quantizers: Quantizers, fmt: str, current: int) -> None:
    how = spec(fmt, fmt, weight=True)
    old = operands.quantize_exact(matrix(40, 70), how)
    flag = torch.tensor([current], dtype=torch.int32)
    cached = CachedPair(tuple(ExactOperand(s.values.clone(), None if s.scale is None else s.scale.clone(), s.tile)
                          for s in old if s is not None), flag)  # type: ignore[arg-type]  # fmt: skip
    new = matrix(40, 70) * 3
    result = quantizers.call("quantize_exact", new, how, cached)
    assert_same(result, old if current else operands.quantize_exact(new, how))


@pytest.mark.parametrize(("fmt", "rows"), [("nvfp4_hadamard", 37), ("mxfp4_hadamard", 64)])
def test_transformed_sides(quantizers: Quantizers, fmt: str, rows: int) -> None:
    """The col side is transformed, with signs from the host or from memory, and has whole groups of rows."""
    x = matrix(rows, 270)
    rotation = Rotation(0b1011_0000_1111_0101)
    check(quantizers, x, None, fmt, col_seed=5, rotation=rotation)
    check(quantizers, x, "nvfp4", fmt, row_seed=3, col_seed=5, rotation=rotation)
    check(quantizers, x, "mxfp8", fmt)
    on_device = Rotation(torch.tensor([rotation.signs], dtype=torch.int32))
    result = quantizers.call("quantize_exact", x, spec("nvfp4", fmt, col_seed=5, rotation=on_device))
    assert_same(result, operands.quantize_exact(x, spec("nvfp4", fmt, col_seed=5, rotation=rotation)))
    assert result[1].values.shape == (-(-rows // 16) * 16, 270)


def test_transformed_sides_of_what_is_not_finite(quantizers: Quantizers) -> None:
    fmt = "nvfp4_hadamard"
    x = matrix(40, 70, torch.float32)
    x[3, 20], x[-4, 5] = float("nan"), float("-inf")
    check(quantizers, x, "nvfp4", fmt, rotation=Rotation(77))
    amax = torch.tensor(7e4)
    check(quantizers, matrix(40, 70), "nvfp4", fmt, amax=amax, rotation=Rotation(77, amax * 3))


@pytest.mark.parametrize(("tiles", "dtype", "add"), [((1, 128), torch.float32, True), ((1, 1), torch.bfloat16, False)])
def test_the_tiled_product(quantizers: Quantizers, add: bool, tiles: tuple[int, int], dtype: torch.dtype) -> None:
    """It is that of float64, with strides of either orientation, tails everywhere and an output that is added to."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(300, 140, generator=generator).bfloat16().t()  # [140, 300]: a transposed gradient
    b = torch.randn(150, 300, generator=generator).bfloat16()
    scales = [
        torch.rand(-(-size // tile), 3, generator=generator) for size, tile in zip((140, 150), tiles, strict=True)
    ]
    out = torch.ones(140, 150, dtype=dtype)
    wide = [s.repeat_interleave(tile, 0)[:n].repeat_interleave(128, 1)[:, :300].double()
            for s, tile, n in zip(scales, tiles, (140, 150), strict=True)]  # fmt: skip
    expected = (a.double() * wide[0]) @ (b.double() * wide[1]).t() + (1.0 if add else 0.0)
    actual = quantizers.call("tiled_product", a, scales[0], tiles[0], b, scales[1], tiles[1], out, add=add)
    error = float((actual.double() - expected).norm() / expected.norm())
    assert error < (1e-6 if dtype is torch.float32 else 5e-3)  # the interpreter truncates to bf16


# -- experts ---------------------------------------------------------------------------------------
def rows_of(splits: tuple[int, ...], *, backwards: bool = False) -> GroupRows:
    return group_rows(splits, torch.device("cpu"), backwards=backwards)


@pytest.mark.parametrize(("splits", "k"), [((128, 0, 256), 128), ((3, 0, 65, 130), 128), ((1100, 0, 1020), 256)])
def test_wgrads_of_experts_are_added(quantizers: Quantizers, splits: tuple[int, ...], k: int) -> None:
    """Experts have few rows or many. An expert without rows keeps its gradient."""
    rows, out = rows_of(splits), torch.randn(len(splits), 128, k)
    g, x = (torch.randn(sum(splits), width).bfloat16() for width in (128, k))
    expected = out.clone()
    add_wgrad(g, x, rows.map.table, (True, True), expected)
    assert torch.equal(expected[1], out[1])
    for unpadded in ((True, False), (False, True), (False, False)):
        arguments = [t if apart else rows.pad(t) for t, apart in zip((g, x), unpadded, strict=True)]
        actual = quantizers.call("add_wgrad", *arguments, rows.map.table, unpadded, out.clone())
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-4)
        assert torch.equal(actual[1], out[1])


@pytest.mark.parametrize(("splits", "k"), [((3, 0, 65, 130), 128), ((1100, 0, 1020), 256)])
def test_wgrads_of_experts_in_tiles_are_added(quantizers: Quantizers, splits: tuple[int, ...], k: int) -> None:
    """The last rows, which belong to no expert, have no number."""
    device = DeviceRows(torch.tensor(splits), sum(splits), backwards=False)
    assert len(device.map.experts) > sum(-(-count // 128) * 128 for count in splits)
    sides, wide = [], []
    for width, fmt in ((256, Format.FP4), (k, Format.FP8)):
        matrix = torch.randn(sum(splits), width).bfloat16()
        _, col = quantizers.call("quantize_operands", matrix, OperandSpec(None, fmt), None, device.map)
        wide.append(fake_quantize(device.pad(matrix), fmt, axis=0).double())
        padding = device.map.experts == -1
        col.scale[:, padding[::128]] = torch.nan
        sides.append(col)
    out = torch.randn(len(splits), 256, k)
    expected = out.double()
    for *_, first, count, gradient in zip(device.map.table[0], device.map.table[2], expected, strict=True):
        left, right = (matrix[first:][:count] for matrix in wide)
        gradient += left.t() @ right
    assert torch.equal(expected[1], out[1].double())
    of_kernel = quantizers.call("add_wgrad", *sides, device.map.table, (False, False), out.clone())
    add_wgrad(*sides, device.map.table, (False, False), of_reference := out.clone())
    assert torch.equal(of_kernel[1], out[1])
    assert torch.equal(of_reference[1], out[1])
    torch.testing.assert_close(of_reference.double(), expected, rtol=1e-4, atol=2e-4)
    if quantizers.on_gpu:  # FP8 tensor cores add up the products of a tile in fewer bits than FP32 has
        assert float((of_kernel.double() - expected).norm() / expected.norm()) < 1e-3
    else:
        torch.testing.assert_close(of_kernel.double(), expected, rtol=1e-4, atol=2e-4)


def test_an_expert_s_wgrad_reads_no_other_expert_s_rows(quantizers: Quantizers) -> None:
    rows = rows_of((3, 70))
    g, x = (torch.randn(73, 128).bfloat16() for _ in range(2))
    x[3:] = torch.inf
    result = quantizers.call("add_wgrad", rows.pad(g), x, rows.map.table, (False, True), torch.zeros(2, 128, 128))
    torch.testing.assert_close(result[0], g[:3].float().t() @ x[:3].float(), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(("cols", "backwards"), [((640,), False), ((24,), True), ((), False)])
def test_rows_of_experts_are_padded_and_unpadded(
    quantizers: Quantizers, cols: tuple[int, ...], backwards: bool
) -> None:
    splits = (3, 0, 128, 130, 32)
    rows = rows_of(splits, backwards=backwards)
    x = torch.randn(sum(splits), *cols).bfloat16()
    padded = rows.pad(x)
    assert torch.equal(quantizers.call("pad", rows.map, x), padded)
    assert torch.equal(quantizers.call("unpad", rows.map, padded, len(x)), x)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("splits", [(3, 0, 128, 130, 32), (0, 0, 7), (1,) * 37, (0, 256)])
def test_the_device_finds_the_rows_of_experts(quantizers: Quantizers, splits: tuple[int, ...], backwards: bool) -> None:
    """The same rows as those that the host finds, and after them tiles of no expert."""
    expected, counts = rows_of(splits, backwards=backwards).map, torch.tensor(splits)
    rows = (sum(splits) + 127 * len(splits)) // 128 * 128
    for result in (
        RowMap.of_counts(counts, rows, backwards=backwards),
        quantizers.call("of_counts", counts, rows, backwards=backwards),
    ):
        assert torch.equal(result.table, expected.table)
        experts, padding = result.experts.split([len(expected.experts), rows - len(expected.experts)])
        assert torch.equal(experts, expected.experts)
        assert (padding == -1).all()


def test_tiles_of_no_expert_are_zero_and_no_rows_come_from_them(quantizers: Quantizers) -> None:
    counts, x = torch.tensor((3, 0, 130)), matrix(133, 256)
    rows = RowMap.of_counts(counts, 512, backwards=True)
    padded = quantizers.call("pad", rows, x)
    assert torch.equal(padded, rows.pad(x))
    assert not padded[384:].any()
    padded[384:] = torch.nan
    assert torch.equal(quantizers.call("unpad", rows, padded, len(x)), x)
    result = quantizers.call("quantize_operands", x, spec("fp8"), None, rows)
    assert_operands(result, operands.quantize_operands(rows.pad(x), spec("fp8")))


@pytest.mark.parametrize(
    ("fmt", "seed", "backwards"), [("fp8", None, False), ("fp4", None, True), ("fp4", 2**63 + 5, True)]
)
def test_padded_rows_are_quantised_without_a_copy(
    quantizers: Quantizers, fmt: str, seed: int | None, backwards: bool
) -> None:
    """Bit for bit what the quantiser makes of a padded copy, zero rows included."""
    rows, how = rows_of((3, 0, 128, 130, 1), backwards=backwards), spec(fmt, row_seed=seed)
    x = matrix(262, 256)
    result = quantizers.call("quantize_operands", x, how, None, rows.map)
    assert_operands(result, quantizers.call("quantize_operands", rows.pad(x), how))
    if seed is None:
        assert_operands(result, operands.quantize_operands(x, how, None, rows.map))
