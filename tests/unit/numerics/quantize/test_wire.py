"""Packed fp4: what is read back, and what the bytes mean to another library."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snip_megatron.numerics.quantize.wire import bytes_per_element, pack_fp4, unpack_fp4
from snip_megatron.precision import Format

E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


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


@pytest.mark.parametrize(
    ("fmt", "expected"), [("nvfp4", 0.5625), ("mxfp4", 0.53125), ("mxfp8", 1.03125), ("fp8", 1.03125)]
)
def test_bytes_are_counted(fmt: str, expected: float) -> None:
    assert bytes_per_element(Format(fmt)) == expected
