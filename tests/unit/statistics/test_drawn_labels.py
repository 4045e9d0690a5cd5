"""Gradients of labels that the model draws, against the curvature of the cross-entropy."""

import torch
from torch.nn import functional

from snip_megatron.statistics.drawn_labels import WithGradient, drawn_gradient

TOKENS, VOCABULARY, DRAWS = 3, 7, 20_000


def logits() -> torch.Tensor:
    return 2 * torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(1))


def test_the_second_moment_is_the_curvature_of_the_cross_entropy() -> None:
    drawn = torch.stack([drawn_gradient(logits(), seed).double() for seed in range(DRAWS)])
    moment = torch.einsum("dtu,dtv->tuv", drawn, drawn) / DRAWS
    for token, row in enumerate(logits().double()):
        label = torch.tensor(0)  # the curvature is that of any label
        curvature = torch.func.hessian(lambda x, y=label: functional.cross_entropy(x, y))(row)
        assert (moment[token] - curvature).norm() < 0.05 * curvature.norm()


def test_tokens_have_nothing_in_common() -> None:
    drawn = torch.stack([drawn_gradient(logits(), seed).double() for seed in range(DRAWS)])
    product = (drawn[:, 0] * drawn[:, 1]).sum(-1)
    assert product.mean().abs() < 4 * product.std() / DRAWS**0.5
    assert drawn.mean(0).abs().max() < 4 / DRAWS**0.5


def test_losses_stay_and_each_scales_its_own_gradient() -> None:
    x = logits().view(TOKENS, 1, VOCABULARY).requires_grad_()
    losses = torch.rand(1, TOKENS)
    gradient = drawn_gradient(x, 5)
    found = WithGradient.apply(x, losses, gradient)  # type: ignore[no-untyped-call]
    assert torch.equal(found, losses)
    weights = torch.tensor([[1.0, 0.0, -2.0]])
    (found * weights).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, gradient * weights.t().unsqueeze(-1))


def test_draws_are_of_the_seed_and_do_not_depend_on_the_size_of_a_piece() -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
    whole = drawn_gradient(x, 3)
    assert not torch.equal(whole, drawn_gradient(x, 4))
    assert torch.allclose(whole[:5], drawn_gradient(x[:5], 3), atol=1e-6)
