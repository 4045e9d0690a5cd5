"""Bytes that ranks exchange, on a GPU: the kernels against torch's reference, and sums over two GPUs through NCCL."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from two_gpus import RANKS, run_on_two_gpus

from snip_megatron.layers import communication
from snip_megatron.layers.communication import ErrorFeedback, as_rows
from snip_megatron.quantization import wire

SHAPES = [(2, 4096, 4096), (8, 512, 14336), (2, 40, 2048 + 130)]


def parts(shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """Return matrices of several ranks on the GPU: tiles of all sizes, zero tiles and a NaN."""
    ranks, rows, cols = shape
    generator = torch.Generator().manual_seed(cols)
    sizes = torch.tensor([1.0, 1e-39, 3e-5, 1e30])[torch.randint(4, (ranks, rows, 1), generator=generator)]
    x = torch.randn(shape, generator=generator) * sizes
    x[0, 0], x[-1, -1, -1] = 0.0, torch.nan
    return x.to(dtype).cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_partial_sums_have_the_bits_of_the_reference(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    from snip_megatron.quantization.kernels import quantize as kernels

    x = parts(shape, dtype)
    packed = [wire.pack_partial(each.cpu()) for each in x]
    for each, (elements, scales) in zip(x, packed, strict=True):
        found = kernels.pack_partial(each)
        torch.testing.assert_close(found[1].cpu(), scales, rtol=0, atol=0, equal_nan=True)
        known = scales.isfinite().repeat_interleave(128, 1)[:, : shape[2]]
        assert torch.equal(found[0].cpu()[known], elements[known])
    elements, scales = (torch.stack(same) for same in zip(*packed, strict=True))
    for rank in range(shape[0]):
        expected = wire.add_partials(elements, scales, x[rank].cpu(), rank)
        found_sum = kernels.add_partials(elements.cuda(), scales.cuda(), x[rank], rank)
        torch.testing.assert_close(found_sum.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_two_numbers_to_a_byte_have_the_bits_of_the_reference() -> None:
    from snip_megatron.quantization.kernels import quantize as kernels

    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    grid = torch.cat([grid, -grid])
    values = grid[torch.randint(16, (4096, 4096), generator=torch.Generator().manual_seed(0))]
    values = values.to(torch.float8_e4m3fn).view(torch.uint8)
    packed = wire.pack_fp4(values)
    assert torch.equal(kernels.pack_fp4(values.cuda()).cpu(), packed)
    together = packed.reshape(2, 2048, -1)
    unpacked = kernels.unpack_fp4(together.cuda()).cpu()
    assert torch.equal(unpacked, wire.unpack_fp4(together))
    assert torch.equal(unpacked[:, :4096], values[:2048])


# -- over two GPUs ---------------------------------------------------------------------------------------------
TOKENS, FEATURES, ELEMENTS = 2048, 4096, 3_000_064


def partial_result(rank: int) -> Tensor:
    return torch.randn(TOKENS, FEATURES, generator=torch.Generator().manual_seed(rank)).bfloat16()


def gradients(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(RANKS * ELEMENTS, generator=generator) * 1e-4


def summed(parts: list[Tensor], rank: int) -> Tensor:
    """Return the rank's share of the sum of the ranks' matrices by the reference, from what the ranks send."""
    shares = [part.view(RANKS, -1, part.shape[1])[rank].contiguous() for part in parts]
    elements, scales = (torch.stack(same) for same in zip(*map(wire.pack_partial, shares), strict=True))
    return wire.add_partials(elements, scales, shares[rank], rank)


def reduce_on_rank(rank: int) -> None:
    results = [partial_result(each) for each in range(RANKS)]
    found = communication.start_reduce_scatter(results[rank].cuda(), dist.group.WORLD, quantised=True).result()
    assert torch.equal(found.cpu(), summed(results, rank)), "partial results"

    feedback = ErrorFeedback()
    lost = [torch.zeros(RANKS * ELEMENTS) for _ in range(RANKS)]
    own, shard = torch.empty(RANKS * ELEMENTS, device="cuda"), torch.empty(ELEMENTS, device="cuda")
    for step in range(3):
        whole = [gradients(each, step) + lost[each] for each in range(RANKS)]
        own.copy_(gradients(rank, step))
        communication.start_gradient_reduction(shard, own, dist.group.WORLD, feedback).result()
        rows = [as_rows(each.view(RANKS, -1)) for each in whole]
        expected = summed(rows, rank).flatten()[:ELEMENTS]
        assert torch.equal(shard.cpu(), expected), f"gradients of step {step}"
        lost = [loss_of(each, number) for number, each in enumerate(rows)]


def loss_of(rows: Tensor, rank: int) -> Tensor:
    """Return what ``rank`` lost of its gradients: nothing of the part that it did not send."""
    elements, scales = wire.pack_partial(rows)
    nothing = torch.zeros_like(rows)
    lost = rows - wire.add_partials(elements.unsqueeze(0), scales.unsqueeze(0), nothing, -1)
    lost.view(RANKS, -1)[rank] = 0.0
    return lost.bfloat16().float().view(RANKS, -1)[:, :ELEMENTS].flatten()


def test_sums_over_two_gpus_have_the_bits_of_the_reference() -> None:
    run_on_two_gpus(reduce_on_rank)
