"""Rows of experts with and without padding, for autograd."""

from typing import Any

import torch
from torch import Tensor

from snip_megatron.numerics.products.grouped import GroupRows
from snip_megatron.precision.errors import SnipError


def pad(x: Tensor, rows: GroupRows) -> Tensor:
    """Return x [rows, ...] with zero rows after those of each expert."""
    return _Moved.apply(x, rows.pad, rows.unpad) if rows.moves else x  # type: ignore[no-untyped-call]


def unpad(x: Tensor, rows: GroupRows) -> Tensor:
    """Return the rows that :func:`pad` was given, in their order."""
    return _Moved.apply(x, rows.unpad, rows.pad) if rows.moves else x  # type: ignore[no-untyped-call]


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Any, move_back: Any) -> Tensor:
        ctx.move_back = move_back
        moved: Tensor = move(x)
        return moved

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        return ctx.move_back(grad_outputs[0]), None, None


def refuse_second_derivatives() -> None:
    """Raise SnipError in a backward that is to be differentiated. torch's once_differentiable takes more time."""
    if torch.is_grad_enabled():
        raise SnipError("create_graph=True is not supported, because rounding has no derivative")
