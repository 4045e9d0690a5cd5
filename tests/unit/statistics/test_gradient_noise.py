"""The variance of a gradient from norms of its microbatches, on any split of them over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from snip_megatron.statistics.reduction import gradient_noise


@dataclass(frozen=True)
class Groups:
    """Stands for ProbeGroups, which asks real process groups."""

    dp_rank: int
    dp_size: int


def noise_of(gradients: torch.Tensor, ranks: int) -> float:
    """Sum of the ranks' shares; gradients [microbatches, N, K]."""
    total = gradients.sum(0).double().square().sum()
    share = len(gradients) // ranks
    parts = gradients.view(ranks, share, *gradients.shape[1:]).double().square().sum((1, 2, 3))
    return sum(float(gradient_noise(parts[r], total, Groups(r, ranks), share)) for r in range(ranks))  # type: ignore[arg-type]


@pytest.mark.parametrize(("microbatches", "ranks"), [(2, 1), (2, 2), (8, 1), (8, 2), (8, 4), (8, 8)])
def test_it_is_the_sample_variance_on_every_layout(microbatches: int, ranks: int) -> None:
    gradients = torch.randn(microbatches, 5, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.5
    of_one = gradients.var(dim=0, unbiased=True).sum()  # per microbatch; independent ones add up
    assert noise_of(gradients, ranks) == pytest.approx(microbatches * float(of_one), rel=1e-9)


def test_equal_microbatches_have_none_and_one_cannot_tell() -> None:
    one = torch.randn(1, 5, 7)
    assert noise_of(one.expand(4, 5, 7).contiguous(), 2) == pytest.approx(0.0, abs=1e-9)
    assert noise_of(one, 1) == 0.0
    total = torch.tensor(3.0, dtype=torch.float64)
    assert float(gradient_noise(None, total, Groups(0, 4), 1)) == 0.0  # type: ignore[arg-type]
