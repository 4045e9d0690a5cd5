"""How long a module's forward and backward take in a training: what is noted, and that nothing else changes."""

import torch
from torch import Tensor

from snip_megatron.layers.spans import Spans


def forward(x: Tensor, factor: float) -> tuple[Tensor, str]:
    return (x * factor).square(), "bias"


def test_a_forward_with_its_backward_is_noted() -> None:
    spans, x = Spans(), torch.ones(4, requires_grad=True)
    y, rest = spans.run(forward, 1.0 * x, 3.0)
    assert rest == "bias"
    assert spans.seconds() is None  # the backward is still to come
    y.sum().backward()
    assert x.grad is not None
    assert (y == 9).all()
    assert (x.grad == 18).all()
    found = spans.seconds()
    assert found > 0


def test_what_has_no_backward_is_not_noted() -> None:
    spans = Spans()
    spans.run(forward, torch.ones(4), 3.0)
    with torch.no_grad():
        spans.run(forward, torch.ones(4, requires_grad=True), 3.0)
    assert spans.seconds() is None
