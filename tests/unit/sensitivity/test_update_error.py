"""Errors of an update have the size that column norms predict; shards of weight and optimizer add up."""

from dataclasses import replace

import pytest
import torch
from handles import handle_of

from snip_megatron.sensitivity import update_error
from snip_megatron.sensitivity.recorder import LinearRecorder
from snip_megatron.sensitivity.table import RHO_GRID
from snip_megatron.sensitivity.update_error import (
    AdamWState,
    StepScale,
    error_signs,
    gradient_of_a_step,
    linear_update_error,
    sink_update_error,
)

SIGN_ROWS, SIGN_COLS = torch.arange(1024), torch.arange(768)


def test_signs_are_even_and_independent() -> None:
    z = error_signs(5, SIGN_ROWS, SIGN_COLS)
    other = error_signs(6, SIGN_ROWS, SIGN_COLS)
    limit = 5.0 * z.numel() ** 0.5
    assert set(z.unique().tolist()) == {-1.0, 1.0}
    pairs = (z, z * other, z[1:] * z[:-1], z[:, 1:] * z[:, :-1], z[::2, ::2] * z[1::2, 1::2])
    # The last: the four corners of a rectangle, which a product of row and column signs would make equal.
    corners = z[::2, ::2] * z[1::2, ::2] * z[::2, 1::2] * z[1::2, 1::2]
    for product in (*pairs, corners):
        assert abs(float(product.sum())) < limit
    assert float(z.sum(0).square().mean()) < 1.3 * len(SIGN_ROWS)
    assert float(z.sum(1).square().mean()) < 1.3 * len(SIGN_COLS)


def test_a_shard_draws_what_the_whole_does() -> None:
    whole = error_signs(2**63 + 5, SIGN_ROWS, SIGN_COLS)
    rows, cols = torch.tensor([7, 3, 1000]), torch.tensor([5, 700])
    assert torch.equal(error_signs(2**63 + 5, rows, cols), whole[rows][:, cols])


LR, BETAS, EPS = 1e-3, (0.9, 0.95), 1e-8
N, K = 24, 40


def trained(steps: int, dtype: torch.dtype = torch.float64) -> AdamWState:
    """State of torch's AdamW of a weight [N, K] after ``steps`` steps on noisy gradients."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.nn.Parameter(torch.randn(N, K, generator=generator, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
    sizes = torch.rand(N, K, generator=generator, dtype=dtype).mul(9).exp() * 1e-7
    for _ in range(steps):
        weight.grad = (torch.randn(N, K, generator=generator, dtype=dtype) + 0.5) * sizes
        optimizer.step()
    zeros = torch.zeros(N * K, dtype=dtype)
    state = optimizer.state.get(weight, {"exp_avg": zeros, "exp_avg_sq": zeros})
    moments = (state[name].clone().view(-1) for name in ("exp_avg", "exp_avg_sq"))
    return AdamWState(0, N * K, steps, *moments, *BETAS, EPS)


def gradient(shape: tuple[int, ...], seed: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).view(-1) * 1e-5


def moved(g: torch.Tensor, error: torch.Tensor, state: AdamWState) -> float:
    """‖u(g + error) − u(g)‖² in float64, by the direction that test_compat_optimizers.py holds to torch's AdamW."""
    exact = replace(state, exp_avg=state.exp_avg.double(), exp_avg_sq=state.exp_avg_sq.double())
    change = exact.direction(g.double() + error) - exact.direction(g.double())
    return float(change.square().sum())


SCALE = StepScale(gradient=0.5, clip=0.8, tokens=64, tokens_per_step=256)


def whole_recorder() -> LinearRecorder:
    """A recorder that holds column norms of all of W."""
    handle = handle_of("decoder.layers.0.mlp.linear_fc1", N, K)
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(K, generator=generator, dtype=torch.float64)
    g = torch.rand(N, generator=generator, dtype=torch.float64) * 1e-8
    dx = torch.rand(2, K, generator=generator, dtype=torch.float64) * torch.tensor([[1e-3], [1e-2]])
    dg = torch.rand(2, N, generator=generator, dtype=torch.float64) * torch.tensor([[1e-11], [1e-10]])
    recorder = LinearRecorder(handle, ("fp8", "fp4"), 8)
    recorder.x_cols, recorder.g_cols, recorder.dx_cols, recorder.dg_cols = x, g, dx, dg
    return recorder


