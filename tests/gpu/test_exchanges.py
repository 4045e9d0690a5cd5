"""Sums of gradients in FP8 over two GPUs through NCCL: the bits of torch's reference."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rank_process import free_port
from torch import Tensor

from snip_megatron.megatron.compat.gradients import as_rows, start_gradient_reduction
from snip_megatron.numerics.quantize import partial_sums

RANKS, ELEMENTS = 2, 3_000_064


def gradients(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(RANKS * ELEMENTS, generator=generator) * 1e-4


def summed(parts: list[Tensor], rank: int) -> Tensor:
    """Return the rank's share of the sum of the ranks' matrices by the reference, from what the ranks send."""
    shares = [part.view(RANKS, -1, part.shape[1])[rank].contiguous() for part in parts]
    elements, scales = (torch.stack(same) for same in zip(*map(partial_sums.pack_partial, shares), strict=True))
    return partial_sums.add_partials(elements, scales, shares[rank], rank)


def reduce_on_rank(rank: int, port: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    gradient, shard = torch.empty(RANKS * ELEMENTS, device="cuda"), torch.empty(ELEMENTS, device="cuda")
    for step in range(3):
        whole = [gradients(each, step) for each in range(RANKS)]
        gradient.copy_(gradients(rank, step))
        start_gradient_reduction(shard, gradient, dist.group.WORLD)()
        rows = [as_rows(each.view(RANKS, -1)) for each in whole]
        expected = summed(rows, rank).flatten()[:ELEMENTS]
        assert torch.equal(shard.cpu(), expected), f"gradients of step {step}"
    dist.destroy_process_group()


@pytest.mark.two_gpus
def test_sums_over_two_gpus_have_the_bits_of_the_reference() -> None:
    if torch.cuda.device_count() < RANKS:
        pytest.skip("needs two GPUs")
    mp.spawn(reduce_on_rank, args=(free_port(),), nprocs=RANKS)
