"""Triton's quantisation of ranges of a weight against torch's, byte by byte."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from snip_megatron.precision import Format
from snip_megatron.quantization import packed, ranges
from snip_megatron.quantization.reference import quantize

from .interpreter import Quantizers, matrix


@pytest.fixture(scope="module")
def quantizers(interpreter: ProcessPoolExecutor) -> Quantizers:
    return Quantizers(interpreter)


@pytest.mark.parametrize("fmt", ranges.FORMATS)
@pytest.mark.parametrize(
    ("shape", "begin", "end"),
    [
        ((130, 200), 0, 26000),
        ((130, 200), 127 * 200 + 150, 128 * 200 + 3),  # two rows of tiles, an odd number of elements
        ((260, 1100), 200 * 1100 + 7, 259 * 1100),
        ((3, 5), 4, 5),
    ],
)
def test_bits_are_the_references(
    quantizers: Quantizers, fmt: Format, shape: tuple[int, int], begin: int, end: int
) -> None:
    """Rows and columns of all sizes; a NaN in a tile."""
    w = matrix(*shape)
    if shape[1] == 1100:
        w[210, 300] = torch.nan
    x = w.flatten()[begin:end]
    amax = ranges.range_amax(x, begin, shape, fmt)
    found = quantizers.call("range_amax", x, begin, shape, fmt)
    torch.testing.assert_close(found, amax, rtol=0, atol=0, equal_nan=True)
    scale = ranges.scales(amax, fmt)
    codes = ranges.encode_range(x, begin, shape, fmt, scale)
    found = quantizers.call("encode_range", x, begin, shape, fmt, scale)
    if not scale.isnan().any():
        assert torch.equal(found, codes)
        return
    whole = scale.expand(ranges.tile_counts(shape, fmt)).repeat_interleave(128, 0).repeat_interleave(128, 1)
    known = whole[: shape[0], : shape[1]].flatten()[begin:end].isfinite() if scale.numel() > 1 else torch.tensor(False)
    one, other = (ranges._unpacked(c)[: len(x)] if fmt is Format.FP4 else c for c in (found, codes))
    assert torch.equal(one[known], other[known])


@pytest.mark.parametrize("fmt", ranges.FORMATS)
@pytest.mark.parametrize("shape", [(130, 200), (256, 128), (3, 65)])
@pytest.mark.parametrize("transposed", [False, True])
def test_operands_are_the_references(
    quantizers: Quantizers, fmt: Format, shape: tuple[int, int], transposed: bool
) -> None:
    made = quantize(matrix(*shape), fmt, block=True)
    weight = ranges.QuantizedWeight(made.values.to(torch.float8_e4m3fn), made.scale)
    expected = packed.opened_weight(weight, fmt, transposed=transposed)
    found = quantizers.call("opened_weight", made.values, made.scale, fmt, transposed)
    assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(found.scale, expected.scale)
    assert (found.scaling, found.depth) == (expected.scaling, expected.depth)
