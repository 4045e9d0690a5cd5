"""Update errors against two real steps of the optimizer from the same state, with and without an error."""

import copy
from collections.abc import Callable

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.optimizer import FP32Optimizer

from snip_megatron.megatron import compat
from snip_megatron.megatron.compat import check_reduced_models
from snip_megatron.megatron.compat.gradients import as_rows
from snip_megatron.precision.errors import SnipError
from snip_megatron.sensitivity.update_error import AdamWState, gradient_of_a_step

LR, N, K = 1e-2, 12, 20
SCALES = [1e-4, 1e-2, 0.3, 1.0, 10.0]
Maker = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), weight_decay=0.0)


class Trained:
    """A real optimizer after some steps on noisy gradients, in Megatron's wrapper, which only a GPU constructs."""

    def __init__(self, make: Maker, steps: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(7)
        self.weight = torch.nn.Parameter(self.random(N, K, dtype=dtype))
        self.mean = self.random(N, K, dtype=dtype)
        self.owner = make([self.weight])
        for _ in range(steps):
            self.weight.grad = self.mean + self.random(N, K, dtype=dtype)
            self.owner.step()
        self.optimizer = object.__new__(FP32Optimizer)
        self.optimizer.optimizer = self.owner

    def update(self) -> AdamWState:
        update = compat.update_of(self.optimizer, self.weight, 0)
        assert update is not None
        return update

    def random(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
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


def test_update_errors_are_those_of_two_real_steps_in_float64() -> None:
    trained = Trained(adamw, 9, torch.float64)
    g, unit = (trained.random(N * K, dtype=torch.float64) for _ in range(2))
    unchanged, update, base = g.clone(), trained.update(), trained.step(g)
    torch.testing.assert_close(update.direction(g), base, rtol=1e-9, atol=1e-9)
    expected = [float((trained.step(g + rho * unit) - base).square().sum()) for rho in SCALES]
    assert update.squared_error(g, unit, SCALES).tolist() == pytest.approx(expected, rel=1e-7)
    assert torch.equal(g, unchanged)


def test_the_gradient_of_a_probe_is_drawn_towards_the_optimizers_mean() -> None:
    trained = Trained(adamw, 0, torch.float32)
    for _ in range(5):
        trained.weight.grad = trained.mean.clone()
        trained.owner.step()
    g, update = trained.random(N * K, dtype=torch.float32), trained.update()
    torch.testing.assert_close(
        gradient_of_a_step(g, update, 0.5), (g + trained.mean.reshape(-1)) / 2, rtol=1e-4, atol=1e-6
    )
    assert gradient_of_a_step(g, update, 1.0) is g


def test_another_optimizer_is_refused_by_name() -> None:
    with pytest.raises(SnipError, match="Adagrad: its update is not known; weight divergence supports"):
        Trained(torch.optim.Adagrad, 0, torch.float32).update()


@pytest.mark.parametrize("fused", [False, True])
def test_weight_decay_within_the_gradient_of_adam_is_refused(fused: bool) -> None:
    """OptimizerConfig(decoupled_weight_decay=False) makes torch's Adam, or Apex's with adam_w_mode=False."""
    trained = Trained(lambda parameters: torch.optim.Adam(parameters, lr=LR, weight_decay=0.1), 2, torch.float32)
    group = trained.owner.param_groups[0]
    if fused:
        del group["decoupled_weight_decay"]
        trained.owner.adam_w_mode = 0
    with pytest.raises(SnipError, match="decoupled_weight_decay=False"):
        trained.update()
    if fused:
        trained.owner.adam_w_mode = 1
    else:
        group["weight_decay"] = 0.0
    trained.update()


def test_a_model_that_reduces_otherwise_is_refused() -> None:
    """A script may wrap its model with a configuration of its own."""
    model = torch.nn.Linear(2, 2)
    model.ddp_config = DistributedDataParallelConfig(reduce_scatter_with_fp32_accumulation=True)
    check_reduced_models([model])
    model.ddp_config.reduce_scatter_with_fp32_accumulation = False
    with pytest.raises(SnipError, match="wrapped without Megatron's --ddp-reduce-scatter-with-fp32-accumulation"):
        check_reduced_models([model])


@pytest.mark.parametrize("ranks", [2, 72])
@pytest.mark.parametrize("each", [1, 128 * 77 + 5, 128 * (2**16 + 1), 2**30 + 5])
def test_kernels_can_be_launched_on_a_bucket_of_any_size(ranks: int, each: int) -> None:
    """Without --overlap-grad-reduce a bucket is the whole model. CUDA has 65535 programs along the second dimension,
    each of which quantises 128 rows.
    """
    parts = torch.empty(ranks, each, device="meta")
    rows = as_rows(parts)
    assert rows.shape[1] % 128 == 0
    assert len(rows) % ranks == 0
    assert len(rows) <= 65535 * 128
    padding = rows.numel() // ranks - each
    assert 0 <= padding < max(128, parts.numel() / 2**14)
