"""What is known of Transformer Engine's norm, with a stand-in for the library, which needs a GPU."""

from __future__ import annotations

import abc
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from snip_megatron.megatron.compat.norms import TRANSFORMER_ENGINE, stock_norm
from snip_megatron.megatron.layer_spec import _norm_without_state
from snip_megatron.quantization.rmsnorm import Order


class RMSNorm(torch.nn.Module, metaclass=abc.ABCMeta):
    """With the attributes of Transformer Engine's module that are read, and abstract as that one is."""

    __module__ = "transformer_engine.pytorch.module.rmsnorm"

    def __init__(self, features: int, eps: float, zero_centered_gamma: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(features))
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self._sm_margins = {"forward": 1, "backward": 2, "inference": 3}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of the library's functions, which have the signatures of version 2.20."""
    found: list[tuple[Any, ...]] = []

    def rmsnorm_fwd(
        x: Any, weight: Any, eps: float, out: Any, quantizer: Any, dtype: Any, sm_margin: int, zero: bool
    ) -> Any:
        found.append((eps, out, quantizer, dtype, sm_margin, zero))
        return x, None, x[:, 0].float()

    def rmsnorm_bwd(dz: Any, x: Any, rsigma: Any, gamma: Any, sm_margin: int, zero: bool) -> Any:
        found.append((dz.shape, x.shape, rsigma.shape, gamma.shape, sm_margin, zero))
        return dz, gamma

    library, constants = ModuleType("transformer_engine_torch"), ModuleType("constants")
    vars(library).update(rmsnorm_fwd=rmsnorm_fwd, rmsnorm_bwd=rmsnorm_bwd)
    vars(constants).update(TE_DType={torch.bfloat16: "bf16"})
    for name, module in (
        ("transformer_engine_torch", library),
        ("transformer_engine", ModuleType("transformer_engine")),
        ("transformer_engine.pytorch", ModuleType("pytorch")),
        ("transformer_engine.pytorch.constants", constants),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    return found


def test_the_library_s_functions_are_called_as_its_module_calls_them(calls: list[tuple[Any, ...]]) -> None:
    stock = stock_norm(RMSNorm(4096, 1e-6, zero_centered_gamma=True))
    assert (stock.norm.eps, stock.norm.zero_centred) == (1e-6, True)
    assert stock.norm.order == TRANSFORMER_ENGINE[4096] == Order(8, 4, centred=True, rows=4)
    x, gamma = torch.ones(8, 4096).bfloat16(), torch.ones(4096).bfloat16()
    y, rs = stock.forward(x, gamma)
    assert (y.shape, rs.shape) == ((8, 4096), (8,))
    stock.backward(x, x, gamma, rs)
    assert calls == [
        (1e-6, None, None, "bf16", 1, True),
        ((8, 4096), (8, 4096), (8,), (4096,), 2, True),
    ]


@pytest.mark.usefixtures("calls")
def test_the_norm_of_snip_s_layer_spec_is_known() -> None:
    norm, other = (_norm_without_state(RMSNorm, 2048, 1e-5, False) for _ in range(2))
    assert stock_norm(norm).norm.order.warps == 1
    assert type(norm) is type(other)  # what is compared before training is compared once a class


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("missing", ["rmsnorm_bwd", "_sm_margins", "width"])
def test_another_version_or_width_is_not_known(missing: str) -> None:
    module = RMSNorm(3072 if missing == "width" else 2048, 1e-5, False)
    if missing == "_sm_margins":
        del module._sm_margins
    elif missing == "rmsnorm_bwd":
        del sys.modules["transformer_engine_torch"].rmsnorm_bwd  # type: ignore[attr-defined]
    with pytest.raises(LookupError, match="Transformer Engine"):
        stock_norm(module)


def test_a_missing_library_is_reported() -> None:
    """As where the norm's class can be imported, but not the functions."""
    with pytest.raises(LookupError, match="another norm"):
        stock_norm(RMSNorm(2048, 1e-5, False))
