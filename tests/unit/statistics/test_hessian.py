"""Hutchinson's trace against the exact Hessian of a model small enough to have one, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from snip_megatron.layers.context import LinearHandle, StepContext
from snip_megatron.precision import LINEAR_KINDS, LinearId
from snip_megatron.quantization import derive_seed, random_signs
from snip_megatron.statistics.hessian import FINE_STEP, HutchinsonTrace, traces

WIDTHS = (6, 8, 7, 5)
SEED = 11


class Small:
    """Three linears with GELUs between, cross-entropy of 40 tokens; computed in float64 whatever the weights are."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(40, WIDTHS[0], generator=generator, dtype=torch.float64)
        self.labels = torch.randint(WIDTHS[-1], (40,), generator=generator)
        self.modules = []
        for inner, outer in itertools.pairwise(WIDTHS):
            module = torch.nn.Linear(inner, outer, bias=False, dtype=dtype)
            with torch.no_grad():
                module.weight.copy_(torch.randn(outer, inner, generator=generator) * 0.6)
            self.modules.append(module)
        self.handles = [handle_of(i, module, range(module.out_features)) for i, module in enumerate(self.modules)]
        self.passes = 0

    @property
    def weights(self) -> list[torch.Tensor]:
        return [module.weight for module in self.modules]

    @property
    def elements(self) -> torch.Tensor:
        return torch.tensor([w.numel() for w in self.weights], dtype=torch.float64)

    def loss(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        h = self.x
        for weight in weights[:-1]:
            h = torch.nn.functional.gelu(h @ weight.double().t())
        return torch.nn.functional.cross_entropy(h @ weights[-1].double().t(), self.labels)

    def run_pass(self) -> None:
        self.passes += 1
        weights = [w.detach().double().requires_grad_() for w in self.weights]
        for module, gradient in zip(self.modules, torch.autograd.grad(self.loss(weights), weights), strict=True):
            module.weight.main_grad = gradient

    def measure(self, probes: int) -> torch.Tensor:
        w2 = {h.name: float(h.weight.detach().double().square().sum()) for h in self.handles}
        return HutchinsonTrace(self.handles, w2, SEED, probes).measure(self.run_pass)

    def exact(self) -> list[float]:
        """Tr(H_jj) from the whole Hessian of every weight."""
        found = []
        for j, weight in enumerate(self.weights):

            def of_one(changed: torch.Tensor, j: int = j) -> torch.Tensor:
                return self.loss([changed if i == j else w.detach() for i, w in enumerate(self.weights)])

            hessian = torch.autograd.functional.hessian(of_one, weight.detach().double())
            assert isinstance(hessian, torch.Tensor)
            found.append(float(hessian.reshape(weight.numel(), -1).diagonal().sum()))
        return found


def handle_of(index: int, module: torch.nn.Linear, rows: range) -> LinearHandle:
    return LinearHandle(
        id=LinearId(0, LINEAR_KINDS[index]),
        parallel="column",
        n=module.out_features,
        k=module.in_features,
        stage=0,
        tp_rank=0,
        tp_size=1,
        out_features=torch.arange(rows.start, rows.stop),
        in_features=torch.arange(module.in_features),
        context=StepContext(),
        module=module,
    )


def test_each_probe_is_a_product_with_the_exact_hessian() -> None:
    """Against a second backward: (1/ε_j)·v_j·(H·εv)_j, every linear moved at once by its own ε."""
    model = Small()
    found = traces(model.measure(3), model.elements)
    for probe in range(3):
        weights = [w.detach().clone().requires_grad_() for w in model.weights]
        gradients = torch.autograd.grad(model.loss(weights), weights, create_graph=True)
        v = [
            random_signs(derive_seed(SEED, probe, h.index), h.out_features, h.in_features).double()
            for h in model.handles
        ]
        steps = [FINE_STEP * float(w.detach().square().mean().sqrt()) for w in weights]
        direction = sum((g * e * s).sum() for g, e, s in zip(gradients, steps, v, strict=True))
        products = torch.autograd.grad(direction, weights)
        for j, (hv, e, s) in enumerate(zip(products, steps, v, strict=True)):
            assert float(found[j, probe]) == pytest.approx(float((s * hv).sum()) / e, rel=1e-4, abs=1e-6)
    assert model.passes == 6


def test_the_mean_is_the_exact_trace() -> None:
    model = Small()
    probes = 300
    found = traces(model.measure(probes), model.elements)
    error = found.std(dim=1) / probes**0.5
    for mean, deviation, exact in zip(found.mean(dim=1).tolist(), error.tolist(), model.exact(), strict=True):
        assert abs(mean - exact) < 4 * deviation
        assert deviation < 0.1 * exact


def test_eight_probes_order_linears_of_unlike_traces() -> None:
    model = Small()
    with torch.no_grad():
        model.weights[0].mul_(3.0)  # GELUs saturate: what follows is flat, and the last layer's inputs are large
    exact = model.exact()
    estimate = traces(model.measure(8), model.elements).mean(dim=1).tolist()
    assert sorted(range(3), key=lambda i: exact[i]) == sorted(range(3), key=lambda i: estimate[i])


def test_steps_that_bf16_rounds() -> None:
    """A step meant and a step taken differ; the estimate goes by the one taken."""
    model = Small(torch.bfloat16)
    probes = 200
    found = traces(model.measure(probes), model.elements)
    error = found.std(dim=1) / probes**0.5
    for mean, deviation, exact in zip(found.mean(dim=1).tolist(), error.tolist(), model.exact(), strict=True):
        assert abs(mean - exact) < 4 * deviation + 0.03 * exact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_weights_are_put_back_bit_by_bit(dtype: torch.dtype) -> None:
    model = Small(dtype)
    with torch.no_grad():
        model.weights[0][0, :3] = torch.tensor([-0.0, 1e-30, 3e7], dtype=dtype)  # what adding and subtracting loses
    before = [w.detach().clone() for w in model.weights]
    seen: list[bool] = []
    original = model.run_pass

    def failing() -> None:
        seen.append(any(not torch.equal(w, b) for w, b in zip(model.weights, before, strict=True)))
        original()
        if len(seen) == 7:
            raise RuntimeError("the seventh pass")

    model.run_pass = failing  # type: ignore[method-assign]
    model.measure(2)
    with pytest.raises(RuntimeError, match="seventh"):
        model.measure(2)
    assert all(seen)
    for weight, kept in zip(model.weights, before, strict=True):
        bits = [t.detach().view(torch.uint8) for t in (weight, kept)]
        assert torch.equal(*bits)


def test_a_shard_moves_as_its_rows_of_the_whole_do() -> None:
    model = Small()
    module, rows = model.modules[1], range(3, WIDTHS[2])
    moved: dict[str, list[torch.Tensor]] = {"whole": [], "shard": []}
    w2 = {h.name: float(h.weight.detach().square().sum()) for h in model.handles}
    shard = torch.nn.Linear(module.in_features, len(rows), bias=False, dtype=torch.float64)
    with torch.no_grad():
        shard.weight.copy_(module.weight[rows.start : rows.stop])
    part = handle_of(1, module, rows)
    part.module = shard
    for name, handle in (("whole", model.handles[1]), ("shard", part)):
        handle.weight.main_grad = torch.ones_like(handle.weight)  # type: ignore[attr-defined]

        def run_pass(name: str = name, handle: LinearHandle = handle) -> None:
            moved[name].append(handle.weight.detach().clone())

        HutchinsonTrace([handle], w2, SEED, 2).measure(run_pass)
    assert len(moved["whole"]) == 4
    for whole, part_of_it in zip(moved["whole"], moved["shard"], strict=True):
        assert torch.equal(whole[rows.start : rows.stop], part_of_it)


def test_a_weight_of_zeros_has_no_trace() -> None:
    model = Small()
    with torch.no_grad():
        model.weights[2].zero_()
    found = traces(model.measure(1), model.elements)
    assert float(found[2, 0]) == 0.0
    assert torch.isfinite(found).all()
