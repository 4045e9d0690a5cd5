"""Sums of quantised partial results: what is sent, what is added, in which order, and how far it is from the sum."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from snip_megatron.numerics.quantize.partial_sums import add_partials, pack_partial


def partials(ranks: int, rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of very different size; the ranks cancel in the first."""
    generator = torch.Generator().manual_seed(ranks * 1000 + cols)
    x = torch.randn(ranks, rows, cols, generator=generator) * torch.randn(rows, 1, generator=generator).mul(4).exp()
    x[-1, 0] = -x[0, 0]
    return x.to(dtype)


def exchanged(x: torch.Tensor, rank: int) -> torch.Tensor:
    """What a rank makes of the matrices [ranks, rows, cols] of all ranks, of which it wants all rows."""
    packed = [pack_partial(each) for each in x]
    elements, scales = (torch.stack(same) for same in zip(*packed, strict=True))
    return add_partials(elements, scales, x[rank], rank)


def by_numpy(x: torch.Tensor, rank: int) -> np.ndarray:
    """The same, tile by tile, in FP32 numbers of numpy and E4M3 numbers of ml_dtypes."""
    total: np.ndarray | None = None
    for place, each in enumerate(x.float().numpy()):
        term = each.copy()
        for start in range(0, each.shape[1], 128) if place != rank else ():
            tile = each[:, start : start + 128]
            amax = np.abs(tile).max(1, keepdims=True)
            scale = np.where(amax > 0, amax / np.float32(448), np.float32(1)).astype(np.float32)
            stored = np.clip(tile / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
            term[:, start : start + 128] = stored.astype(np.float32) * scale
        total = term if total is None else total + term
    assert total is not None
    return total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 5, 256), (3, 4, 200), (8, 2, 128)])
def test_bits_are_those_of_numpy(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x = partials(*shape, dtype)
    for rank in range(shape[0]):
        assert torch.equal(exchanged(x, rank), torch.from_numpy(by_numpy(x, rank)).to(dtype))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_in_its_tile(bad: float) -> None:
    x = partials(3, 4, 256)
    x[1, 2, 130] = bad
    clean = partials(3, 4, 256)
    for rank in range(3):
        found, expected = exchanged(x, rank), exchanged(clean, rank)
        assert not found[2, 130].isfinite()
        assert torch.equal(found[:, :128], expected[:, :128])
        assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])
