"""Natural noise of a gradient: its variance over microbatches, from norms that a probe has anyway.

The probe's gradient G is the sum of B equally distributed microbatch gradients g_b of mean μ and variance v, so
E‖g_b‖² = ‖μ‖² + v and E‖G‖² = B²‖μ‖² + B·v. Hence, unbiased and without keeping a second gradient,

    Var(G) = B·v = (B·Σ_b‖g_b‖² − ‖G‖²) / (B − 1) = Σ_{a<b} ‖g_a − g_b‖² / (B − 1) ≥ 0.

METHOD, "Putting ΔL and ΔW together": Var(∇W) is free from data parallel ranks and microbatches.
"""

from __future__ import annotations

import torch

from snip_megatron.statistics.reduction import ProbeGroups


def gradient_noise(
    each: torch.Tensor | None, total: torch.Tensor, groups: ProbeGroups, microbatches: int
) -> torch.Tensor:
    """This rank's additive share of Var(G), float64 scalar in the squared unit of its arguments.

    One microbatch in all has no variance to see: 0. Single shares may be negative.

    Args:
        each: Σ_b‖g_b‖² of this rank's microbatches, of the local weight shard; None where it was not noted.
        total: ‖G‖² of the local weight shard, after the reduction over data parallel ranks.
        groups: who else holds a part.
        microbatches: of this rank.
    """
    count = microbatches * groups.dp_size
    if count < 2 or each is None:
        return torch.zeros_like(total)
    whole = total if groups.dp_rank == 0 else torch.zeros_like(total)
    return (count * each - whole) / (count - 1)
