"""Packing of E2M1 numbers by Triton against torch, byte by byte."""

import pytest
import torch

from snip_megatron.quantization import packed, wire

from ..specs import spec
from .interpreter import Quantizers


@pytest.mark.parametrize("shape", [(1, 2), (3, 130), (5, 2 * 2048 + 2), (0, 128)])
def test_packing(quantizers: Quantizers, shape: tuple[int, int]) -> None:
    """All numbers that operands hold, NaN too: which number a NaN becomes must not depend on the device."""
    generator = torch.Generator().manual_seed(shape[1])
    x = torch.randn(shape, generator=generator).bfloat16()
    x[:1, 0] = torch.nan
    operand, _ = packed.quantize_operands(x, spec("fp4"))
    values = operand.values.view(torch.uint8)
    assert torch.equal(quantizers.call("pack_fp4", values), wire.pack_fp4(values))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 65), (3, 2, 2048 + 64), (2, 0, 64)])
def test_unpacking(quantizers: Quantizers, shape: tuple[int, int, int]) -> None:
    parts = torch.randint(256, shape, generator=torch.Generator().manual_seed(4), dtype=torch.uint8)
    assert torch.equal(quantizers.call("unpack_fp4", parts), wire.unpack_fp4(parts))
