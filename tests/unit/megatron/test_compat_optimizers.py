"""Drift of every supported optimizer against two real steps from the same state, with and without an error."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.optimizer.emerging_optimizers import TensorParallelAdaptiveMuon, TensorParallelMuon
from megatron.core.optimizer.optimizer import FP32Optimizer

from snip_megatron.megatron import compat
from snip_megatron.precision.errors import SnipError
from snip_megatron.sensitivity.table import RHO_GRID
from snip_megatron.sensitivity.updates import Update, gradient_of_a_step

emerging = pytest.importorskip("emerging_optimizers")
from emerging_optimizers.scalar_optimizers import Lion  # noqa: E402

LR, N, K = 1e-2, 12, 20
SCALES = [1e-4, 1e-2, 0.3, 1.0, 10.0]
Maker = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def sgd(**fields: Any) -> Maker:
    return lambda parameters: torch.optim.SGD(parameters, lr=LR, **fields)


def lion(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return Lion(parameters, lr=LR, betas=(0.95, 0.98), weight_decay=0.0)


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), weight_decay=0.0)


def muon(**fields: Any) -> Maker:
    return lambda parameters: TensorParallelMuon(
        parameters, lr=LR, weight_decay=0.0, fp32_matmul_prec="highest", **fields
    )


def wrapped(owner: torch.optim.Optimizer) -> FP32Optimizer:
    """Megatron's wrapper, whose construction asks for a GPU."""
    wrapper = object.__new__(FP32Optimizer)
    wrapper.optimizer = owner
    return wrapper


class Trained:
    """A real optimizer after some steps on noisy gradients, in Megatron's wrapper."""

    def __init__(self, make: Maker, steps: int, dtype: torch.dtype, shape: tuple[int, ...] = (N, K)) -> None:
        self.generator = torch.Generator().manual_seed(7)
        self.weight = torch.nn.Parameter(self.random(shape, dtype))
        self.mean = self.random(shape, dtype)
        self.owner = make([self.weight])
        for _ in range(steps):
            self.weight.grad = self.mean + self.random(shape, dtype)
            self.owner.step()
        self.optimizer = wrapped(self.owner)
        self._steps = steps

    @functools.cached_property
    def update(self) -> Update:
        return self.update_after(self._steps)

    def update_after(self, steps: int) -> Update:
        update = compat.update_of(self.optimizer, self.weight, steps)
        assert update is not None
        return update

    def random(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype)

    def step(self, gradient: torch.Tensor) -> torch.Tensor:
        """(w_before − w_after) / lr of the next real step, which is taken back."""
        before, state = self.weight.detach().clone(), self.owner.state_dict()
        self.owner.load_state_dict(copy.deepcopy(state))  # the update under test reads the tensors it was made of
        self.weight.grad = gradient.view_as(self.weight).clone()
        self.owner.step()
        moved = (before - self.weight.detach()) / LR
        with torch.no_grad():
            self.weight.copy_(before)
        self.owner.load_state_dict(state)
        return moved.reshape(-1)

    def drift2(self, g: torch.Tensor, unit: torch.Tensor) -> list[float]:
        base = self.step(g)
        return [float((self.step(g + rho * unit) - base).double().square().sum()) for rho in SCALES]


