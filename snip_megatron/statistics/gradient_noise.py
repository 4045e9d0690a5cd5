"""Natural noise of a gradient: its variance over microbatches, from norms that a probe has anyway.

The probe's gradient G is the sum of B equally distributed microbatch gradients. A part A of it, of n of them, has
E‖A‖² = n²‖μ‖² + n·v, the whole E‖G‖² = B²‖μ‖² + B·v. So with q = B/n

    Var(G) = B·v = (q²·E‖A‖² − E‖G‖²) / (q − 1),

unbiased, without keeping a second gradient. METHOD, "Putting ΔL and ΔW together": Var(∇W) is free from data parallel
ranks and microbatches.
"""

from __future__ import annotations

import torch

from snip_megatron.statistics.reduction import ProbeGroups


def gradient_noise(
    own: torch.Tensor, first: torch.Tensor | None, total: torch.Tensor, groups: ProbeGroups, microbatches: int
) -> torch.Tensor:
    """This rank's additive share of Var(G), float64 scalar in the squared unit of its arguments.

    With several data parallel ranks the parts are what each rank has; with one, the part is its first microbatch. One
    microbatch on one rank has no variance to see: 0.

    Args:
        own: ‖this rank's gradient‖² before the reduction over data parallel ranks, of the local weight shard.
        first: ‖gradient of this rank's first microbatch‖²; None where it was not noted.
        total: ‖G‖² of the local weight shard, after the reduction.
        groups: who else holds a part.
        microbatches: of this rank.
    """
    ranks = groups.dp_size
    if ranks > 1:
        share = ranks * own - (total if groups.dp_rank == 0 else 0.0)
        return share / (ranks - 1)
    if microbatches > 1 and first is not None:
        return (microbatches**2 * first - total) / (microbatches - 1)
    return torch.zeros_like(total)
