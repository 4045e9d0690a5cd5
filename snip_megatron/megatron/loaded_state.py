"""Checks that a loaded optimizer state belongs to the loaded weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from snip_megatron.errors import SnipError
from snip_megatron.megatron import compat


def check_optimizer_state(model: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """Raise SnipError on every rank if the optimizer's main values are not those of the weights on any rank.

    Every rank must call it before the first step. Megatron loads a ``dp_reshardable`` state by position and cannot
    notice that the positions are those of another order of parameters. Training would go on, from scattered weights.

    Args:
        model: The model chunks.
        optimizer: The optimizer of Megatron's ``train_step``.
    """
    found = compat.misplaced_parameters(model, optimizer)
    count = torch.tensor([len(found)], device=next(model[0].parameters()).device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    if count.item() == 0:
        return
    where = f"of {found[0]} and {len(found) - 1} more" if found else "on other ranks"
    raise SnipError(
        f"the loaded optimizer state belongs to other parameters: the FP32 main values {where} are not those of the"
        " loaded weights. The checkpoint holds the state by position (dp_reshardable), and was written with another"
        " order of parameters. Write it with --dist-ckpt-optim-fully-reshardable by the code that wrote it, or load it"
        " with --no-load-optim, which begins with new moments"
    )
