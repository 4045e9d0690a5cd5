"""An amax that comes with a shard: every backend scales by it, whatever the shard's own."""

import pytest
import torch

from snip_megatron.gemm.backend import REFERENCE, GemmBackend
from snip_megatron.gemm.hopper import HopperBackend
from snip_megatron.gemm.operands import assemble, flatten
from snip_megatron.gemm.scaled import ScaledProducts
from snip_megatron.precision import Format, Gemm
from snip_megatron.quantization import packed
from snip_megatron.quantization.operands import GradientKeys, OperandSpec

from .emulated_scaled_mm import scaled_mm

TENSOR, NVFP4 = Format.FP8_TENSOR, Format.NVFP4
BACKENDS = [REFERENCE, HopperBackend(packed, ScaledProducts(scaled_mm))]


@pytest.mark.parametrize("fmt", [TENSOR, NVFP4])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_shard_with_the_amax_of_the_whole_gives_its_share_of_the_whole(backend: GemmBackend, fmt: Format) -> None:
    """A row parallel linear: rank 0 of two holds half of X's and W's columns, without the largest numbers."""
    generator = torch.Generator().manual_seed(3)
    x, w, g = (torch.randn(shape, generator=generator).bfloat16() for shape in ((128, 512), (256, 512), (128, 256)))
    x[0, -1], w[0, -1] = 6.0, -5.0
    keys = GradientKeys(1, 2, torch.arange(256))

    def gradients(x: torch.Tensor, w: torch.Tensor, x_amax: torch.Tensor | None, w_amax: torch.Tensor | None) -> tuple:
        _, kept = backend.quantize(x, OperandSpec(None, fmt, amax=x_amax))
        tensors, rest = flatten(kept)
        _, w_side = backend.quantize(w, OperandSpec(None, fmt, weight=True, amax=w_amax))
        g_row, g_col = backend.quantize(g, OperandSpec(fmt, fmt, keys=keys))
        return backend.multiply(Gemm.DGRAD, g_row, w_side, torch.float32), backend.multiply(
            Gemm.WGRAD, g_col, assemble((tensors, rest)), torch.float32
        )

    whole = gradients(x, w, None, None)
    share = gradients(x[:, :256], w[:, :256], x.float().abs().amax(), w.float().abs().amax())
    own = gradients(x[:, :256], w[:, :256], None, None)
    for all_columns, half, other in zip(whole, share, own, strict=True):
        torch.testing.assert_close(half, all_columns[:, :256], rtol=1e-5, atol=1e-4)
        assert not torch.allclose(other, all_columns[:, :256], rtol=1e-3, atol=1e-3)
