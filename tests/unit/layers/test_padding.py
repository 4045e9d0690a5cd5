"""Rows of experts with zeros between them: there and back, and their gradients."""

import pytest
import torch

from snip_megatron.layers.grouped import pad, unpad
from snip_megatron.numerics.products.grouped import group_rows


@pytest.mark.parametrize("splits", [(3, 0, 128, 130), (0, 0), (256,), (128, 256)])
@pytest.mark.parametrize("backwards", [False, True])
def test_rows_stand_at_the_start_of_their_expert(splits: tuple[int, ...], backwards: bool) -> None:
    rows = group_rows(splits, torch.device("cpu"), backwards=backwards)
    x = torch.randn(sum(splits), 4, requires_grad=True)
    padded = pad(x, rows)
    order = reversed(list(x.split(list(splits)))) if backwards else x.split(list(splits))
    for found, expected in zip(padded.split(rows.tolist()), order, strict=True):
        assert len(found) % 128 == 0
        assert len(found) - len(expected) < 128
        assert torch.equal(found[: len(expected)], expected)
        assert not found[len(expected) :].any()
    experts = [expert for expert, count in enumerate(rows) for _ in range(count)]
    assert rows.map.experts.tolist() == experts
    y = unpad(padded * 3, rows)
    assert torch.equal(y, x * 3)
    weight = torch.randn_like(y)
    y.backward(weight)
    assert torch.equal(x.grad, weight * 3)
