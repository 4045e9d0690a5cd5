"""Direct launches of Transformer Engine's RMSNorm, with stand-ins for its kernels. The real ones: ``tests/gpu``."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from snip_megatron.megatron.compat import te_rmsnorm
from snip_megatron.megatron.compat.te_rmsnorm import DirectRMSNorm

FEATURES = 32


def rmsnorm_fwd(x: Any, w: Any, eps: float, out: None, quantizer: None, dtype: Any, margin: int, centered: bool) -> Any:
    reciprocal = x.float().square().mean(1).add(eps).rsqrt()
    return (x.float() * reciprocal[:, None] * (w.float() + centered)).to(dtype), None, reciprocal


def rmsnorm_bwd(d: Any, x: Any, reciprocal: Any, w: Any, margin: int, centered: bool) -> Any:
    normed = x.float() * reciprocal[:, None]
    g = d.float() * (w.float() + centered)
    dx = (g - normed * (g * normed).mean(1, keepdim=True)) * reciprocal[:, None]
    return dx.to(x.dtype), (d.float() * normed).sum(0).to(w.dtype)


class Operation(torch.autograd.Function):
    """What a fuser runs: the same kernels."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, norm: Any) -> Any:
        y, _, reciprocal = rmsnorm_fwd(x.view(-1, FEATURES), weight, norm.eps, None, None, x.dtype, 0, False)
        ctx.save_for_backward(x.view(-1, FEATURES), reciprocal, weight)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *d: Any) -> Any:
        x, reciprocal, weight = ctx.saved_tensors
        dx, dw = rmsnorm_bwd(d[0].reshape(x.shape), x, reciprocal, weight, 0, False)
        return dx.view(d[0].shape), dw, None


class Stock(torch.nn.Module):
    eps, zero_centered_gamma, _sm_margins = 1e-5, False, {"forward": 0, "backward": 0, "inference": 0}
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, FEATURES).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = Operation.apply(x, self.weight, self)
        return y


class Norm(DirectRMSNorm, Stock):
    pass


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stand-ins that run on a CPU."""
    module = ModuleType("transformer_engine_torch")
    vars(module).update(rmsnorm_fwd=rmsnorm_fwd, rmsnorm_bwd=rmsnorm_bwd)
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", module)
    monkeypatch.setattr(te_rmsnorm, "_dtypes", lambda: {torch.bfloat16: torch.bfloat16})
    monkeypatch.setattr(te_rmsnorm, "_is_plain", lambda x, weight: x.dtype is weight.dtype)
    monkeypatch.setattr(te_rmsnorm, "_usable", {})
    return module


def results(norm: torch.nn.Module) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(3)
    x = torch.randn(5, 2, FEATURES, generator=draws).bfloat16().requires_grad_()
    d = torch.randn(2, 5, FEATURES, generator=draws).bfloat16().transpose(0, 1)
    y = norm(x)
    y.backward(d)
    assert x.grad is not None
    assert norm.weight.grad is not None
    return [y, x.grad, norm.weight.grad]


def test_the_kernels_give_the_bits_of_the_module(kernels: ModuleType) -> None:
    norm = Norm()
    assert all(map(torch.equal, results(norm), results(Stock())))
    assert norm.calls == 1  # of the comparison
    with torch.no_grad():
        norm(torch.ones(4, FEATURES, dtype=torch.bfloat16))
    assert norm.calls == 1


def test_what_is_not_plain_runs_the_module(kernels: ModuleType) -> None:
    norm = Norm().float()
    norm(torch.ones(4, FEATURES, dtype=torch.float64))
    assert norm.calls == 1
    assert not te_rmsnorm._usable


@pytest.mark.parametrize("fault", ["result", "gradient", "arguments"])
def test_kernels_that_differ_are_not_called(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def backward(d: Any, x: Any, reciprocal: Any, w: Any, margin: int, centered: bool) -> Any:
        dx, dw = rmsnorm_bwd(d, x, reciprocal, w, margin, centered)
        return dx, dw * (1 + 2**-7)

    broken: dict[str, tuple[str, Any]] = {
        "result": ("rmsnorm_fwd", lambda x, w, eps, *rest: rmsnorm_fwd(x, w, 0.1, *rest)),
        "gradient": ("rmsnorm_bwd", backward),
        "arguments": ("rmsnorm_fwd", lambda x: x),
    }
    monkeypatch.setattr(kernels, *broken[fault])
    norm = Norm()
    assert all(map(torch.equal, results(norm), results(Stock())))
    assert list(te_rmsnorm._usable.values()) == [False]
    assert norm.calls == 2
