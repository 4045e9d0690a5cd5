"""SNIP's norms under Transformer Engine against its modules: bits, and how many kernels are launched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from snip_megatron.megatron.compat import te_rmsnorm
from snip_megatron.megatron.compat.norms import TRANSFORMER_ENGINE, stock_norm


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("features", [2048, 4096, 8192, 1536])
def test_a_norm_has_the_bits_of_transformer_engines(features: int, centered: bool) -> None:
    pytest.importorskip("transformer_engine")
    import transformer_engine.pytorch as te

    from snip_megatron.megatron.layer_spec import _norm_without_state

    def build() -> Any:
        norm = te.RMSNorm(features, eps=1e-5, zero_centered_gamma=centered, dtype=torch.bfloat16, device="cuda")
        with torch.no_grad():
            norm.weight.add_(torch.linspace(-0.3, 0.3, features, device="cuda"))
        return norm

    def results(norm: Any) -> list[torch.Tensor]:
        draws = torch.Generator(device="cuda").manual_seed(features)
        x = torch.randn(512, 2, features, device="cuda", generator=draws).bfloat16().requires_grad_()
        d = torch.randn(512, 2, features, device="cuda", generator=draws).bfloat16()
        y = norm(x)
        y.backward(d)
        return [y.detach(), x.grad, norm.weight.grad]

    te_rmsnorm._usable.clear()
    direct = _norm_without_state(lambda **_: build(), config=SimpleNamespace(cpu_offloading=False))
    assert isinstance(direct, te_rmsnorm.DirectRMSNorm)
    assert all(map(torch.equal, results(direct), results(build())))
    assert list(te_rmsnorm._usable.values()) == [True]
    if features in TRANSFORMER_ENGINE:
        assert stock_norm(direct).norm.zero_centred is centered
