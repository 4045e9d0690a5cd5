"""A weight that is quantised range by range has the bits of one that is quantised whole, wherever ranges cut tiles."""

from __future__ import annotations

import pytest
import torch

from snip_megatron.precision import Format
from snip_megatron.quantization import fake_quantize
from snip_megatron.quantization.ranges import (
    FORMATS,
    QuantizedWeight,
    encode_range,
    joined,
    range_amax,
    range_bytes,
    scales,
    tile_counts,
)
from snip_megatron.quantization.reference import quantize

SHAPES = ((256, 384), (130, 200), (64, 96), (300, 129), (1, 7))


def bits(x: torch.Tensor) -> torch.Tensor:
    """As integers; every NaN as one."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


def by_ranges(w: torch.Tensor, fmt: Format, cuts: list[int]) -> QuantizedWeight:
    shape = (w.shape[0], w.shape[1])
    flat = w.flatten()
    ranges = [(a, b) for a, b in zip([0, *cuts], [*cuts, flat.numel()], strict=True) if a < b]
    parts = [range_amax(flat[a:b], a, shape, fmt) for a, b in ranges]
    assert {part.shape for part in parts} == {tile_counts(shape, fmt)}
    stacked = torch.stack(parts)
    amax = torch.where(stacked.isnan().any(0), torch.nan, stacked.nan_to_num(0.0, torch.inf).amax(0))
    scale = scales(amax, fmt)
    sent = [(encode_range(flat[a:b], a, shape, fmt, scale), b - a) for a, b in ranges]
    assert [part.numel() for part, _ in sent] == [range_bytes(count, fmt) for _, count in sent]
    return joined(sent, shape, fmt, scale)


def cuts_of(elements: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return sorted(torch.randint(0, elements + 1, (4,), generator=generator).tolist())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_of_the_whole_weight(fmt: Format, shape: tuple[int, int]) -> None:
    for seed in range(4):
        w = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16() * 0.02
        if seed == 1:
            w[0, 0] = 40.0  # an amax that only one range knows
        if seed == 2:
            w[: shape[0] // 2] = -0.0
        if seed == 3:
            w *= 2.0**-120
        found, whole = by_ranges(w, fmt, cuts_of(w.numel(), seed)), quantize(w, fmt, block=True)
        assert torch.equal(bits(found.elements.float()), bits(whole.values))
        assert torch.equal(bits(found.scale), bits(whole.scale))
        assert torch.equal(bits(found.dequantize()), bits(fake_quantize(w, fmt, block=True)))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_tile_with_a_nan_or_inf_becomes_nan_on_all_ranks(fmt: Format, bad: float) -> None:
    w = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    w[130, 5] = bad
    found, whole = by_ranges(w, fmt, [256 * 100 + 7]).dequantize(), fake_quantize(w, fmt, block=True)
    assert torch.equal(bits(found), bits(whole))
    assert found.isnan().sum() == (w.numel() if fmt is Format.FP8_TENSOR else 128 * 128)
