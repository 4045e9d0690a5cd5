"""Quantised matrices as bytes: what is read back, and what the bytes mean to another library."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snip_megatron.precision import FOUR_BIT, Format
from snip_megatron.quantization import fake_quantize
from snip_megatron.quantization.formats import SPECS
from snip_megatron.quantization.wire import (
    WireMatrix,
    bytes_per_element,
    decode,
    encode,
    pack_fp4,
    unpack_fp4,
)

QUANTISED = [fmt for fmt in Format if fmt is not Format.BF16]
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def matrix(rows: int, cols: int, seed: int, *, harsh: bool = False) -> torch.Tensor:
    """Tiles of very different size, zero tiles and signed zeros; with ``harsh`` subnormals, NaN and Inf too."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(rows, 1, generator=generator).mul(6).exp() * torch.randn(cols, generator=generator).exp()
    x = torch.randn(rows, cols, generator=generator) * spread
    x[0, : cols // 2] = 0.0
    x[-1, -1] = -0.0
    if harsh:
        x[rows // 2] *= 1e-38
        x[rows // 3, 0] = math.nan
        x[0, -1] = math.inf
    return x


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """NaN where NaN is expected, elsewhere the same numbers. (The sign of a zero is that of nvfp4's zero scale.)"""
    known = ~expected.isnan()
    assert torch.equal(found.isnan(), ~known)
    assert torch.equal(found[known], expected[known])


# -- pairs of E2M1 numbers -------------------------------------------------------------------------------------------
def stored(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_codes_are_those_of_ml_dtypes() -> None:
    """Each pair of the sixteen numbers, as bytes in which the even column has the lower half."""
    low, high = np.meshgrid(np.arange(16, dtype=np.uint8), np.arange(16, dtype=np.uint8))
    pairs = np.stack([E2M1[low.ravel()], E2M1[high.ravel()]], axis=1)
    packed = pack_fp4(stored(pairs).reshape(16, 32))
    assert packed.flatten().tolist() == (low | high << 4).ravel().tolist()
    assert torch.equal(unpack_fp4(packed.unsqueeze(0)), stored(pairs).reshape(16, 32))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**16))
def test_packed_parts_lie_side_by_side(ranks: int, rows: int, pairs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = stored(E2M1[torch.randint(16, (ranks, rows, 2 * pairs), generator=generator).numpy()])
    packed = torch.stack([pack_fp4(part) for part in values])
    assert torch.equal(unpack_fp4(packed), torch.cat(list(values), 1))


# -- matrices --------------------------------------------------------------------------------------------------------
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(QUANTISED), st.integers(0, 1), st.integers(1, 200), st.integers(1, 300), st.integers(0, 2**16),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_what_is_read_back_is_what_was_quantised(
    fmt: Format, axis: int, rows: int, cols: int, seed: int, harsh: bool, stochastic: bool
) -> None:
    x = matrix(rows, cols, seed, harsh=harsh)
    options = {"rounding": "stochastic", "seed": seed, "offset": (3, 5)} if stochastic else {}
    found = decode(encode(x, fmt, axis, **options), fmt, axis, cols)
    assert found.shape == x.shape
    assert_same(found, fake_quantize(x, fmt, axis=axis, **options))


def joined(parts: list[WireMatrix]) -> WireMatrix:
    scales = None if parts[0].scales is None else torch.cat([part.scales for part in parts])
    return WireMatrix(torch.cat([part.elements for part in parts]), scales, parts[0].tensor_scale)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("fmt", QUANTISED)
def test_shards_of_whole_tiles_are_the_whole(fmt: Format, axis: int) -> None:
    """With the amax of the whole tensor and the rows' places, for stochastic rounding."""
    x = matrix(384, 144, 7)
    amax = x.abs().max()
    options = {"rounding": "stochastic", "seed": 9} if fmt in FOUR_BIT else {}
    parts = [
        encode(part, fmt, axis, tensor_amax=amax, **options, **({"offset": (128 * i, 0)} if options else {}))
        for i, part in enumerate(x.split(128))
    ]
    assert_same(decode(joined(parts), fmt, axis, 144), fake_quantize(x, fmt, axis=axis, **options))


@pytest.mark.parametrize("fmt", QUANTISED)
def test_bytes_are_counted(fmt: Format) -> None:
    found = encode(matrix(256, 512, 3), fmt, 0)
    size = found.elements.nbytes + (0 if found.scales is None else found.scales.nbytes)
    assert size == bytes_per_element(fmt) * 256 * 512
    assert size < 0.52 * 2 * 256 * 512


@pytest.mark.parametrize("fmt", [Format.MXFP4, Format.MXFP8, Format.NVFP4])
def test_scales_are_those_of_ml_dtypes(fmt: Format) -> None:
    """mxfp: E8M0; nvfp4: E4M3. With tiles of 2^-127 and below, and one with a NaN."""
    x = matrix(8, 256, 1, harsh=True)
    x[3] = 2.0**-126
    found = encode(x, fmt, 1)
    assert found.scales is not None
    kind = ml_dtypes.float8_e4m3fn if fmt is Format.NVFP4 else ml_dtypes.float8_e8m0fnu
    scales = torch.from_numpy(found.scales.numpy().view(kind).astype(np.float32))
    tensor = torch.ones(()) if found.tensor_scale is None else found.tensor_scale
    tile = SPECS[fmt].tile
    values = E2M1 if fmt in FOUR_BIT else None
    raw = found.elements.numpy()
    if values is None:
        numbers = raw.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        numbers = np.stack([values[raw & 15], values[raw >> 4]], -1).reshape(raw.shape[0], -1)
    expected = torch.from_numpy(numbers) * (scales * tensor).repeat_interleave(tile, 1)
    assert_same(fake_quantize(x, fmt), expected)


@pytest.mark.parametrize("amax", [None, torch.tensor(5376.0)])
def test_an_empty_shard_has_the_scale_of_the_whole_tensor(amax: torch.Tensor | None) -> None:
    packed = encode(torch.empty(0, 128), Format.NVFP4, 1, tensor_amax=amax)
    assert packed.tensor_scale is not None
    assert packed.tensor_scale.item() == (1.0 if amax is None else 2.0)
    assert decode(packed, Format.NVFP4, 1, 128).shape == (0, 128)
