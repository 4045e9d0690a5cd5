"""Token shards that are quantised, packed and joined give the operands, and the GEMMs, of the whole matrix."""

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from snip_megatron.layers.amax import gathered_amaxes
from snip_megatron.numerics.products.backend import REFERENCE, GemmBackend
from snip_megatron.numerics.products.operands import GemmOperand, assemble, flatten
from snip_megatron.numerics.products.shards import QuantizedShard
from snip_megatron.numerics.quantize.operands import OperandSpec
from snip_megatron.numerics.quantize.reference import ROTATED
from snip_megatron.numerics.quantize.wire import bytes_per_element
from snip_megatron.precision import Format, Gemm
from snip_megatron.precision.errors import SnipError

from .interpreted import shard_differences
from .products import BACKENDS, hopper, keys, operands, run

BF16, FP8, FP4, TENSOR = Format.BF16, Format.FP8, Format.FP4, Format.FP8_TENSOR
NVFP4, MXFP8 = Format.NVFP4, Format.MXFP8
RANKS, SHAPE = 3, (384, 144, 208)  # T, N, K: 128 tokens a rank, N and K no multiple of a tile
TRIPLES = [
    *((fmt, fmt, fmt) for fmt in Format if fmt not in ROTATED),
    (FP8, FP4, BF16), (BF16, FP8, FP4), (FP4, FP8, FP8), (TENSOR, NVFP4, FP4), (MXFP8, FP4, TENSOR),
]  # fmt: skip


def joined(
    backend: GemmBackend, sides: list[GemmOperand], fmt: Format, axis: int
) -> tuple[GemmOperand, list[QuantizedShard]]:
    """The operand that every rank makes of all shards, after autograd has kept them."""
    shards = [assemble(flatten(backend.pack(side, fmt, axis))) for side in sides]
    assert all(tensor.is_contiguous() for shard in shards for tensor in shard.tensors)
    stacked = tuple(torch.stack(same) for same in zip(*(shard.tensors for shard in shards), strict=True))
    return shards[0].opened(stacked), shards


def by_shards(backend: GemmBackend, x: Tensor, w: Tensor, g: Tensor, formats: Any) -> list[Tensor]:
    """Y, ∂L/∂X and ∇W where X and G are quantised as shards of tokens."""
    fprop, dgrad, wgrad = formats
    shards = list(zip(x.chunk(RANKS), g.chunk(RANKS), strict=True))
    of_x = [backend.quantize(part, OperandSpec(fprop, wgrad, amax=x.abs().max().float())) for part, _ in shards]
    of_g = []
    for i, (_, part) in enumerate(shards):
        own_keys = keys(w.shape[0])._replace(first_row=i * len(part))
        of_g.append(backend.quantize(part, OperandSpec(dgrad, wgrad, keys=own_keys, amax=g.abs().max().float())))
    w_row, w_col = backend.quantize(w, OperandSpec(fprop, dgrad, weight=True))
    (x_row, _), (x_col, _) = (joined(backend, [pair[i] for pair in of_x], (fprop, wgrad)[i], 1 - i) for i in (0, 1))
    (g_row, _), (g_col, _) = (joined(backend, [pair[i] for pair in of_g], (dgrad, wgrad)[i], 1 - i) for i in (0, 1))
    return [
        backend.multiply(Gemm.FPROP, x_row, w_row, x.dtype),
        backend.multiply(Gemm.DGRAD, g_row, w_col, g.dtype),
        backend.multiply(Gemm.WGRAD, g_col, x_col, torch.float32),
    ]


def differing(backend: GemmBackend, formats: Any, shape: tuple[int, int, int] = SHAPE) -> list[str]:
    """Which of Y, ∂L/∂X, ∇W differ by a bit from those of the whole matrices."""
    x, w, g = operands(*shape)
    pairs = zip(by_shards(backend, x, w, g, formats), run(backend, x, w, g, formats), strict=True)
    return [name for name, (found, expected) in zip(("Y", "dX", "dW"), pairs, strict=True) if not found.equal(expected)]


