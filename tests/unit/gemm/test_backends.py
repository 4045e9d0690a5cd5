"""What every backend does alike."""

import pytest
import torch

from snip_megatron.gemm.check import decibel
from snip_megatron.precision import Format

from .products import BACKENDS, EVEN, operands, run

BF16, FP8 = Format.BF16, Format.FP8
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
    """In FP32. The sum is rounded once, to the nearest number of the gradient's dtype."""
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
def test_a_not_a_number_spoils_its_own_tiles_only(name: str) -> None:
    x, w, g = operands(*EVEN)
    x[5, 300] = float("nan")
    y, _, gw = run(BACKENDS[name](), x, w, g, (FP8, FP8, FP8))
    assert y[5].isnan().all()
    assert not y[6:].isnan().any()
    assert gw[:, 300].isnan().all()
    assert not gw[:, :300].isnan().any()