EXACT = {
    "adamw": adamw,
    "lion": lion,
    "sgd": sgd(),
    "sgd-momentum": sgd(momentum=0.9),
    "sgd-damped": sgd(momentum=0.8, dampening=0.3),
    "sgd-nesterov": sgd(momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", list(EXACT))
def test_drift_is_two_steps_of_the_real_optimizer_in_float64(name: str) -> None:
    trained = Trained(EXACT[name], 9, torch.float64)
    g, unit = (trained.random((N * K,), torch.float64) for _ in range(2))
    torch.testing.assert_close(trained.update.direction(g), trained.step(g), rtol=1e-9, atol=1e-9)
    assert trained.update.squared_error(g, unit, SCALES).tolist() == pytest.approx(trained.drift2(g, unit), rel=1e-7)
    kept = g.clone()
    assert trained.update.squared_error(g, unit, SCALES, trained.update.direction(g)).tolist() == pytest.approx(
        trained.drift2(g, unit), rel=1e-7
    )
    assert torch.equal(g, kept)


@pytest.mark.parametrize("name", ["sgd-momentum", "sgd-damped", "sgd-nesterov"])
def test_sgd_is_linear_before_its_first_step_too(name: str) -> None:
    trained = Trained(EXACT[name], 0, torch.float64)
    g, unit = (trained.random((N * K,), torch.float64) for _ in range(2))
    torch.testing.assert_close(trained.update.direction(g), trained.step(g), rtol=1e-9, atol=1e-9)
    assert trained.update.squared_error(g, unit, SCALES).tolist() == pytest.approx(trained.drift2(g, unit), rel=1e-7)
    assert trained.update.mean() is None
    # Linear in ρ where a difference in float32 would have no digit left.
    tiny = trained.update.squared_error(g.float() * 1e6, unit.float(), [1e-8])
    assert float(tiny[0]) == pytest.approx(1e-16 * trained.drift2(g, unit)[3], rel=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(N, K), (K, N)])
def test_muon_is_two_steps_of_the_real_optimizer(nesterov: bool, shape: tuple[int, int]) -> None:
    """Its Newton-Schulz takes float32 only; matrix products are exact to that."""
    trained = Trained(muon(nesterov=nesterov, momentum=0.9), 6, torch.float32, shape)
    g, unit = (trained.random((N * K,), torch.float32) for _ in range(2))
    torch.testing.assert_close(trained.update.direction(g), trained.step(g), rtol=1e-4, atol=1e-4)
    expected, actual = trained.drift2(g, unit), trained.update.squared_error(g, unit, SCALES).tolist()
    assert actual[1:] == pytest.approx(expected[1:], rel=2e-2)


def test_muon_between_its_samples() -> None:
    """Drift is tabulated at 24 error sizes and evaluated at 8: what lies between is right to 10 %."""
    trained = Trained(muon(momentum=0.9), 6, torch.float32, (24, 40))
    g, unit = (trained.random((24 * 40,), torch.float32) for _ in range(2))
    whole = trained.update.squared_error(g, unit, RHO_GRID.tolist())
    each = torch.cat([trained.update.squared_error(g, unit, [rho]) for rho in RHO_GRID.tolist()])
    torch.testing.assert_close(whole[4:], each[4:], rtol=0.2, atol=0.0)  # of squares
    assert whole.shape == (len(RHO_GRID),)
    assert bool((whole[1:] >= whole[:-1] * 0.999).all())
    assert trained.update.squared_error(g, torch.zeros_like(g), RHO_GRID.tolist()).tolist() == [0.0] * len(RHO_GRID)
    back = trained.update.squared_error(g, unit, RHO_GRID.tolist()[::-1])
    torch.testing.assert_close(back.flip(0), whole)


@pytest.mark.parametrize("name", ["lion", "sgd-momentum", "sgd-damped", "adamw", "muon"])
def test_the_optimizer_s_own_mean(name: str) -> None:
    """Of a constant gradient it is that gradient; the probe's gradient is drawn towards it."""
    maker = muon(momentum=0.9) if name == "muon" else EXACT[name]
    trained = Trained(maker, 0, torch.float32)
    for _ in range(5):
        trained.weight.grad = trained.mean.clone()
        trained.owner.step()
    update = trained.update_after(5)
    mean = update.mean()
    torch.testing.assert_close(mean, trained.mean.reshape(-1), rtol=1e-4, atol=1e-6)
    g = trained.random((N * K,), torch.float32)
    torch.testing.assert_close(gradient_of_a_step(g, update, 0.5), (g + mean) / 2)
    assert gradient_of_a_step(g, update, 1.0) is g


def test_another_optimizer_is_refused_by_name() -> None:
    def adaptive(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return TensorParallelAdaptiveMuon(parameters, lr=LR)

    for make, name in ((torch.optim.Adagrad, "Adagrad"), (adaptive, "TensorParallelAdaptiveMuon")):
        with pytest.raises(
            SnipError,
            match=f"{name}: its update is not known; weight divergence supports --optimizer adam, sgd, lion, muon",
        ):
            _ = Trained(make, 0, torch.float32).update


@pytest.mark.parametrize("fused", [False, True])
def test_weight_decay_within_the_gradient_of_adam_is_refused(fused: bool) -> None:
    """OptimizerConfig(decoupled_weight_decay=False) makes torch's Adam, or Apex's with adam_w_mode=False."""
    trained = Trained(lambda parameters: torch.optim.Adam(parameters, lr=LR, weight_decay=0.1), 2, torch.float32)
    group = trained.owner.param_groups[0]
    if fused:
        del group["decoupled_weight_decay"]
        trained.owner.adam_w_mode = 0
    with pytest.raises(SnipError, match="decoupled_weight_decay=False") as caught:
        trained.update_after(2)
    assert "\n" not in str(caught.value)
    if fused:
        trained.owner.adam_w_mode = 1
    else:
        group["weight_decay"] = 0.0
    trained.update_after(2)
