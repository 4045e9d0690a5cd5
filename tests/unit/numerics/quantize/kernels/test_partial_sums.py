"""Partial sums of gradients, by Triton against torch, byte by byte."""

import pytest
import torch

from snip_megatron.numerics.quantize import partial_sums

from .interpreter import Quantizers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 2, 200), (2, 2, 2048 + 130)])
def test_bits_are_the_references(quantizers: Quantizers, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Sizes from subnormal tiles to large ones, zero tiles, and every rank as the one that adds."""
    ranks, rows, cols = shape
    generator = torch.Generator().manual_seed(cols)
    sizes = torch.tensor([1.0, 1e-39, 3e-5, 1e30])[torch.randint(4, (ranks, rows, 1), generator=generator)]
    x = (torch.randn(shape, generator=generator) * sizes).to(dtype)
    x[0, 0], x[-1, -1, -1] = 0.0, torch.nan
    packed = [partial_sums.pack_partial(each) for each in x]
    for each, expected in zip(x, packed, strict=True):
        actual = quantizers.call("pack_partial", each)
        torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=0, equal_nan=True)
        finite = expected[1].isfinite().repeat_interleave(128, 1)[:, :cols]
        assert torch.equal(actual[0][finite], expected[0][finite])
    elements, scales = (torch.stack(same) for same in zip(*packed, strict=True))
    for rank in range(ranks):
        arguments = (elements, scales, x[rank], rank)
        actual, expected = quantizers.call("add_partials", *arguments), partial_sums.add_partials(*arguments)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_rows_of_a_wider_matrix(quantizers: Quantizers) -> None:
    """The part of a rank may be some columns of a matrix."""
    x = torch.randn(4, 384, generator=torch.Generator().manual_seed(3)).bfloat16()
    elements, scales = (t.unsqueeze(0).repeat(2, 1, 1) for t in partial_sums.pack_partial(x[2:, :128]))
    columns = x[:2, 128:256]
    result = quantizers.call("add_partials", elements, scales, columns, 1)
    assert torch.equal(result, partial_sums.add_partials(elements, scales, columns, 1))
