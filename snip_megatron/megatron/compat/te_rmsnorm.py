"""Transformer Engine's RMSNorm, whose kernels are called without its fuser of operations.

``transformer_engine.pytorch.RMSNorm`` is a chain of one operation. In every call the fuser looks for operations to fuse
and makes a context for each, which takes the host longer than to launch the kernel. Stock layers do not pay for it,
because their norm is part of a linear. SNIP's layers have norms of their own. They call the kernels directly, with the
same arguments and the same bits.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

_TOKENS = 8  # of the comparison with the stock module
_usable: dict[tuple[Any, ...], bool] = {}  # class, sizes and settings of a norm → whether the kernels may be called


class DirectRMSNorm:
    """To be mixed into a subclass of Transformer Engine's RMSNorm, before it."""

    def forward(self: Any, x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        """Normalise x [..., features]. The stock module does so where it would do more than launch the kernel."""
        if not (rest or named) and _is_plain(x, self.weight) and _has_the_bits(self, x):
            return _launched(self, x)
        return super().forward(x, *rest, **named)  # type: ignore[misc,no-any-return]


def _launched(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return _RMSNorm.apply(x, norm.weight, norm)  # type: ignore[no-any-return,no-untyped-call]


class Settings(NamedTuple):
    """The settings of a norm that its kernels take. ``margins`` are numbers of multiprocessors that stay free."""

    eps: float
    zero_centred: bool
    margins: Mapping[str, int]


def settings_of(norm: Any) -> Settings:
    """Return the settings of one of Transformer Engine's RMSNorms. Raises AttributeError if they have other names."""
    return Settings(norm.eps, norm.zero_centered_gamma, norm._sm_margins)


def launch_forward(
    settings: Settings, x: torch.Tensor, gamma: torch.Tensor, purpose: str = "forward"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of x [T, K] with the weight ``gamma`` [K], and the reciprocal RMS of its rows, FP32 [T]."""
    margin = settings.margins[purpose]
    y, _, reciprocal = _kernels().rmsnorm_fwd(
        x, gamma, settings.eps, None, None, _dtypes()[x.dtype], margin, settings.zero_centred
    )
    return y, reciprocal


def launch_backward(
    settings: Settings, d: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, reciprocal: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and of the weight. ``d`` [T, K] is contiguous."""
    dx, dw = _kernels().rmsnorm_bwd(d, x, reciprocal, gamma, settings.margins["backward"], settings.zero_centred)
    return dx, dw


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, norm: Any) -> torch.Tensor:
        """Call the kernel of the forward."""
        matrix, settings = x.reshape(-1, weight.numel()).contiguous(), settings_of(norm)
        purpose = "forward" if any(ctx.needs_input_grad) else "inference"
        y, reciprocal = launch_forward(settings, matrix, weight, purpose)
        ctx.save_for_backward(matrix, reciprocal)
        ctx.settings, ctx.weight = settings, weight
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Call the kernel of the backward."""
        (x, reciprocal), d = ctx.saved_tensors, grad_outputs[0]
        dx, dw = launch_backward(ctx.settings, d.contiguous().view(x.shape), x, ctx.weight, reciprocal)
        return dx.view(d.shape), dw.view(ctx.weight.shape), None


def _is_plain(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the stock module would launch a kernel on x as it is."""
    casts = x.dtype is not weight.dtype or torch.is_autocast_enabled()
    return x.is_cuda and not casts and not torch.compiler.is_compiling()


def _has_the_bits(norm: Any, x: torch.Tensor) -> bool:
    """Return whether calling the kernels gives the results and gradients of the stock module. It is compared once."""
    key = (type(norm), norm.weight.numel(), x.dtype, x.device, norm.eps, norm.zero_centered_gamma)
    known = _usable.get(key)
    if known is None:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        _usable[key] = known = _compare(norm, x)
    return known


def _compare(norm: Any, like: torch.Tensor) -> bool:
    features = norm.weight.numel()
    runs = (super(DirectRMSNorm, norm).forward, functools.partial(_launched, norm))
    with torch.inference_mode(False), torch.enable_grad():
        values = torch.arange(_TOKENS * features, device=like.device, dtype=torch.float64).sin().view(_TOKENS, features)
        found = []
        try:
            for run in runs:
                x = values.to(like.dtype).requires_grad_()
                y = run(x)
                found.append((y, *torch.autograd.grad(y, (x, norm.weight), values.cos().to(like.dtype))))
        except Exception as error:  # another release may have other names or arguments: training goes on as before
            logging.getLogger(__name__).warning("RMSNorm is launched by Transformer Engine's fuser: %s", error)
            return False
    return all(map(torch.equal, *found))


def check_kernels() -> None:
    """Raise ImportError or AttributeError if Transformer Engine has no kernels by these names."""
    library = _kernels()
    _ = library.rmsnorm_fwd, library.rmsnorm_bwd, _dtypes()


def _kernels() -> Any:
    import transformer_engine_torch  # type: ignore[import-not-found]

    return transformer_engine_torch


def _dtypes() -> Any:
    from transformer_engine.pytorch.constants import TE_DType

    return TE_DType
