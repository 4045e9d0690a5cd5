"""Variance of a gradient over microbatches, from norms that a probe records anyway.

The probe's gradient G is the sum of B equally distributed microbatch gradients g_b of mean μ and variance v, so E‖g_b‖²
= ‖μ‖² + v and E‖G‖² = B²‖μ‖² + B·v. Hence, unbiased and without keeping a second gradient,

    Var(G) = B·v = (B·Σ_b‖g_b‖² − ‖G‖²) / (B − 1) = Σ_{a<b} ‖g_a − g_b‖² / (B − 1) ≥ 0.

Source: docs/method.md, Q: one score per option.
"""

from __future__ import annotations

import torch

from snip_megatron.statistics.reduction import ProbeGroups


def gradient_noise(
    each: torch.Tensor | None, total: torch.Tensor, groups: ProbeGroups, microbatches: int
) -> torch.Tensor:
    """Return this rank's share of Var(G), a float64 scalar in the squared unit of the arguments.

    The shares of all ranks add up to Var(G); a single share may be negative. The result is 0 if there is only one
    microbatch in all, which has no variance to measure.

    Args:
        each: Σ_b‖g_b‖² of this rank's microbatches, of the local weight shard; None if it was not recorded.
        total: ‖G‖² of the local weight shard, after the reduction over data parallel ranks.
        groups: process groups of the linear.
        microbatches: number of microbatches on this rank.
    """
    count = microbatches * groups.dp_size
    if count < 2 or each is None:
        return torch.zeros_like(total)
    whole = total if groups.dp_rank == 0 else torch.zeros_like(total)
    return (count * each - whole) / (count - 1)
