"""Gradients of the loss for labels that the model itself draws, which the statistics of a probe are of.

The curvature of the mean token loss is that of the cross-entropy, diag(p) − ppᵀ with a token's probabilities p, seen
from the linear. Gradients p − y of the text's labels y have it as their second moment only if the text is as likely as
the model says. Early in a training they have directions in common, so that (G·E)² of what many later tokens read is
far too large. v = h − (Σh)·p, h = √p∘z with normal z, has exactly this second moment, and tokens have nothing in
common. Unlike a drawn label, v is continuous in the logits, so that all layouts find the same.
"""

from typing import Any

import torch
import torch.distributed as dist

from snip_megatron.quantization import random_normal

_ELEMENTS = 1 << 23
"""Logits that are drawn at a time, which limits the memory of temporaries."""


def drawn_gradient(logits: torch.Tensor, seed: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return v of every token, in the shape and dtype of ``logits`` [..., V], this rank's part of the vocabulary.

    z depends on the seed, the token's place and the global index of the vocabulary. The ranks of ``group`` have equal
    parts of it, in order. Collective in ``group``; None: logits are whole.
    """
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    flat = logits.detach().reshape(-1, logits.shape[-1])
    rows, width = flat.shape
    found, step = torch.empty_like(flat), max(1, _ELEMENTS // width)
    places, columns = (torch.arange(n, device=flat.device) for n in (rows, width))

    def whole(part: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if size > 1:
            dist.all_reduce(part, operation, group)
        return part

    for first in range(0, rows, step):
        x = flat[first : first + step].float()
        x = (x - whole(x.amax(1, keepdim=True), dist.ReduceOp.MAX)).exp_()
        p = x / whole(x.sum(1, keepdim=True), dist.ReduceOp.SUM)
        h = p.sqrt() * random_normal(seed, places[first : first + step], columns + rank * width)
        found[first : first + step] = h - p * whole(h.sum(1, keepdim=True), dist.ReduceOp.SUM)
    return found.view(logits.shape)


class WithGradient(torch.autograd.Function):
    """``losses`` [b, s], whose gradient by logits [s, b, V] is ``gradient`` times that of each loss."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, losses: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].t().unsqueeze(-1).to(gradient.dtype), None, None
