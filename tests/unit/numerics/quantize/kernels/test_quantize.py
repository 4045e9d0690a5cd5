"""The Triton kernels against the torch reference, bit for bit: interpreted on a CPU, compiled where a GPU is found."""

from functools import partial
from typing import Any

import pytest
import torch

from snip_megatron.numerics.quantize import operands
from snip_megatron.numerics.quantize.device_keys import DeviceKeys, LinearIdentity, advance
from snip_megatron.numerics.quantize.kernels import quantize, swiglu
from snip_megatron.numerics.quantize.kernels.launch import list_launches
from snip_megatron.numerics.quantize.operands import CachedPair, Operand, OperandPair, OperandSpec
from snip_megatron.precision import Format
from snip_megatron.precision.errors import SnipError

from ..specs import keys_of_a_step, spec
from ..specs import matrix as seeded_matrix
from .interpreter import Quantizers, matrix

BF16 = torch.bfloat16


def assert_same(actual: Operand | None, expected: Operand | None, *, drawn: bool = False) -> None:
    """``drawn``: a draw may decide otherwise where a quotient is rounded otherwise."""
    if expected is None:
        assert actual is None
        return
    assert (actual.scaling, actual.depth) == (expected.scaling, expected.depth)
    assert actual.scale.stride() == expected.scale.stride()
    torch.testing.assert_close(actual.scale, expected.scale, rtol=0, atol=0, equal_nan=True)
    assert actual.values.shape == expected.values.shape
    numbers = ~expected.values.float().isnan()
    assert torch.equal(actual.values.float().isnan()[..., : actual.depth], ~numbers[..., : actual.depth])
    differing = (actual.values.view(torch.uint8) != expected.values.view(torch.uint8)) & numbers
    assert int(differing.sum()) <= (max(1, differing.numel() // 1000) if drawn else 0)


def assert_operands(actual: OperandPair, expected: OperandPair, drawn: tuple[bool, bool] = (False, False)) -> None:
    for side, reference, random in zip(actual, expected, drawn, strict=True):
        assert_same(side, reference, drawn=random)


def check(quantizers: Quantizers, x: torch.Tensor, how: OperandSpec, drawn: tuple[bool, bool] = (False, False)) -> None:
    assert_operands(quantizers.call("quantize_operands", x, how), operands.quantize_operands(x, how), drawn)


def check_tiles(quantizers: Quantizers, x: torch.Tensor, row: str | None, col: str | None, **options: object) -> None:
    check(quantizers, x, spec(row, col, **options), drawn=("row_seed" in options, "col_seed" in options))


@pytest.mark.parametrize("formats", [("fp8", "fp4"), ("fp4", "fp8"), ("fp8", None), (None, "fp8")])
def test_tiles_with_tails(quantizers: Quantizers, formats: tuple[str | None, str | None]) -> None:
    for shape in ((140, 140), (2, 2), (5, 258)):
        check_tiles(quantizers, matrix(*shape), *formats)


@pytest.mark.parametrize(("rows", "cols", "dtype"), [(1, 512, BF16), (4, 257, BF16), (4, 512, torch.float16)])
def test_torch_quantises_matrices_that_kernels_do_not_read(rows: int, cols: int, dtype: torch.dtype) -> None:
    """ptxas miscompiles a single row (``reads_pairs``). On a GPU: test_wgrad_reads_nothing_beside_its_operands."""
    x = torch.zeros(rows, cols, dtype=dtype)
    for fmt, weight in ((Format.FP8, False), (Format.FP8, True), (Format.FP8_TENSOR, False)):
        with list_launches() as listing:
            quantize.quantize_operands(x, OperandSpec(fmt, fmt, weight=weight))
        assert not listing.kernels
    assert not swiglu.fits(x)
    assert swiglu.fits(torch.zeros(2, 512, dtype=torch.bfloat16))


def test_strided_and_transposed_input(quantizers: Quantizers) -> None:
    x = matrix(130, 150)
    check_tiles(quantizers, x[:, 10:142], "fp8", "fp4")
    check_tiles(quantizers, x.t(), "fp8", "fp4")


def test_stochastic_rounding_draws_the_reference_bits(quantizers: Quantizers) -> None:
    x = matrix(130, 140)
    check_tiles(quantizers, x, "fp4", "fp4", row_seed=2**64 - 1, col_seed=5, first_row=2**31 - 200)
    ids = torch.randint(0, 2**31, (140,), generator=torch.Generator().manual_seed(0))
    check_tiles(quantizers, x, "fp4", "fp8", row_seed=2**63, cols=ids)


def test_tiles_of_subnormal_scales(quantizers: Quantizers) -> None:
    """Rounded scales of few bits: the largest number may exceed the format; from amax 1e-37 down to bf16's smallest."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-37, -39.5, 128, dtype=torch.float64)
    signs = 1 - 2 * torch.randint(0, 2, (128, 128), generator=generator).double()
    x = (sizes[:, None] * torch.rand(128, 128, generator=generator).double().clamp(min=0.9) * signs).bfloat16()
    for seeds in ({}, {"row_seed": 3, "col_seed": 4}):
        check_tiles(quantizers, x, "fp4", "fp8", **seeds)
        check_tiles(quantizers, x.t().contiguous(), "fp8", "fp4", **seeds)
    result, _ = operands.quantize_operands(x, spec("fp4", row_seed=3))
    assert result.values.float().abs().max() == 6


@pytest.mark.parametrize("formats", [("fp8", "fp8"), ("fp4", "fp8"), (None, "fp4"), ("fp8", None)])
def test_weight_blocks(quantizers: Quantizers, formats: tuple[str | None, str | None]) -> None:
    w = matrix(140, 300)
    w[128:, :128] = 0
    check(quantizers, w, spec(*formats, weight=True))


@pytest.mark.parametrize("amax", [None, torch.tensor(3.0)])
def test_tensor_scaling(quantizers: Quantizers, amax: torch.Tensor | None) -> None:
    x = matrix(140, 300)
    x[-1, -1] = -1e6  # more than the maxima of all other parts
    check(quantizers, x, spec("fp8_tensor", "fp8_tensor", amax=amax))
    check(quantizers, x, spec("fp8_tensor", "fp8", amax=amax))


def test_maxima_of_more_parts_than_programs(quantizers: Quantizers) -> None:
    x = torch.randn(1, 128 * 516, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    expected = x.float().abs().view(516, 128).amax(1)
    expected[:4] = torch.maximum(expected[:4], expected[512:])
    actual = quantizers.call("largest_magnitudes", x)
    assert torch.equal(actual.view(torch.float32), expected[:512])


def test_nan_and_inf_stay_in_their_tile(quantizers: Quantizers) -> None:
    x = matrix(140, 260)
    x[3, 130], x[100, 20] = float("nan"), -float("inf")
    check_tiles(quantizers, x, "fp8", "fp4", row_seed=1, col_seed=2)
    check_tiles(quantizers, x, "fp4", "fp8")
    check(quantizers, x, spec("fp8", "fp4", weight=True))
    assert quantizers.call("quantize_operands", x, spec("fp8_tensor"))[0].scale.isnan().all()


def test_every_quotient_of_bf16_numbers_rounds_as_ieee_division(quantizers: Quantizers) -> None:
    """All pairs of an amax mantissa and a number's mantissa, 1 to 2^-21 of its size: the quotient by reciprocal and
    residual is periodic in powers of two, so that these are all cases of 1×128 tiles that are not tiny."""
    mantissas = 128.0 + torch.arange(128)
    smaller = torch.cat([mantissas * 2.0**-shift for shift in range(21)])
    smaller = torch.cat([smaller, smaller[: -len(smaller) % 127]]).view(1, -1, 127)
    # 2·mantissa leads each tile of 127 numbers up to it in size
    amax = (2 * mantissas).view(128, 1, 1).expand(-1, smaller.shape[1], -1)
    x = torch.cat([amax, smaller.expand(128, -1, -1)], dim=2).flatten(1).to(torch.bfloat16)
    for fmt in ("fp8", "fp4"):
        check_tiles(quantizers, x, fmt, None)
        check_tiles(quantizers, x.t().contiguous(), None, fmt)


def test_scales_of_bf16_numbers_are_ieee_quotients(quantizers: Quantizers) -> None:
    """One number a tile: every mantissa, and every exponent whose quotient may be a subnormal FP32 number."""
    tiny = torch.arange(1, 28 << 7, dtype=torch.int16).view(torch.bfloat16)  # up to 2^-100
    for fmt in ("fp8", "fp4"):
        for numbers in (tiny, (1 + torch.arange(128) / 128).to(torch.bfloat16)):
            x = torch.stack([numbers, torch.zeros_like(numbers)], 1)
            result = quantizers.call("quantize_operands", x, spec(fmt))
            assert torch.equal(result[0].scale, operands.quantize_operands(x, spec(fmt))[0].scale)


@pytest.mark.parametrize("shape", [(0, 128), (128, 0)])
def test_empty_matrices(quantizers: Quantizers, shape: tuple[int, int]) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16)
    check_tiles(quantizers, x, "fp8", "fp4")
    check(quantizers, x, spec("fp8_tensor"))


def test_bad_input_is_one_clear_line(quantizers: Quantizers) -> None:
    x = torch.zeros(2, 128, dtype=torch.bfloat16)
    for arguments, message in ((x[0], "2-D"), (x.double(), "float64")):
        with pytest.raises(SnipError, match=message):
            quantizers.call("quantize_operands", arguments, spec("fp8"))


def test_weights_of_experts(quantizers: Quantizers) -> None:
    w = torch.stack([matrix(256, 256), matrix(256, 256) * 3])
    for formats in (("fp4", None), (None, "fp8"), ("fp8", "fp4")):
        how = spec(*formats, weight=True)
        expected, stale = (operands.quantize_group_blocks(each, how) for each in (w, w * 2))
        assert_operands(quantizers.call("quantize_group_blocks", w, how), expected)
    for current in (0, 1):
        cached = CachedPair(stale, torch.tensor([current], dtype=torch.int32))
        actual = quantizers.call("quantize_group_blocks", w, how, cached)
        assert_operands(actual, stale if current else expected)


KEYS = torch.tensor([[11, -7], [2**31 - 1, -(2**31)]], dtype=torch.int32)


def test_the_kernel_of_keys_gives_the_reference_s_words(quantizers: Quantizers) -> None:
    keys = DeviceKeys([LinearIdentity(5, 3, 2), LinearIdentity(2**48 + 9, 1, 0)], (1, 2), torch.device("cpu"))
    keys.start_step(2**63 + 17, 123_456)
    memory = keys._state, keys._counts, keys._identities, keys._words
    for place in (1, 0, 1):
        expected = tuple(tensor.clone() for tensor in memory)
        advance(*expected, place, (1, 2))
        actual = quantizers.call("advance", *(tensor.clone() for tensor in memory), place, (1, 2))
        for tensor, word, reference in zip(memory, actual[:4], expected, strict=True):
            assert torch.equal(word, reference)
            tensor.copy_(reference)
    assert keys._counts.tolist() == [1, 2]
    assert keys._words.any()


def test_tiles_with_keys_from_memory(quantizers: Quantizers) -> None:
    """They equal tiles whose seeds are arguments."""
    formats = ("fp4", "fp4")
    x, cols = seeded_matrix(128, 192), torch.arange(192) * 2
    seeds, words = keys_of_a_step()

    def tiles(keys: Any) -> OperandPair:
        how = spec(*formats, row_seed=keys[0], col_seed=keys[1], cols=cols)
        return quantizers.call("quantize_operands", x, how)  # type: ignore[no-any-return]

    expected = tiles(seeds)
    assert_operands(tiles(words), expected)
    assert not torch.equal(*(each[0].values.view(torch.uint8) for each in (tiles(KEYS), expected)))


@pytest.mark.parametrize("formats", [("fp8", "fp4"), ("fp8_tensor", "fp8_tensor"), ("fp8", None)])
def test_a_kept_weight(quantizers: Quantizers, formats: tuple[str, str | None]) -> None:
    """It is written anew unless it is current. If it is, it is untouched whatever the weight."""
    how = spec(*formats, weight=True)
    for function in (partial(quantizers.call, "quantize_operands"), operands.quantize_operands):
        first, second = (function(seeded_matrix(160, 128, seed), how) for seed in (0, 1))
        for current in (0, 1):
            flag = torch.tensor([current], dtype=torch.int32)
            pair = function(seeded_matrix(160, 128), how)
            if formats[0] == "fp8_tensor":  # both have one scale, of which the interpreter's process makes two
                pair = pair[0], pair[1]._replace(scale=pair[0].scale)
            result = function(seeded_matrix(160, 128, seed=1), how, CachedPair(pair, flag))
            if formats[0] == "fp8_tensor":
                result = result[0], result[1]._replace(scale=result[0].scale)
            assert_operands(result, first if current else second)