def totals() -> dict[str, float]:
    """x2, g2 and s2 as the table has them: G in units of ∂L/∂Y."""
    recorder = whole_recorder()
    g2 = float(recorder.g_cols.sum()) * SCALE.gradient**2
    return {"x2": float(recorder.x_cols.sum()), "g2": g2, "s2": 1.7e-7}


def test_linear_drift_is_adamw_s_answer_to_errors_of_the_predicted_size() -> None:
    state = trained(6, torch.float32)
    recorder, g = whole_recorder(), gradient((N, K)).float()
    drift2, wdrift2 = linear_update_error(recorder, g.view(N, K), state, SCALE, seed=33, **totals())

    of_a_step = gradient_of_a_step(g * 0.5 * 0.8, state, (64 / 256) ** 0.5)
    signs = error_signs(33, torch.arange(N), torch.arange(K)).view(-1).double()
    # ‖s‖² = s2 in all, brought from 64 tokens to 256: a mean over four times the tokens has a quarter of the variance.
    shape = torch.outer(recorder.g_cols, recorder.x_cols).view(-1)
    unit = (shape / shape.sum() * 1.7e-7 * 64 / 256).sqrt() * signs * 0.8

    for index in (0, 10, 16, 23):
        assert float(drift2[index]) == pytest.approx(moved(of_a_step, unit * RHO_GRID[index], state), rel=1e-2), index
    for f in range(2):
        variance = torch.outer(recorder.dg_cols[f], recorder.x_cols) + torch.outer(recorder.g_cols, recorder.dx_cols[f])
        variance = variance.view(-1) / 64 * 0.5**2 * 64 / 256
        expected = moved(of_a_step, variance.sqrt() * signs * 0.8, state)
        assert float(wdrift2[f]) == pytest.approx(expected, rel=1e-2)


def test_a_linear_that_saw_a_part_of_the_tokens() -> None:
    """An expert has its own number of tokens, and the same ratio of a probe's token noise to a step's."""
    state = trained(6, torch.float32)
    g = gradient((N, K)).float().view(N, K)
    whole = torch.cat(linear_update_error(whole_recorder(), g, state, SCALE, seed=33, **totals()))
    more = replace(SCALE, tokens=4 * SCALE.tokens, tokens_per_step=4 * SCALE.tokens_per_step)
    expert = linear_update_error(whole_recorder(), g, state, more, seed=33, **totals(), tokens=float(SCALE.tokens))
    torch.testing.assert_close(torch.cat(expert), whole, rtol=1e-12, atol=0.0)
    none, _ = linear_update_error(whole_recorder(), g, state, more, seed=33, s2=0.0, x2=0.0, g2=0.0, tokens=0.0)
    assert not none.any()


def test_parts_of_a_weight_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    g, state = gradient((N, K)).float().view(N, K), trained(6, torch.float32)
    whole = torch.cat(linear_update_error(whole_recorder(), g, state, SCALE, seed=33, **totals()))
    monkeypatch.setattr(update_error, "_ELEMENTS", 7 * K + 3)
    parts = torch.cat(linear_update_error(whole_recorder(), g, state, SCALE, seed=33, **totals()))
    torch.testing.assert_close(parts, whole, rtol=1e-9, atol=0.0)


def test_sink_errors_belong_to_rows_that_got_a_gradient() -> None:
    state = trained(6, torch.float32)
    g = gradient((N, K)).float().view(N, K)
    g[::2] = 0.0  # tokens that the probe's batch does not hold
    drift = sink_update_error(g, state, SCALE, seed=5, first_row=0)
    of_a_step = gradient_of_a_step(g.view(-1) * 0.5 * 0.8, state, 0.5)
    rms = g.double().square().mean(1, keepdim=True).sqrt()
    signs = error_signs(5, torch.arange(N), torch.arange(K)).double()
    error = (rms * signs * 0.5 * 0.8 * (64 / 256) ** 0.5).view(-1) * RHO_GRID[16]
    assert float(drift[16]) == pytest.approx(moved(of_a_step, error, state), rel=1e-2)
