"""RMSNorm in plain torch: against float64, and bit by bit against threads that are simulated one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from snip_megatron.quantization.rmsnorm import Order, RMSNorm, fits, reciprocal_rms, rmsnorm

F = np.float32
ONE_WARP, FOUR_WARPS = Order(8, 1, centred=True, rows=4), Order(8, 4, centred=True, rows=4)
SQUARES = Order(4, 4, centred=False)
SHAPES = [(ONE_WARP, 512), (ONE_WARP, 768), (ONE_WARP, 2048), (FOUR_WARPS, 4096), (SQUARES, 512), (SQUARES, 1536)]


def matrix(rows: int, features: int) -> torch.Tensor:
    """Rows of very different size, with and without a mean, and one of zeros."""
    generator = torch.Generator().manual_seed(features)
    x = torch.randn(rows, features, generator=generator) + torch.randn(rows, 1, generator=generator)
    x = x * torch.randn(rows, 1, generator=generator).mul(4).exp()
    x[0] = 0.0
    return x.to(torch.bfloat16)


def fma(a: F, b: F, c: F) -> F:
    return F(np.float64(a) * np.float64(b) + np.float64(c))


def simulated(row: np.ndarray, order: Order, eps: float) -> F:
    """The reciprocal RMS of one row, by loops over warps, lanes and loads as a CUDA kernel has them."""
    threads, features = 32 * order.warps, len(row)
    elements = [
        [row[(load * threads + t) * order.vector + j] for load in range(features // threads // order.vector)
         for j in range(order.vector)]
        for t in range(threads)
    ]  # fmt: skip
    warps = [elements[32 * warp : 32 * warp + 32] for warp in range(order.warps)]
    if order.centred:
        return centred(warps, features, eps)
    sums = []
    for warp in warps:
        lanes = [squares(thread, F(0)) for thread in warp]
        for offset in (16, 8, 4, 2, 1):  # shuffles down
            lanes = [F(lanes[i] + lanes[min(i + offset, 31)]) for i in range(32)]
        sums.append(lanes[0])
    total = F(F(sums[0] + sums[2]) + F(sums[1] + sums[3]))
    return F(1) / np.sqrt(F(F(total / F(features)) + F(eps)))


def squares(elements: list[F], mean: F) -> F:
    total = F(0)
    for element in elements:
        total = fma(F(element - mean), F(element - mean), total)
    return total


def butterfly(lanes: list[F]) -> F:
    for distance in (1, 2, 4, 8, 16):
        lanes = [F(lanes[i] + lanes[i ^ distance]) for i in range(32)]
    return lanes[0]


def centred(warps: list[list[list[F]]], features: int, eps: float) -> F:
    of_warp, found = features // len(warps), []
    for warp in warps:
        lanes = []
        for thread in warp:
            total = F(0)
            for element in thread:
                total = F(total + element)
            lanes.append(total)
        mean = F(butterfly(lanes) * (F(1) / F(of_warp)))
        found.append((F(of_warp), mean, butterfly([squares(thread, mean) for thread in warp])))
    if len(found) == 4:
        found = [merged(found[0], found[2]), merged(found[1], found[3])]
        found = [merged(found[0], found[1])]
    (_, mean, deviations), of_row = found[0], F(1) / F(features)
    return F(1) / np.sqrt(F(fma(mean, mean, F(deviations * of_row)) + F(eps)))


def merged(a: tuple[F, F, F], b: tuple[F, F, F]) -> tuple[F, F, F]:
    """Chan's update with the numbers of elements as factors, as Transformer Engine writes it."""
    (n_a, mean_a, squares_a), (n_b, mean_b, squares_b) = a, b
    reciprocal, delta = F(1) / F(n_a + n_b), F(mean_a - mean_b)
    between = F(F(F(delta * delta) * n_a) * n_b)
    return (
        F(n_a + n_b),
        F(fma(mean_a, n_a, F(n_b * mean_b)) * reciprocal),
        fma(reciprocal, between, F(squares_a + squares_b)),
    )


@pytest.mark.parametrize(("order", "features"), SHAPES)
def test_additions_have_the_order_of_the_threads(order: Order, features: int) -> None:
    x = matrix(8, features)
    found = reciprocal_rms(x, RMSNorm(order, 1e-5)).numpy()
    expected = np.array([simulated(row, order, 1e-5) for row in x.float().numpy()])
    assert found.dtype == np.float32
    assert (found.view(np.int32) == expected.view(np.int32)).all()


def test_orders_differ() -> None:
    """Otherwise the comparison above would show nothing."""
    x = matrix(64, 4096)
    found = [reciprocal_rms(x, RMSNorm(order, 1e-5)) for order in (ONE_WARP, FOUR_WARPS, SQUARES)]
    assert all((a != b).any() for i, a in enumerate(found) for b in found[:i])


@pytest.mark.parametrize(("order", "features"), SHAPES)
@pytest.mark.parametrize("zero_centred", [False, True])
def test_numbers_are_those_of_float64(order: Order, features: int, zero_centred: bool) -> None:
    x, gamma = matrix(64, features), torch.randn(features).to(torch.bfloat16)
    norm = RMSNorm(order, 1e-5, zero_centred)
    rs = reciprocal_rms(x, norm)
    wide = x.double()
    exact = 1 / torch.sqrt(wide.square().mean(1) + 1e-5)
    torch.testing.assert_close(rs.double(), exact, rtol=1e-5, atol=0)
    y = wide * exact[:, None] * (gamma.double() + zero_centred)
    torch.testing.assert_close(rmsnorm(x, gamma, rs, norm).double(), y, rtol=2**-8 + 1e-5, atol=1e-30)


def test_the_result_is_rounded_once() -> None:
    x, gamma = matrix(64, 512), torch.randn(512).to(torch.bfloat16)
    norm = RMSNorm(ONE_WARP, 1e-5, zero_centred=True)
    rs = reciprocal_rms(x, norm)
    found = rmsnorm(x, gamma, rs, norm)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, ((x.float() * rs[:, None]) * (1 + gamma.float())).to(torch.bfloat16))
    assert not torch.equal(found, (x.float() * rs[:, None]).to(torch.bfloat16) * (1 + gamma))


@pytest.mark.parametrize(("rows", "features", "expected"), [(8, 512, True), (6, 512, False), (8, 500, False)])
def test_for_which_matrices_an_order_holds(rows: int, features: int, expected: bool) -> None:
    assert fits(torch.zeros(rows, features), torch.zeros(features), RMSNorm(ONE_WARP, 1e-5)) is expected
