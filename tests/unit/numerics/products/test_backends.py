"""What every backend does alike."""

import pytest
import torch

from snip_megatron.numerics.products.backend import assemble, flatten
from snip_megatron.numerics.products.check import decibel
from snip_megatron.numerics.quantize.operands import OperandSpec
from snip_megatron.precision import Format, Gemm

from .products import BACKENDS, EVEN, keys, operands, run

BF16 = Format.BF16
every_backend = pytest.mark.parametrize("name", BACKENDS)
every_format = pytest.mark.parametrize("fmt", list(Format), ids=lambda fmt: fmt.value)


@every_backend
def test_bf16_is_the_plain_product(name: str) -> None:
    x, w, g = operands(*EVEN)
    y, d, gw = run(BACKENDS[name](), x, w, g, (BF16, BF16, BF16))
    assert torch.equal(y, x @ w.t())
    assert torch.equal(d, g @ w)
    exact = g.double().t() @ x.double()
    assert decibel(exact, gw) > 120
    assert decibel(exact, (g.t() @ x).float()) < 70  # what a bf16 result would lose


@every_backend
@every_format
@pytest.mark.parametrize("tokens", [136, 0])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8 * 1.001)], ids=str)
def test_wgrad_is_added_to_a_gradient(name: str, fmt: Format, tokens: int, dtype: torch.dtype, error: float) -> None:
    """It is added in FP32. The sum is rounded once, to the nearest number of the gradient's dtype."""
    x, w, g = operands(tokens, 144, 208)
    main_grad = torch.randn(144, 208).to(dtype)
    before = main_grad.clone()
    y, d, alone = run(BACKENDS[name](), x, w, g, (fmt, fmt, fmt))
    *_, added = run(BACKENDS[name](), x, w, g, (fmt, fmt, fmt), out=main_grad)
    assert added is main_grad
    torch.testing.assert_close(main_grad.float(), before.float() + alone, rtol=error, atol=1e-6)
    assert [(t.shape, t.dtype) for t in (y, d, alone)] == [
        ((tokens, 144), x.dtype), ((tokens, 208), x.dtype), ((144, 208), torch.float32)
    ]  # fmt: skip
    assert bool(alone.any()) == (tokens > 0)


@every_backend
@pytest.mark.parametrize("fmt", [Format.FP8_TENSOR, Format.NVFP4], ids=lambda fmt: fmt.value)
def test_a_shard_with_the_amax_of_the_whole_gives_its_share_of_the_whole(name: str, fmt: Format) -> None:
    """A row parallel linear: rank 0 of two holds half of X's and W's columns, without the largest numbers."""
    backend, (x, w, g) = BACKENDS[name](), operands(128, 256, 512)
    x[0, -1], w[0, -1] = 100.0, -9.0

    def gradients(x: torch.Tensor, w: torch.Tensor, *amaxes: torch.Tensor | None) -> list[torch.Tensor]:
        _, x_side = backend.quantize(x, OperandSpec(None, fmt, amax=amaxes[0]))
        _, w_side = backend.quantize(w, OperandSpec(None, fmt, weight=True, amax=amaxes[1]))
        g_row, g_col = backend.quantize(g, OperandSpec(fmt, fmt, keys=keys(256)))
        return [
            backend.multiply(Gemm.DGRAD, g_row, w_side, torch.float32),
            backend.multiply(Gemm.WGRAD, g_col, assemble(flatten(x_side)), torch.float32),
        ]

    whole = gradients(x, w, None, None)
    share = gradients(x[:, :256], w[:, :256], x.float().abs().amax(), w.float().abs().amax())
    with_local_amax = gradients(x[:, :256], w[:, :256], None, None)
    for all_columns, half, other in zip(whole, share, with_local_amax, strict=True):
        torch.testing.assert_close(half, all_columns[:, :256], rtol=1e-5, atol=1e-4)
        assert not torch.allclose(other, all_columns[:, :256], rtol=1e-3, atol=1e-3)
