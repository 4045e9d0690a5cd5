"""Every GEMM of grouped experts is compared with the reference, and a wrong one is named with its expert."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from snip_megatron.numerics.products.grouped import GroupLoop
from snip_megatron.precision import Format, Formats, Gemm
from snip_megatron.runtime.exact_products import EXACT
from snip_megatron.runtime.gemm_check import KernelCheck
from snip_megatron.runtime.watched import watched
from tests.unit.layers.test_grouped_linear import UNEVEN, Experts, operands
from tests.unit.numerics.products.products import BACKENDS

FP8, FP4, BF16, TENSOR = Format.FP8, Format.FP4, Format.BF16, Format.FP8_TENSOR
NAME = "decoder.layers.2.mlp.experts.linear_fc1"


def checked(formats: Formats, backend: str) -> tuple[KernelCheck, list[Tensor]]:
    """Return the comparison of one forward and backward, and its results."""
    experts, (x, g) = Experts(len(UNEVEN), formats, BACKENDS[backend]()), operands(UNEVEN)
    check = KernelCheck(lambda _: formats, EXACT)
    with watched(experts.context, check):
        y = experts(x, UNEVEN)
        y.backward(g)
    assert x.grad is not None
    return check, [y, x.grad, *(weight.main_grad for weight in experts.parameters())]  # type: ignore[misc]


@pytest.mark.parametrize("formats", [(FP8, FP8, FP8), (FP4, FP8, BF16), (BF16, TENSOR, FP4), (FP4, FP4, FP4)])
@pytest.mark.parametrize("backend", ["reference", "emulated", "hopper"])
def test_healthy_experts_are_compared_and_have_no_fault(formats: Formats, backend: str) -> None:
    check, results = checked(formats, backend)
    assert check.first is None
    assert set(check.sqnr) == {(NAME, gemm) for gemm in Gemm}
    experts, (x, g) = Experts(len(UNEVEN), formats, BACKENDS[backend]()), operands(UNEVEN)
    y = experts(x, UNEVEN)
    y.backward(g)
    unwatched = [y, x.grad, *(weight.main_grad for weight in experts.parameters())]  # type: ignore[misc]
    assert all(map(torch.equal, results, unwatched))


def test_the_expert_of_a_wrong_product_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    accumulate = GroupLoop.accumulate

    def lose_rows(self: GroupLoop, g: Any, x: Any, out: Sequence[Tensor] | None) -> Sequence[Tensor]:
        before = [each.clone() for each in out or ()]
        result = accumulate(self, g, x, out)
        result[2][:64] = before[2][:64]
        return result

    monkeypatch.setattr(GroupLoop, "accumulate", lose_rows)
    check, _ = checked((FP8, FP8, FP8), "emulated")
    assert check.first is not None
    fault = check.first
    assert (fault.linear, fault.gemm, fault.expert, fault.where) == (NAME, "wgrad", 2, "rows 0-63")