@pytest.mark.parametrize("name", ["reference", "hopper"])
@pytest.mark.parametrize("formats", TRIPLES, ids=lambda triple: "-".join(f.value for f in triple))
def test_bits_are_those_of_the_whole(name: str, formats: Any) -> None:
    assert not differing(BACKENDS[name](), formats)


@pytest.mark.parametrize("name", ["reference", "hopper"])
@pytest.mark.parametrize("fmt", [FP8, FP4, TENSOR])
@pytest.mark.parametrize("axis", [0, 1])
def test_shards_have_the_bytes_of_the_format(name: str, fmt: Format, axis: int) -> None:
    backend, x = BACKENDS[name](), operands(256, 128, 512)[0]
    side = backend.quantize(x, OperandSpec(fmt, fmt))[1 - axis]
    sent = sum(tensor.nbytes for tensor in backend.pack(side, fmt, axis).tensors)
    assert sent == bytes_per_element(fmt) * x.numel()


@pytest.mark.parametrize("fmt", [FP8, FP4, TENSOR, NVFP4, MXFP8, BF16])
def test_a_nan_stays_in_its_tile_as_without_shards(fmt: Format) -> None:
    x, w, g = operands(*SHAPE)
    x[200, 3] = torch.nan
    x[10, 7] = torch.inf
    expected = run(REFERENCE, x, w, g, (fmt, BF16, fmt))
    shards = x.chunk(RANKS)
    amaxes = [gathered_amaxes(part, (fmt, fmt), None) for part in shards]
    both = []
    for place, axis in ((0, 1), (1, 0)):
        known = [pair[place] for pair in amaxes if pair[place] is not None]
        amax = torch.stack(known).amax() if known else None  # of torch: a NaN is the largest
        sides = [REFERENCE.quantize(part, OperandSpec(fmt, fmt, amax=amax))[place] for part in shards]
        both.append(joined(REFERENCE, sides, fmt, axis)[0])
    w_row, _ = REFERENCE.quantize(w, OperandSpec(fmt, None, weight=True))
    _, g_col = REFERENCE.quantize(g, OperandSpec(None, fmt, keys=keys(w.shape[0])))
    found = [
        REFERENCE.multiply(Gemm.FPROP, both[0], w_row, x.dtype),
        REFERENCE.multiply(Gemm.WGRAD, g_col, both[1], torch.float32),
    ]
    for one, other in zip(found, (expected[0], expected[2]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert fmt is TENSOR or not found[0].isnan().all()


def test_backends_without_gathers_say_so() -> None:
    emulated = BACKENDS["emulated"]()
    emulated.check_gathers([BF16])
    plain = [fmt for fmt in Format if fmt not in ROTATED]
    for backend in (REFERENCE, hopper()):
        backend.check_gathers(plain)
        with pytest.raises(SnipError, match="combined with nvfp4_hadamard: shards are not transformed before"):
            backend.check_gathers([FP8, Format.NVFP4_HADAMARD])
    mixed = hopper(others=emulated)
    mixed.check_gathers([FP8, FP4, TENSOR, BF16])
    with pytest.raises(SnipError, match="gather and all cannot be combined with mxfp8, nvfp4 on the emulated GEMMs"):
        mixed.check_gathers([FP8, NVFP4, MXFP8])


# -- Triton's kernels ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("formats", [("fp8", "fp4", "fp4"), ("fp4", "fp8", "fp8"), ("fp8_tensor", "fp8", "fp8_tensor")])
def test_kernels_give_the_bits_of_the_whole(interpreter: ProcessPoolExecutor, formats: tuple[str, str, str]) -> None:
    assert not interpreter.submit(shard_differences, (384, 64, 144), formats).result(timeout=300)
