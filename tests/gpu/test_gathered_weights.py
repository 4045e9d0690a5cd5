"""Weights that are quantised range by range, on a GPU: the kernels against torch's reference, and a gather by NCCL."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from two_gpus import RANKS, run_on_two_gpus

from snip_megatron.layers.parameter_gather import BufferedParameter, ParameterGather
from snip_megatron.precision import Format
from snip_megatron.quantization import fake_quantize, packed, ranges
from snip_megatron.quantization.ranges import QuantizedWeight
from snip_megatron.quantization.reference import quantize

FP8, FP4, TENSOR = Format.FP8, Format.FP4, Format.FP8_TENSOR
LENGTH = 9_000_000
PARAMETERS = (
    BufferedParameter(0, (4096,)),
    BufferedParameter(4096, (2048, 2048), (FP8,)),
    BufferedParameter(4198400, (1000, 1536), (FP4,)),
    BufferedParameter(5734400, (1408, 4096), (FP8, FP4)),  # cut by the end of the first rank's part
    BufferedParameter(11501568, (1024, 2048), (TENSOR,)),
)


def weights(elements: int) -> torch.Tensor:
    """Tiles of very different size, one that is zero and one with a NaN."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1.0, 1e-38, 3e-5, 1e30])[torch.randint(4, (elements // 1000 + 1, 1), generator=generator)]
    w = (torch.randn(len(sizes), 1000, generator=generator) * sizes).flatten()[:elements]
    w[300_000:500_000], w[700_000] = 0.0, torch.nan
    return w.bfloat16()


@pytest.mark.parametrize("fmt", ranges.FORMATS)
@pytest.mark.parametrize(("begin", "end"), [(0, 1408 * 4096), (1234568, 4567890), (4097, 6001)])
def test_kernels_have_the_bits_of_the_reference(fmt: Format, begin: int, end: int) -> None:
    from snip_megatron.quantization.kernels import ranges as kernels

    shape, x = (1408, 4096), weights(1408 * 4096)[begin:end]
    amax = ranges.range_amax(x, begin, shape, fmt)
    found = kernels.range_amax(x.cuda(), begin, shape, fmt)
    torch.testing.assert_close(found.cpu(), amax, rtol=0, atol=0, equal_nan=True)
    scale = ranges.scales(torch.where(amax.isfinite(), amax, 1.0), fmt)
    clean = x.nan_to_num(1.0)
    codes = kernels.encode_range(clean.cuda(), begin, shape, fmt, scale.cuda())
    assert torch.equal(codes.cpu(), ranges.encode_range(clean, begin, shape, fmt, scale))


@pytest.mark.parametrize("fmt", ranges.FORMATS)
@pytest.mark.parametrize("transposed", [False, True])
def test_operands_are_the_references(fmt: Format, transposed: bool) -> None:
    from snip_megatron.quantization.kernels import ranges as kernels

    made = quantize(weights(1400 * 4096).view(1400, 4096).nan_to_num(1.0), fmt, block=True)
    elements = made.values.to(torch.float8_e4m3fn)
    expected = packed.opened_weight(QuantizedWeight(elements, made.scale), fmt, transposed=transposed)
    found = kernels.opened_weight(QuantizedWeight(elements.cuda(), made.scale.cuda()), fmt, transposed=transposed)
    assert torch.equal(found.values.view(torch.uint8).cpu(), expected.values.view(torch.uint8))
    assert torch.equal(found.scale.cpu(), expected.scale)
    assert found.scale.stride() == expected.scale.stride()


def gather_on_rank(rank: int) -> None:
    whole, buffer = weights(RANKS * LENGTH), torch.zeros(RANKS * LENGTH, dtype=torch.bfloat16, device="cuda")
    buffer.view(RANKS, -1)[rank] = whole.view(RANKS, -1)[rank].cuda()
    gather = ParameterGather(buffer, dist.group.WORLD, PARAMETERS)
    found = gather.start().result()
    assert torch.equal(buffer[:4096].cpu(), whole[:4096])
    for parameter in PARAMETERS:
        for fmt in parameter.formats:
            w = whole[parameter.start : parameter.stop].view(parameter.shape)
            expected = fake_quantize(w, fmt, block=True)
            numbers = found[parameter][fmt].dequantize().cpu()
            torch.testing.assert_close(numbers, expected, rtol=0, atol=0, equal_nan=True)


def test_a_gather_over_two_gpus_has_the_bits_of_the_reference() -> None:
    run_on_two_gpus(gather_on_rank)
